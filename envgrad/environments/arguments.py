"""Does a JSON value fit a tool's JSON schema? No coercion beyond JSON's own one kind of number."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

_NOUNS = {
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "boolean": "true or false",
    "null": "null",
    "array": "a list",
    "object": "an object",
}


def shorten(text: str, limit: int = 80) -> str:
    """``text`` on one line of at most ``limit`` characters.

    Example:
        >>> shorten("abcdefghij", 8)
        'abcde...'
    """
    return text if len(text) <= limit else text[: limit - 3] + "..."


def clean_text(text: str) -> str:
    """``text`` as UTF-8 can hold it: lone surrogates, which break tokenizers, become question marks.

    Example:
        >>> clean_text(chr(0xD800) + "x")
        '?x'
    """
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def describe(schema: Mapping[str, Any]) -> str:
    """A schema in a few words.

    Example:
        >>> describe({"type": "array", "items": {"type": "integer"}}), describe({"enum": ["a", 1], "nullable": True})
        ('list of integer', '"a" or 1 or null')
    """
    if "enum" in schema:
        words = [json.dumps(choice) for choice in schema["enum"]]
    elif "anyOf" in schema:
        words = [describe(option) for option in schema["anyOf"]]
    elif "prefixItems" in schema:
        words = [f"[{', '.join(describe(item) for item in schema['prefixItems'])}]"]
    elif schema.get("type") == "array" and "items" in schema:
        words = [f"list of {describe(schema['items'])}"]
    else:
        words = ["list" if kind == "array" else kind for kind in _kinds(schema)] or ["anything"]
    if schema.get("nullable") and "null" not in words:
        words.append("null")
    return " or ".join(words)


def fit(value: object, schema: Mapping[str, Any], where: str) -> tuple[object, str | None]:
    """A copy of ``value`` as ``schema`` wants it (3.0 becomes 3 for an integer), and what is wrong with it, or None.

    Example:
        >>> fit([1, 2.0], {"type": "array", "items": {"type": "integer"}}, "argument 'cells'")
        ([1, 2], None)
        >>> fit([1, True], {"type": "array", "items": {"type": "integer"}}, "argument 'cells'")[1]
        "argument 'cells'[1] must be an integer, got true"
    """
    if value is None and schema.get("nullable"):
        return None, None
    if "enum" in schema:
        for choice in schema["enum"]:
            if _same(choice, value):
                return choice, None
        return value, f"{where} must be {describe(schema)}, got {_show(value)}"
    if "anyOf" in schema:
        for option in schema["anyOf"]:
            fitted, problem = fit(value, option, where)
            if problem is None:
                return fitted, None
        return value, f"{where} must be {describe(schema)}, got {_show(value)}"
    kinds = _kinds(schema)
    if not kinds:
        return _copy(value), None
    for kind in kinds:
        if _is_kind(value, kind):
            return _fit_kind(value, kind, schema, where)
    nouns = " or ".join(_NOUNS.get(kind, kind) for kind in (*kinds, *(["null"] * bool(schema.get("nullable")))))
    return value, f"{where} must be {nouns}, got {_show(value)}"


def _kinds(schema: Mapping[str, Any]) -> Sequence[str]:
    kind = schema.get("type", ())
    if isinstance(kind, str):
        return (kind,)
    # 3.0 is an integer only where no plain number is asked for
    return sorted(kind, key=lambda name: name == "integer") if "number" in kind else list(kind)


def _is_kind(value: object, kind: str) -> bool:
    match kind:
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            if isinstance(value, float):
                return value.is_integer()
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            if isinstance(value, float):
                return math.isfinite(value)  # NaN and Infinity are no JSON, whatever a parser lets through
            return isinstance(value, int) and not isinstance(value, bool)
        case "string":
            return isinstance(value, str)
        case "null":
            return value is None
        case "array":
            return isinstance(value, list)
        case "object":
            return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
        case _:
            return False


def _fit_kind(value: object, kind: str, schema: Mapping[str, Any], where: str) -> tuple[object, str | None]:
    if kind == "integer" and isinstance(value, float):
        return int(value), None
    if kind == "array" and isinstance(value, list):
        return _fit_items(value, schema, where)
    if kind == "object" and isinstance(value, Mapping):
        wanted = schema.get("additionalProperties", {})
        fitted: dict[str, object] = {}
        for key, item in value.items():
            fitted[key], problem = fit(item, wanted, f"{where}[{json.dumps(shorten(key))}]")
            if problem is not None:
                return value, problem
        return fitted, None
    return value, None


def _fit_items(value: list[object], schema: Mapping[str, Any], where: str) -> tuple[object, str | None]:
    wanted: Sequence[Mapping[str, Any]] = schema.get("prefixItems", [schema.get("items", {})] * len(value))
    if len(wanted) != len(value):
        return value, f"{where} must have {len(wanted)} items, got {len(value)}"
    fitted: list[object] = []
    for index, (item, item_schema) in enumerate(zip(value, wanted, strict=True)):
        item_fitted, problem = fit(item, item_schema, f"{where}[{index}]")
        if problem is not None:
            return value, problem
        fitted.append(item_fitted)
    return fitted, None


def _same(choice: object, value: object) -> bool:
    if isinstance(choice, bool) or isinstance(value, bool) or choice is None or value is None:
        return choice is value
    return type(choice) in (int, float, str) and isinstance(value, int | float | str) and choice == value


def _copy(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(item) for item in value]
    return value


def _show(value: object) -> str:
    try:
        shown = json.dumps(value)
    except (TypeError, ValueError):
        shown = repr(value)
    return f"the string {shorten(shown)}" if isinstance(value, str) else shorten(shown)
