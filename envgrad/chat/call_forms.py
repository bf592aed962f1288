"""The forms in which models write tool calls, as readers of text.

Each form finds the next call at or behind a position and says where its text ends. A call that cannot be parsed is
found all the same, with an error that goes back to the model. Nothing here raises on any text; nothing is evaluated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .template import ToolSchemas

_DECODER = json.JSONDecoder(strict=False)  # models write raw newlines inside strings
_NAME = re.compile(r"\s*([^\s<>{}()\[\]\"'|,=]+)")
_BARE_CALL = re.compile(r'\[?\s*\{\s*"(?:name"\s*:|type"\s*:\s*"function")')
_SHOWN = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RawCall:
    """A call as it was written; ``error`` says what is wrong with its text."""

    name: str | None
    arguments: Any
    error: str | None = None
    id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The calls written in ``text[start:end]``."""

    start: int
    end: int
    calls: tuple[RawCall, ...]


class CallForm(Protocol):
    """One way to write calls."""

    @property
    def close(self) -> str:
        """What ends a call; empty if nothing does."""
        ...

    def find(self, text: str, start: int, tools: ToolSchemas) -> Found | None:
        """The next call at or behind ``start``; None if there is none."""
        ...


class MalformedCall(ValueError):
    """The text of a call does not parse."""


def malformed(text: str, reason: str) -> RawCall:
    """A call that could not be parsed.

    Example:
        >>> malformed('{"n": 1,,}', "no value at character 8").error
        'malformed tool call: no value at character 8, in: {"n": 1,,}'
    """
    shown = text.strip()
    shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."
    return RawCall(name=None, arguments=None, error=f"malformed tool call: {reason}, in: {shown}")


def decode_json(text: str, start: int) -> tuple[Any, int]:
    """The JSON value at ``start`` (behind white space) and the index of its end.

    Raises:
        MalformedCall: there is no JSON value.

    Example:
        >>> decode_json('x {"a": [1]} y', 1)
        ({'a': [1]}, 12)
    """
    start = skip_space(text, start)
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise MalformedCall(f"{error.msg} at character {error.pos - start}") from None
    except (ValueError, RecursionError) as error:
        raise MalformedCall(str(error)) from None


def skip_space(text: str, start: int) -> int:
    """The first index at or behind ``start`` that is not white space."""
    while start < len(text) and text[start].isspace():
        start += 1
    return start


