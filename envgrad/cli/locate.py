"""From ``module:Class`` on the command line to the class."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from envgrad.cli.flags import nearest
from envgrad.errors import ConfigurationError

_FORM = "write module:Class, path/to/file.py:Class or name=module:Class"


def locate_environments(specs: Sequence[str]) -> Callable[[], object] | dict[str, Callable[[], object]]:
    """What ``environment_factory`` takes: one class, or several by name.

    A class without a name of its own in a mixture goes by its class name.

    Example:
        >>> locate_environments(["envgrad.starter.compass:Compass"]).__name__
        'Compass'
        >>> sorted(locate_environments(["a=envgrad.starter.compass:Compass", "b=envgrad.starter.compass:Compass"]))
        ['a', 'b']

    Raises:
        ConfigurationError: no environment, no such module, file or class, something that cannot be called, or one
            name twice.
    """
    if not specs:
        raise ConfigurationError(f"nothing to learn from: give --environment; {_FORM}")
    named = [_split_name(spec) for spec in specs]
    if len(named) == 1 and named[0][0] is None:
        return locate(named[0][1])
    found: dict[str, Callable[[], object]] = {}
    for given, spec in named:
        factory = locate(spec)
        name = given or str(getattr(factory, "__name__", "environment"))
        if name in found:
            raise ConfigurationError(f"two environments are named {name!r}; tell them apart: other_name={spec}")
        found[name] = factory
    return found


def _split_name(spec: str) -> tuple[str | None, str]:
    name, equals, rest = spec.partition("=")
    if not equals:
        return None, spec
    if not name.isidentifier():
        raise ConfigurationError(f"environment {spec!r}: {name!r} cannot be a name, which is one word; {_FORM}")
    return name, rest


def locate(spec: str) -> Callable[[], object]:
    """The class (or other callable without arguments) that ``module:Class`` or ``file.py:Class`` names.

    The current folder is searched first.

    Raises:
        ConfigurationError: no such module, file or class, or something that cannot be called.
    """
    place, colon, attribute = spec.rpartition(":")
    if not colon or not place or not attribute:
        raise ConfigurationError(f"environment {spec!r} names no class; {_FORM}")
    module = _load_file(Path(place), spec) if place.endswith(".py") else _load_module(place, spec)
    value: object = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise ConfigurationError(_no_class(spec, part, value, module))
        value = getattr(value, part)
    if not callable(value):
        raise ConfigurationError(
            f"environment {spec!r} is a {type(value).__name__}, not a class; {_candidates(module) or _FORM}"
        )
    return value


def _no_class(spec: str, part: str, value: object, module: ModuleType) -> str:
    where = value.__name__ if isinstance(value, (ModuleType, type)) else type(value).__name__
    hint = nearest(part, dir(value)).removeprefix("; ")
    return f"environment {spec!r}: {where} has no {part!r}; {hint or _candidates(module) or _FORM}"


def _candidates(module: ModuleType) -> str:
    """The environments that a module defines: its classes with a ``reset``."""
    names = [
        name
        for name, member in inspect.getmembers(module, inspect.isclass)
        if callable(getattr(member, "reset", None)) and member.__module__ == module.__name__
    ]
    return f"its environments: {', '.join(names)}" if names else ""


def _search_first(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _load_module(name: str, spec: str) -> ModuleType:
    _search_first(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A module that it imports in turn is the user's to mend, with its traceback.
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise
        fix = _FORM
        as_file = Path(name.replace(".", os.sep) + ".py")
        if name.endswith(("/", os.sep)) or os.sep in name or "/" in name:
            fix = "a path ends in .py: path/to/file.py:Class"
        elif not as_file.is_file():
            fix = f"it is neither installed nor a file below {Path.cwd()}"
        raise ConfigurationError(f"environment {spec!r}: there is no module {error.name!r}; {fix}") from error
    except TypeError as error:
        if not name.startswith("."):
            raise
        raise ConfigurationError(f"environment {spec!r}: a module's name does not begin with a dot; {_FORM}") from error


def _load_file(path: Path, spec: str) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise ConfigurationError(f"environment {spec!r}: there is no file {path}; check the path")
    _search_first(path.parent)  # its neighbours can be imported, as when the file is run
    loaded = sys.modules.get(path.stem)
    if loaded is not None and loaded.__file__ is not None and Path(loaded.__file__) == path:
        return loaded
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    if module_spec is None or module_spec.loader is None:
        raise AssertionError(f"a .py file always has a loader: {path}")
    module = importlib.util.module_from_spec(module_spec)
    # Under its own name, unless that is taken by another module that may be in use.
    sys.modules.setdefault(path.stem, module)
    module_spec.loader.exec_module(module)
    return module
