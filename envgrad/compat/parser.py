"""``TrlParser``: dataclasses from a command line and a YAML file."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import UnionType
from typing import Any, TextIO, Union, get_args, get_origin

from transformers import HfArgumentParser

from envgrad.errors import ConfigurationError


class TrlParser(HfArgumentParser):
    """``transformers.HfArgumentParser`` that also reads ``--config file.yaml``.

    Values of the file replace the dataclasses' defaults; flags win over the file. A mapping under ``env`` in the file
    sets environment variables.

    Args:
        dataclass_types: A dataclass, or several; none of them may have a field ``config``.
        kwargs: For ``argparse.ArgumentParser``.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Arguments:
        ...     steps: int = 1
        ...     name: str = "run"
        >>> TrlParser(Arguments).parse_args_and_config(["--steps", "3"])
        (Arguments(steps=3, name='run'),)
    """

    def __init__(self, dataclass_types: type | Iterable[type] | None = None, **kwargs: Any) -> None:
        types = [dataclass_types] if isinstance(dataclass_types, type) else list(dataclass_types or ())
        for kind in types:
            if "config" in {f.name for f in fields(kind)}:
                raise ConfigurationError(
                    f"{kind.__name__} has a field 'config', which is the flag for the YAML file; rename the field"
                )
        super().__init__(dataclass_types=types, **kwargs)

    def parse_args_and_config(
        self,
        args: Iterable[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
    ) -> tuple[Any, ...]:
        """An instance of each dataclass.

        Args:
            args: The words of the command line; ``sys.argv[1:]`` if None.
            return_remaining_strings: Append a list of the words that no dataclass has, of the file and of the flags.
            fail_with_unknown_args: Whether names in the file that no dataclass has are an error.
            separate_remaining_strings: Append that list as two: the file's, the flags'.

        Raises:
            ConfigurationError: a file that cannot be read, that is no mapping, or that has unknown names.
        """
        words = list(sys.argv[1:] if args is None else args)
        path = _take_config(words)
        unknown = [] if path is None else self.set_defaults_with_config(**_read(path))
        output = self.parse_args_into_dataclasses(args=words, return_remaining_strings=return_remaining_strings)
        if return_remaining_strings:
            *parsed, rest = output
            return (*parsed, unknown, rest) if separate_remaining_strings else (*parsed, unknown + rest)
        if unknown and fail_with_unknown_args:
            names = ", ".join(name.removeprefix("--") for name in unknown[::2])
            raise ConfigurationError(f"{path} has names that no option has: {names}; remove or correct them")
        return tuple(output)

    @staticmethod
    def _parse_dataclass_field(parser: ArgumentParser, field: Field[Any]) -> None:
        """As transformers does, but a field that may be a list takes several words, and a pair two."""
        members = get_args(field.type) if get_origin(field.type) in (Union, UnionType) else (field.type,)
        for member in members:
            origin, of = get_origin(member), get_args(member)
            if origin is list:
                field.type = member if field.default is MISSING else member | None
            elif origin is tuple and of and set(of) <= {int, float, str}:
                flags = [f"--{field.name}", f"--{field.name.replace('_', '-')}"]
                help_text = field.metadata.get("help")
                parser.add_argument(*flags, nargs=len(of), type=of[0], default=field.default, help=help_text)
                return
        HfArgumentParser._parse_dataclass_field(parser, field)

    def set_defaults_with_config(self, **kwargs: object) -> list[str]:
        """Make ``kwargs`` the options' defaults; what no option has comes back as words of a command line."""
        used = set()
        for action in self._actions:
            if action.dest in kwargs:
                action.default = kwargs[action.dest]
                action.required = False
                used.add(action.dest)
        return [word for name, value in kwargs.items() if name not in used for word in (f"--{name}", str(value))]


def _take_config(words: list[str]) -> str | None:
    """Take ``--config path`` or ``--config=path`` out of ``words``."""
    for index, word in enumerate(words):
        if word.startswith("--config="):
            return words.pop(index).removeprefix("--config=")
        if word == "--config":
            if index + 1 == len(words):
                raise ConfigurationError("--config has no value; give the path of a YAML file")
            path = words[index + 1]
            del words[index : index + 2]
            return path
    return None


def _read(path: str) -> dict[str, object]:
    """The file's values, without ``env``, whose variables are set."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigurationError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"--config {path} must be a YAML mapping of options to values")
    variables = content.pop("env", None) or {}
    if not isinstance(variables, dict):
        raise ConfigurationError(f"env in {path} must be a mapping of environment variables to values")
    os.environ.update({str(name): str(value) for name, value in variables.items()})
    return {str(name): value for name, value in content.items()}


def init_zero_verbose() -> None:
    """Show errors only, through rich, and send warnings to the log; for the top of a script."""
    import logging
    import warnings

    from rich.logging import RichHandler

    def to_log(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        logging.getLogger("py.warnings").warning("%s:%s: %s: %s", filename, lineno, category.__name__, message)

    logging.basicConfig(format="%(message)s", datefmt="[%X]", handlers=[RichHandler()], level=logging.ERROR)
    warnings.showwarning = to_log
