"""A line that a person types -> an answer to the environment: calls of its tools, or text.

::

    move direction=north        move north        {"name": "move", "arguments": {"direction": "north"}}
    move()                      a call without arguments
    anything else               text;  `= move north` is text too
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envgrad.environments.arguments import fit
from envgrad.environments.tools import ToolSpec, check_arguments
from envgrad.errors import EnvgradError, ToolCallError
from envgrad.types import Message, ToolCall

_WORD = re.compile(r"[^\s({]+")
_NAMED = re.compile(r"([A-Za-z_]\w*)=")
LITERAL = "="
"""a line that begins so is text, whatever it looks like"""


class NotUnderstood(EnvgradError):
    """A line that is neither a call nor, by its looks, meant as text; the message says what to type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What was typed."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()

    def message(self) -> Message:
        """As a model's answer is kept."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A tool was named without its arguments, which are to be asked for one by one."""

    tool: ToolSpec


def read_line(line: str, tools: Sequence[ToolSpec]) -> Answer | Form:
    """What ``line`` says. Where there are no tools, all is text.

    Raises:
        NotUnderstood: a call whose arguments do not fit, or text that looks like a misspelt call.

    Example:
        >>> from envgrad.environments.tools import build_tool
        >>> def move(direction: str) -> str:
        ...     return "ok"
        >>> tools = [build_tool("move", move)]
        >>> read_line("move north", tools).calls[0].arguments
        {'direction': 'north'}
        >>> read_line("I give up", tools).text
        'I give up'
    """
    if line.startswith(LITERAL):
        return Answer(text=line.removeprefix(LITERAL).strip())
    if not tools:
        return Answer(text=line)
    if line.startswith(("{", "[")):
        written = _read_json(line)
        if written is not None:
            return written
    found = _WORD.match(line)
    name = found.group() if found is not None else ""
    known = {tool.name: tool for tool in tools}
    if name not in known:
        _refuse_misspelt(line, name, known)
        return Answer(text=line)
    tool, rest = known[name], line[len(name) :].strip()
    if not rest and tool.parameters["properties"]:
        return Form(tool=tool)
    return Answer(calls=(call_of(tool, read_arguments(tool, rest)),))


def call_of(tool: ToolSpec, arguments: Mapping[str, Any]) -> ToolCall:
    """The call, if its arguments fit.

    Raises:
        NotUnderstood: they do not.
    """
    try:
        check_arguments(tool, arguments)
    except ToolCallError as error:
        raise NotUnderstood(str(error)) from error
    return ToolCall(id="typed", name=tool.name, arguments=dict(arguments))


def _read_json(line: str) -> Answer | None:
    """Calls as a model may write them: they are made as they stand, fit or not. None if the line is none."""
    try:
        value: object = json.loads(line)
    except ValueError:
        return None
    calls = []
    for entry in value if isinstance(value, list) else [value]:
        if not isinstance(entry, dict) or "name" not in entry:
            return None
        name = entry["name"]
        calls.append(
            ToolCall(id="typed", name=name if isinstance(name, str) else None, arguments=entry.get("arguments", {}))
        )
    return Answer(calls=tuple(calls)) if calls else None


def _refuse_misspelt(line: str, name: str, known: Mapping[str, ToolSpec]) -> None:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    called = line[len(name) :].lstrip().startswith("(") or bool(_NAMED.search(line))
    if not (close or called):
        return
    hint = f"did you mean {close[0]}?" if close else f"the tools are {', '.join(known)}."
    raise NotUnderstood(f"There is no tool {name!r}; {hint} To answer with this text, begin the line with {LITERAL!r}.")


def read_arguments(tool: ToolSpec, text: str) -> dict[str, Any]:
    """Arguments from ``a=1 b=two words``, ``(a=1, b=2)``, a JSON object, or the value of a tool's only argument.

    Raises:
        NotUnderstood: none of these.
    """
    properties: Mapping[str, Any] = tool.parameters["properties"]
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1].strip()
    if text.startswith("{"):
        try:
            written: object = json.loads(text)
        except ValueError:
            written = None
        if isinstance(written, dict):
            return written
    if not text:
        return {}
    first = _NAMED.match(text)
    if first is None:
        return {_only(tool): read_value(text, properties[_only(tool)])}
    if first.group(1) not in properties and not tool.takes_extra:
        if len(properties) == 1:  # the value of the only one has a = in it
            return {_only(tool): read_value(text, properties[_only(tool)])}
        raise NotUnderstood(f"{tool.name} has no argument {first.group(1)!r}. Signature: {tool.signature}")
    return {name: read_value(value, properties.get(name, {})) for name, value in _split(tool, text)}


def _only(tool: ToolSpec) -> str:
    """The argument that a bare value is of."""
    properties, required = list(tool.parameters["properties"]), tool.parameters.get("required", ())
    names = properties if len(properties) == 1 else list(required)
    if len(names) != 1:
        raise NotUnderstood(f"Say which arguments these are: name=value. Signature: {tool.signature}")
    return str(names[0])


def _split(tool: ToolSpec, text: str) -> list[tuple[str, str]]:
    """Names and the text of their values, each of which goes on to the next name."""
    names = set(tool.parameters["properties"])
    pairs: list[tuple[str, str]] = []
    while (found := _NAMED.match(text)) is not None:
        value, text = _take_value(text[found.end() :], None if tool.takes_extra else names)
        pairs.append((found.group(1), value))
    if text:
        raise NotUnderstood(f"{text!r} belongs to no argument. Signature: {tool.signature}")
    return pairs


def _take_value(text: str, names: set[str] | None) -> tuple[str, str]:
    """The value at the start of ``text``, and what follows it; ``names`` are those that may follow, None: any."""
    if text[:1] in '"[{':
        try:
            _, end = json.JSONDecoder().raw_decode(text)
        except ValueError:
            pass
        else:
            if end == len(text) or text[end] in " ,\t":
                return text[:end], text[end:].lstrip(" ,\t")
    for found in re.finditer(r"[ ,\t]+(?=([A-Za-z_]\w*)=)", text):
        if names is None or found.group(1) in names:
            return text[: found.start()], text[found.end() :]
    return text.rstrip(), ""


def read_value(text: str, schema: Mapping[str, Any]) -> Any:
    """The value that ``text`` stands for in an argument of this schema: itself where text fits, else as JSON.

    Example:
        >>> read_value("3", {"type": "integer"}), read_value("3", {"type": "string"}), read_value('"a b"', {})
        (3, '3', 'a b')
    """
    try:
        value: Any = json.loads(text)
    except ValueError:
        value = text.strip("'") if len(text) > 1 and text[0] == text[-1] == "'" else text
    if isinstance(value, str):
        return value
    fits_text = bool(schema) and fit(text, schema, "")[1] is None
    return text if fits_text else value
