"""Type hints and docstrings -> JSON schemas, as ``transformers.utils.get_json_schema`` writes them.

Written here so that an environment can be inspected, checked and played without transformers and torch: importing them
takes seconds. Tests hold both to the same schemas.
"""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, TypeAlias

from envgrad.errors import EnvgradError

Schema: TypeAlias = dict[str, Any]

_SCALARS: Mapping[type, str] = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
_PLAIN: Mapping[type, str] = {**_SCALARS, list: "array", tuple: "array", dict: "object"}
_SECTION = re.compile(r"Args:|Returns:|Raises:")
_ENTRY = re.compile(r"([ \t]*)(\w+)(?:[ \t]*\([^()]*\))?:(.*)")
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


class HintError(EnvgradError):
    """A type that JSON cannot carry."""


def hint_schema(hint: object) -> Schema:
    """The schema of values of this type.

    Example:
        >>> hint_schema(list[int]), hint_schema(int | str | None)
        ({'type': 'array', 'items': {'type': 'integer'}}, {'type': ['integer', 'string'], 'nullable': True})

    Raises:
        HintError: JSON cannot carry it.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is None:
        return _plain(hint)
    if origin in (typing.Union, types.UnionType):
        return _union(arguments)
    if origin is Literal:
        return _choice(list(arguments))
    if origin is list:
        return {"type": "array", "items": hint_schema(arguments[0])} if arguments else {"type": "array"}
    if origin is tuple:
        if len(arguments) == 1 or ... in arguments:
            raise HintError(f"{hint!r}: write list[...] for values of one type")
        items = [hint_schema(one) for one in arguments]
        return {"type": "array", "prefixItems": items} if items else {"type": "array"}
    if origin is dict:
        values = {"additionalProperties": hint_schema(arguments[1])} if len(arguments) == 2 else {}
        return {"type": "object", **values}
    raise HintError(f"{hint!r} has no form in JSON")


def _plain(hint: object) -> Schema:
    if hint is Any:
        return {}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _choice([member.value for member in hint])
    name = _PLAIN.get(hint) if isinstance(hint, type) else None
    if name is None:
        raise HintError(f"{hint!r} has no form in JSON")
    return {"type": name}


def _choice(values: list[Any]) -> Schema:
    """One of these values; the type lists each of theirs once."""
    if not values or any(type(value) not in _SCALARS for value in values):
        raise HintError(f"{values!r} are not all text, numbers, true, false or None")
    names = list(dict.fromkeys(_SCALARS[type(value)] for value in values))
    return {"type": names[0] if len(names) == 1 else names, "enum": values}


def _union(members: Sequence[object]) -> Schema:
    """Plain types as a list of names; others as alternatives. None makes it nullable."""
    options = [hint_schema(member) for member in members if member is not type(None)]
    schema: Schema
    if len(options) == 1:
        schema = options[0]
    elif all(option.keys() == {"type"} and isinstance(option["type"], str) for option in options):
        names = sorted({option["type"] for option in options})
        schema = {"type": names[0] if len(names) == 1 else names}
    else:
        schema = {"anyOf": options}
    return schema | {"nullable": True} if type(None) in members else schema


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDoc:
    """A docstring in Google's format."""

    text: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict)
    returns: str | None = None


def read_doc(doc: str) -> ToolDoc:
    """The parts of a docstring whose indentation is that of ``inspect.getdoc``.

    Example:
        >>> read_doc("Move.\\n\\nArgs:\\n    way (str): Where to,\\n        in words.\\n    far: Or near.").arguments
        {'way': 'Where to, in words.', 'far': 'Or near.'}
    """
    doc = doc.strip()
    first = _SECTION.search(doc)
    arguments = _section(doc, "Args:", "Returns:|Raises:")
    returns = _section(doc, "Returns:", "Raises:")
    return ToolDoc(
        text=(doc if first is None else doc[: first.start()]).strip(),
        arguments={} if arguments is None else _entries(arguments),
        returns=None if returns is None else returns.strip(),
    )


def _section(doc: str, title: str, following: str) -> str | None:
    """What is below the line ``title``, up to a word that begins another section."""
    found = re.search(rf"(?:^|\n)[^\S\n]*{title}\n", doc)
    if found is None:
        return None
    rest = doc[found.end() :]
    end = re.search(following, rest)
    return rest if end is None else rest[: end.start()]


def _entries(block: str) -> dict[str, str]:
    """``name: what it is``, each of which may go on in lines that are indented deeper."""
    found: dict[str, list[str]] = {}
    name, indent = "", None
    for line in block.split("\n"):
        if not line.strip():
            continue
        entry = _ENTRY.fullmatch(line)
        if entry is not None and (indent is None or not (len(entry[1]) > len(indent) and entry[1].startswith(indent))):
            indent, name = entry[1], entry[2]
            found[name] = [entry[3].strip()]
        elif name:
            found[name].append(line.strip())
    return {name: " ".join(part for part in parts if part) for name, parts in found.items()}


def described(schema: Schema, text: str) -> Schema:
    """``schema`` with its description; ``(choices: ["a", "b"])`` at the end of that become its values.

    Raises:
        ValueError: the choices are not JSON.
    """
    found = _CHOICES.search(text)
    if found is None:
        return schema | {"description": text}
    choices = [one.strip() if isinstance(one, str) else one for one in json.loads(found[1])]
    return schema | {"enum": choices, "description": text[: found.start()].strip()}
