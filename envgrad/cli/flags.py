"""Command-line flags and YAML values for the fields of a configuration dataclass.

::

    dataclass --read_fields--> {name: ConfigField}
    ["--learning-rate", "1e-3", "--no-bf16"] --parse_flags--> {"learning_rate": 0.001, "bf16": False}
    {"learning_rate": "1e-3"} (YAML)         --convert--> 0.001

The types are those of the dataclass; its own ``__post_init__`` checks what goes beyond them.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from envgrad.errors import ConfigurationError

_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConfigField:
    """One field of the configuration, as a flag."""

    name: str
    kinds: tuple[type, ...]
    """the union's members of: bool, int, float, str, dict, list; empty if the field has no form in text"""
    optional: bool
    choices: tuple[str, ...] = ()
    default: object = None
    help: str = ""
    owner: str = ""
    """name of the class that defines the field"""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def is_switch(self) -> bool:
        """Whether ``--flag`` alone means true."""
        return bool in self.kinds

    @property
    def rule(self) -> str:
        """What a value must be."""
        if self.choices:
            return f"must be one of {', '.join(self.choices)}"
        words = {
            bool: "true or false",
            int: "a whole number",
            float: "a number",
            str: "text",
            dict: "a JSON object such as '{\"key\": 1}'",
            list: "a list",
        }
        allowed = [word for kind, word in words.items() if kind in self.kinds]
        return f"must be {' or '.join([*allowed, 'none'] if self.optional else allowed)}"


def read_fields(config: type) -> dict[str, ConfigField]:
    """The flags of a dataclass, in its order.

    Example:
        >>> @dataclasses.dataclass
        ... class Config:
        ...     learning_rate: float = 1e-6
        ...     max_turns: int | None = None
        >>> [(field.flag, field.rule) for field in read_fields(Config).values()]
        [('--learning-rate', 'must be a number'), ('--max-turns', 'must be a whole number or none')]
    """
    hints = get_type_hints(config)
    owners = {name: base.__name__ for base in reversed(config.__mro__) for name in inspect.get_annotations(base)}
    found = {}
    for field in dataclasses.fields(config):
        kinds, choices, optional = _kinds(hints[field.name])
        factory = field.default_factory
        default = factory() if factory is not dataclasses.MISSING else field.default
        found[field.name] = ConfigField(
            name=field.name,
            kinds=kinds,
            optional=optional,
            choices=choices,
            default=None if default is dataclasses.MISSING else default,
            help=" ".join(str(field.metadata.get("help", "")).split()),
            owner=owners[field.name],
        )
    return found


def _kinds(hint: object) -> tuple[tuple[type, ...], tuple[str, ...], bool]:
    """The plain kinds of a type, its choices if it has some, and whether it may be None."""
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    kinds: list[type] = []
    choices: list[str] = []
    optional = False
    for member in members:
        origin = get_origin(member) or member
        if origin is type(None):
            optional = True
        elif origin is Literal:
            kinds.extend(type(value) for value in get_args(member))
        elif isinstance(origin, type) and issubclass(origin, Enum):
            choices.extend(str(choice.value) for choice in origin)
        elif origin in (bool, int, float, str, dict, list):
            kinds.append(origin)
    return tuple(dict.fromkeys(kinds)), tuple(choices), optional


def nearest(name: str, known: Collection[str]) -> str:
    """A hint at the nearest known name, or nothing.

    Example:
        >>> nearest("--learning-rat", ["--learning-rate", "--seed"])
        '; did you mean --learning-rate?'
        >>> nearest("--zzz", ["--seed"])
        ''
    """
    found = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {found[0]}?" if found else ""


def parse_flags(
    arguments: Sequence[str], fields: Mapping[str, ConfigField], *, also: Collection[str] = ()
) -> dict[str, Any]:
    """Values from ``--name value``, ``--name=value``, ``--switch``, ``--no-switch``; names with - or _.

    A list takes words up to the next flag. Of a flag that is given twice, the last one counts; lists add up.

    Args:
        arguments: The words after the command.
        fields: The known flags.
        also: Flags that are read elsewhere, for the hint at a misspelt one.

    Raises:
        ConfigurationError: an unknown flag, named with the nearest known one; a value that does not fit.
    """
    words: dict[str, list[str]] = {}
    for flag, values in _split(arguments):
        name, positive = _resolve(flag, fields, also)
        field = fields[name]
        if not positive:
            if values:
                raise ConfigurationError(f"{flag} takes no value, got {values[0]!r}; write {field.flag} {values[0]}")
            values = ["false"]
        elif not values:
            if not field.is_switch:
                raise ConfigurationError(f"{flag} has no value; it {field.rule}")
            values = ["true"]
        if list in field.kinds:
            words.setdefault(name, []).extend(values)
        elif len(values) > 1:
            raise ConfigurationError(f"{flag} takes one value, got {' '.join(values)}; quote a value with spaces")
        else:
            words[name] = values
    return {name: _from_words(fields[name], values) for name, values in words.items()}


