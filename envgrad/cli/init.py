"""``envgrad init``: a folder with an environment, its test, a configuration and a README."""

from __future__ import annotations

import keyword
import sys
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from string import Template

from rich.console import Console
from rich.text import Text

from envgrad.errors import ConfigurationError

FILES: Mapping[str, str] = {
    "$name.py": "environment.py.txt",
    "test_$name.py": "test_environment.py.txt",
    "train.yaml": "train.yaml.txt",
    "README.md": "README.md.txt",
}
"""What is made, and from which template."""


def run_init(path: Path) -> None:
    """Make the folder, and say what comes next.

    Raises:
        ConfigurationError: the name cannot be a module's, or something is there already.
    """
    made = scaffold(path)
    console = Console()
    for file in made:
        console.print(Text(f"made {file}"), soft_wrap=True)
    name = path.name
    steps = [f"cd {path}", "pytest", f"envgrad play {name}.py:{class_name(name)}", "envgrad train --config train.yaml"]
    console.print(Text("Next:"))
    for step in steps:
        console.print(Text(f"  {step}", style="bold cyan"), soft_wrap=True)


def class_name(name: str) -> str:
    """The class of a module.

    Example:
        >>> class_name("number_game"), class_name("go9x9")
        ('NumberGame', 'Go9x9')
    """
    return "".join(word[:1].upper() + word[1:] for word in name.split("_"))


def scaffold(path: Path) -> list[Path]:
    """Write the files into a folder that is new or empty; nothing is overwritten.

    Raises:
        ConfigurationError: the name cannot be a module's, something is there already, or it cannot be written.
    """
    name = path.name
    _check_name(name, path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigurationError(f"{path} exists, and nothing is overwritten; give another name, or remove it")
    folder = files("envgrad.cli") / "templates"
    words = {"name": name, "cls": class_name(name)}
    made = []
    try:
        path.mkdir(parents=True, exist_ok=True)
        for target, source in FILES.items():
            made.append(path / Template(target).substitute(words))
            text = (folder / source).read_text(encoding="utf-8")
            made[-1].write_text(Template(text).substitute(words), encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}; choose another place") from error
    return made


def _check_name(name: str, path: Path) -> None:
    why = None
    fixed = "".join(letter if letter.isalnum() else "_" for letter in name.lower()).strip("_")
    if not (name.isidentifier() and name.isascii()) or keyword.iskeyword(name) or not class_name(name).isidentifier():
        why = "is no name that Python can import"
    elif name.startswith("test_"):
        why, fixed = "begins as a test does", name.removeprefix("test_")
    elif name in sys.stdlib_module_names or name == "envgrad":
        why, fixed = "is the name of another module", f"{name}_game"
    elif name[:1].isupper():
        why = "begins with a capital, as classes do"
    if why is None:
        return
    good = fixed if fixed.isidentifier() and fixed.isascii() and not keyword.iskeyword(fixed) else "number_game"
    raise ConfigurationError(f"NAME {name!r} {why}; write for example {path.with_name(good)}")