def find_close(text: str, start: int, close: str, open_: str = "") -> tuple[int, int]:
    """``(end of body, end of call)`` of a call that could not be parsed: up to its close, the next call, or the end."""
    at = text.find(close, start) if close else -1
    following = text.find(open_, start) if open_ else -1
    if at >= 0 and not 0 <= following < at:
        return at, at + len(close)
    if following >= 0:
        return following, following
    return len(text), len(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonForm:
    """Calls as JSON objects (or one list of them) with a name and arguments, between ``open`` and ``close``.

    With an empty ``open`` the whole answer must be calls, separated by white space, commas or semicolons. Arguments are
    taken as they were parsed, whatever their type; ``unwrap`` decodes them once more, for templates that write them as
    a JSON string.

    Example:
        >>> hermes = JsonForm(open="<tool_call>", close="</tool_call>")
        >>> hermes.find('hm <tool_call>{"name": "inc", "arguments": {"n": 1}}</tool_call>', 0, None).calls
        (RawCall(name='inc', arguments={'n': 1}, error=None, id=None),)
    """

    open: str
    close: str
    name_key: str = "name"
    arguments_key: str = "arguments"
    unwrap: bool = False

    def find(self, text: str, start: int, tools: ToolSchemas) -> Found | None:
        at = text.find(self.open, start) if self.open else self._bare(text, start)
        if at < 0:
            return None
        body = at + len(self.open)
        try:
            value, end = decode_json(text, body)
            after = skip_space(text, end)
            if self.close and text.startswith(self.close, after):
                end = after + len(self.close)
            elif self.close and after < len(text):
                raise MalformedCall(f"there is text between the JSON value and {self.close}")
        except MalformedCall as error:
            body_end, end = find_close(text, body, self.close, self.open)
            return Found(start=at, end=end, calls=(malformed(text[body:body_end], str(error)),))
        values = value if isinstance(value, list) and value else [value]
        return Found(start=at, end=end, calls=tuple(self._call(item, text[body:end]) for item in values))

    def _bare(self, text: str, start: int) -> int:
        """Where a call without an opening mark starts: only right at ``start``, so that JSON in prose is no call."""
        at = start
        while at < len(text) and (text[at].isspace() or text[at] in ";,"):
            at += 1
        return at if _BARE_CALL.match(text, at) else -1

    def _call(self, value: object, written: str) -> RawCall:
        inner = value.get("function") if isinstance(value, dict) else None
        fields = inner if isinstance(inner, dict) else value
        if not isinstance(fields, dict):
            return malformed(written, f"a call must be a JSON object, got {type(value).__name__}")
        name = fields.get(self.name_key)
        if not isinstance(name, str) or not name:
            return malformed(written, f"a call must name its tool as a string in {self.name_key!r}")
        arguments = fields.get(self.arguments_key, fields.get("arguments", fields.get("parameters", {})))
        call_id = value.get("id", fields.get("id")) if isinstance(value, dict) else None
        return RawCall(
            name=name,
            arguments=_unwrap(arguments) if self.unwrap else arguments,
            id=call_id if isinstance(call_id, str) and call_id else None,
        )


def _unwrap(arguments: object) -> object:
    if not isinstance(arguments, str):
        return arguments
    try:
        return _DECODER.decode(arguments)
    except (ValueError, RecursionError):
        return arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedForm:
    """The name as text, then the arguments as JSON: ``open NAME middle {...} close``.

    ``middle`` and ``close`` are compared without the white space around them. ``id_open`` starts a call id that stands
    between the name and ``middle``.

    Example:
        >>> form = NamedForm(open="[TOOL_CALLS]", middle="[ARGS]", close="")
        >>> form.find('[TOOL_CALLS]inc[ARGS]{"n": 1}', 0, None).calls
        (RawCall(name='inc', arguments={'n': 1}, error=None, id=None),)
    """

    open: str
    middle: str
    close: str
    id_open: str = ""

    def find(self, text: str, start: int, tools: ToolSchemas) -> Found | None:
        at = text.find(self.open, start)
        if at < 0:
            return None
        body = at + len(self.open)
        try:
            call, end = self._read(text, body)
        except MalformedCall as error:
            body_end, end = find_close(text, body, self.close.strip(), self.open)
            return Found(start=at, end=end, calls=(malformed(text[at:body_end], str(error)),))
        return Found(start=at, end=end, calls=(call,))

    def _read(self, text: str, body: int) -> tuple[RawCall, int]:
        name, end = read_name(text, body)
        call_id = None
        if self.id_open and text.startswith(self.id_open.strip(), skip_space(text, end)):
            call_id, end = read_name(text, skip_space(text, end) + len(self.id_open.strip()))
        end = expect(text, end, self.middle)
        arguments, end = decode_json(text, end)
        after = skip_space(text, end)
        close = self.close.strip()
        if close and text.startswith(close, after):
            end = after + len(close)
        elif close and after < len(text):
            raise MalformedCall(f"there is text between the arguments and {close}")
        return RawCall(name=name, arguments=arguments, id=call_id), end


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstOf:
    """Several forms of which a text may hold any; at one place, a form that parses comes before one that does not."""

    forms: tuple[CallForm, ...]

    @property
    def close(self) -> str:
        return ""

    def find(self, text: str, start: int, tools: ToolSchemas) -> Found | None:
        every = [found for form in self.forms if (found := form.find(text, start, tools)) is not None]
        return min(every, key=lambda found: (found.start, any(call.error for call in found.calls)), default=None)


def read_name(text: str, start: int) -> tuple[str, int]:
    """The name at ``start`` and its end."""
    match = _NAME.match(text, start)
    if match is None:
        raise MalformedCall("a call must name its tool")
    return match.group(1), match.end()


def expect(text: str, start: int, mark: str) -> int:
    """The index behind ``mark``, which must stand at ``start`` up to white space."""
    core = mark.strip()
    at = skip_space(text, start)
    if not text.startswith(core, at):
        raise MalformedCall(f"expected {core!r}" if core else "expected arguments")
    return at + len(core)


def parameters(tools: ToolSchemas, name: str) -> Mapping[str, Any]:
    """The JSON schemas of a tool's parameters, by parameter; empty for an unknown tool."""
    for tool in tools or ():
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            schema = function.get("parameters")
            properties = schema.get("properties") if isinstance(schema, Mapping) else None
            return properties if isinstance(properties, Mapping) else {}
    return {}


def coerce(raw: str, schema: object) -> object:
    """A value written as plain text: kept where the schema says string, else read as JSON if it is JSON.

    Example:
        >>> coerce("7", {"type": "string"}), coerce("7", {"type": "integer"}), coerce("red", None)
        ('7', 7, 'red')
    """
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        return raw
    try:
        value = _DECODER.decode(raw)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(raw.strip(), raw)
    return raw if isinstance(kind, Sequence) and "string" in kind and isinstance(value, str) else value


def iter_found(form: CallForm, text: str, tools: ToolSchemas) -> Iterator[Found]:
    """All calls in ``text``, in order."""
    at = 0
    while at <= len(text) and (found := form.find(text, at, tools)) is not None:
        yield found
        at = max(found.end, at + 1)