def _split(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag with the words that follow it."""
    current: tuple[str, list[str]] | None = None
    for word in arguments:
        if word.startswith("--"):
            if current is not None:
                yield current
            flag, equals, value = word.partition("=")
            current = (flag, [value] if equals else [])
        elif current is None:
            raise ConfigurationError(f"unexpected {word!r}: every option is written --name value")
        else:
            current[1].append(word)
    if current is not None:
        yield current


def _resolve(flag: str, fields: Mapping[str, ConfigField], also: Collection[str]) -> tuple[str, bool]:
    """The field of a flag, and whether it is set (or, by ``--no-``, unset)."""
    name = flag.removeprefix("--").replace("-", "_")
    if name in fields:
        return name, True
    negated = name.removeprefix("no_")
    if negated != name and negated in fields and fields[negated].is_switch:
        return negated, False
    known = [field.flag for field in fields.values()]
    known += [f"--no-{field.flag[2:]}" for field in fields.values() if field.is_switch]
    hint = nearest(flag.replace("_", "-"), [*known, *also])
    raise ConfigurationError(f"unknown option {flag}{hint or '; `envgrad train --help` lists all'}")


def _from_words(field: ConfigField, words: list[str]) -> Any:
    if list in field.kinds and (len(words) > 1 or str not in field.kinds):
        return words
    return _from_text(field, words[0])


def _from_text(field: ConfigField, text: str) -> Any:
    """A value from text; kinds are tried from the narrowest to the widest."""
    word = text.strip().lower()
    if field.choices:
        if text not in field.choices:
            raise _misfit(field, text, nearest(text, field.choices))
        return text
    if word in ("none", "null") and field.optional and str not in field.kinds:
        return None
    if dict in field.kinds and word.startswith("{"):
        return _from_json(field, text)
    # 1 and yes are booleans only where they can be nothing else.
    only_switch = field.kinds == (bool,)
    if bool in field.kinds and word in (_TRUE if only_switch else _TRUE[:1]):
        return True
    if bool in field.kinds and word in (_FALSE if only_switch else _FALSE[:1]):
        return False
    for kind in (int, float):
        if kind in field.kinds:
            try:
                return kind(word)
            except ValueError:
                continue
    if str in field.kinds:
        return text
    raise _misfit(field, text)


def _from_json(field: ConfigField, text: str) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise _misfit(field, text, f" ({error})") from error
    return value


def convert(field: ConfigField, value: object) -> Any:
    """A value as YAML gives it, checked against the field's type; text is read as on the command line.

    Example:
        >>> rate = ConfigField(name="learning_rate", kinds=(float,), optional=False)
        >>> convert(rate, "1e-3"), convert(rate, 1)
        (0.001, 1.0)

    Raises:
        ConfigurationError: a value that does not fit.
    """
    if value is False and "no" in field.choices:
        return "no"  # YAML reads the word no as false
    if isinstance(value, str):
        return _from_text(field, value)
    if value is None and field.optional:
        return None
    if isinstance(value, list) and list in field.kinds:
        return value
    if isinstance(value, bool):
        fits = bool in field.kinds
    elif isinstance(value, int):
        if int not in field.kinds and float in field.kinds:
            return float(value)
        fits = int in field.kinds
    else:
        fits = isinstance(value, field.kinds)
    if not fits:
        raise _misfit(field, value)
    return value


def _misfit(field: ConfigField, value: object, hint: str = "") -> ConfigurationError:
    if not field.kinds and not field.choices:
        return ConfigurationError(f"{field.flag} cannot be given as text; set {field.name} in Python")
    return ConfigurationError(f"{field.flag} {value!r} does not fit: it {field.rule}{hint}")
