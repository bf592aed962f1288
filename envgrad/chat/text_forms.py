"""Call forms whose arguments are not JSON objects: tagged values, Python calls, bare objects, channels."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .call_forms import (
    Found,
    MalformedCall,
    RawCall,
    coerce,
    decode_json,
    expect,
    find_close,
    malformed,
    parameters,
    read_name,
    skip_space,
)
from .template import ToolSchemas

_MAX_DEPTH = 64
_MAX_CLOSES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedForm:
    """Each argument between marks: ``open NAME middle (key_open KEY key_close VALUE value_close)* close``.

    Values are plain text: kept for string parameters, else read as JSON where they are JSON. One newline next to a
    mark belongs to the mark if the template writes it there.

    Example:
        >>> form = TaggedForm(open="<function=", middle=">", key_open="<parameter=", key_close=">\\n",
        ...     value_close="\\n</parameter>", close="</function>")
        >>> form.find("<function=inc><parameter=n>\\n1\\n</parameter></function>", 0, None).calls
        (RawCall(name='inc', arguments={'n': 1}, error=None, id=None),)
    """

    open: str
    middle: str
    key_open: str
    key_close: str
    value_close: str
    close: str

    def find(self, text: str, start: int, tools: ToolSchemas) -> Found | None:
        at = text.find(self.open.strip(), start)
        if at < 0:
            return None
        body = at + len(self.open.strip())
        try:
            call, end = self._read(text, body, tools)
        except MalformedCall as error:
            body_end, end = find_close(text, body, self.close.strip(), self.open.strip())
            return Found(start=at, end=end, calls=(malformed(text[at:body_end], str(error)),))
        return Found(start=at, end=end, calls=(call,))

    def _read(self, text: str, body: int, tools: ToolSchemas) -> tuple[RawCall, int]:
        name, at = read_name(text, body)
        at = expect(text, at, self.middle) if self.middle.strip() else at
        schemas = parameters(tools, name)
        arguments: dict[str, Any] = {}
        while text.startswith(self.key_open.strip(), (here := skip_space(text, at))):
            key_start = here + len(self.key_open.strip())
            key_end = text.find(self.key_close.strip(), key_start)
            if key_end < 0:
                raise MalformedCall(f"expected {self.key_close.strip()!r} behind an argument's name")
            key = text[key_start:key_end].strip()
            raw, at = self._value(text, key_end + len(self.key_close.strip()))
            arguments[key] = coerce(raw, schemas.get(key))
        here, close = skip_space(text, at), self.close.strip()
        if here < len(text):
            at = expect(text, at, close)
        return RawCall(name=name, arguments=arguments), at

    def _value(self, text: str, start: int) -> tuple[str, int]:
        mark = self.value_close.strip()
        end = text.find(mark, start)
        if end < 0:
            raise MalformedCall(f"expected {mark!r} behind an argument's value")
        raw = text[start:end]
        raw = raw.removeprefix(self.key_close[len(self.key_close.rstrip()) :])
        raw = raw.removesuffix(self.value_close[: len(self.value_close) - len(self.value_close.lstrip())])
        return raw, end + len(mark)


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonForm:
    """Calls as a list of Python calls with literal keyword arguments, parsed and never evaluated.

    With an empty ``open`` the list must start the answer.

    Example:
        >>> PythonForm(open="", close="").find('[inc(n=1), say(text="a]")]', 0, None).calls[1]
        RawCall(name='say', arguments={'text': 'a]'}, error=None, id=None)
    """

    open: str
    close: str

    def find(self, text: str, start: int, tools: ToolSchemas) -> Found | None:
        if self.open:
            at = text.find(self.open, start)
        else:
            at = skip_space(text, start)
            at = at if re.compile(r"\[\s*[A-Za-z_][\w.]*\(").match(text, at) else -1
        if at < 0:
            return None
        body = at + len(self.open)
        reason = "expected [name(argument=value)]"
        for body_end, end in self._ends(text, body):
            try:
                calls = _python_calls(text[body:body_end].strip(), tools)
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                reason = error.msg if isinstance(error, SyntaxError) else str(error)
                continue
            return Found(start=at, end=end, calls=calls)
        body_end, end = find_close(text, body, self.close, self.open)
        return Found(start=at, end=end, calls=(malformed(text[body:body_end], reason),))

    def _ends(self, text: str, body: int) -> list[tuple[int, int]]:
        """Every place where the list may end: a closing mark can stand inside a string."""
        mark = self.close or "]"
        ends: list[tuple[int, int]] = []
        at = text.find(mark, body)
        while at >= 0 and len(ends) < _MAX_CLOSES:
            ends.append((at if self.close else at + 1, at + len(mark)))
            at = text.find(mark, at + 1)
        return ends or [(len(text), len(text))]


def _python_calls(text: str, tools: ToolSchemas) -> tuple[RawCall, ...]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the parser warns of odd literals in text that is not ours
        tree = ast.parse(text, mode="eval").body
    nodes = tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]
    return tuple(_python_call(node, tools) for node in nodes)


def _python_call(node: ast.expr, tools: ToolSchemas) -> RawCall:
    written = ast.unparse(node)
    if not isinstance(node, ast.Call):
        return malformed(written, "expected a call name(argument=value)")
    name = ast.unparse(node.func)
    names = list(parameters(tools, name))
    if len(node.args) > len(names):
        return malformed(written, "write arguments as name=value")
    try:
        arguments = {key: _literal(value) for key, value in zip(names, node.args, strict=False)}
        for keyword in node.keywords:
            if keyword.arg is None:
                return malformed(written, "write arguments as name=value")
            arguments[keyword.arg] = _literal(keyword.value)
    except (ValueError, TypeError, RecursionError):
        return malformed(written, "arguments must be plain values")
    return RawCall(name=name, arguments=arguments)


def _literal(node: ast.expr) -> object:
    constants = {"true": True, "false": False, "null": None}
    for name in ast.walk(node):
        if isinstance(name, ast.Name) and name.id not in constants:
            raise ValueError(name.id)
    return ast.literal_eval(_JsonConstants(constants).visit(node))


class _JsonConstants(ast.NodeTransformer):
    def __init__(self, constants: Mapping[str, bool | None]) -> None:
        self._constants = constants

    def visit_Name(self, node: ast.Name) -> ast.Constant:
        return ast.Constant(self._constants[node.id])


@dataclass(frozen=True, slots=True, kw_only=True)
class BareObjectForm:
    """``open NAME{key:value,...} close`` with bare keys and strings between ``quote`` marks.

    Example:
        >>> form = BareObjectForm(open="<call>", close="</call>", quote="~")
        >>> form.find("<call>say{text:~hi, {you}~,times:2}</call>", 0, None).calls
        (RawCall(name='say', arguments={'text': 'hi, {you}', 'times': 2}, error=None, id=None),)
    """

    open: str
    close: str
    quote: str

    def find(self, text: str, start: int, tools: ToolSchemas) -> Found | None:
        at = text.find(self.open, start)
        if at < 0:
            return None
        body = at + len(self.open)
        try:
            name, end = read_name(text, body)
            arguments, end = self._object(text, skip_space(text, end), 0)
            after = skip_space(text, end)
            end = expect(text, after, self.close) if after < len(text) else end
        except MalformedCall as error:
            body_end, end = find_close(text, body, self.close, self.open)
            return Found(start=at, end=end, calls=(malformed(text[at:body_end], str(error)),))
        return Found(start=at, end=end, calls=(RawCall(name=name, arguments=arguments),))

    def _value(self, text: str, at: int, depth: int) -> tuple[object, int]:
        if depth > _MAX_DEPTH:
            raise MalformedCall(f"arguments are nested deeper than {_MAX_DEPTH}")
        at = skip_space(text, at)
        if text.startswith(self.quote, at):
            return self._quoted(text, at)
        if text.startswith("{", at):
            return self._object(text, at, depth + 1)
        if text.startswith("[", at):
            return self._list(text, at, depth + 1)
        return decode_json(text, at)

    def _quoted(self, text: str, at: int) -> tuple[str, int]:
        start = at + len(self.quote)
        end = text.find(self.quote, start)
        if end < 0:
            raise MalformedCall(f"a string without its closing {self.quote}")
        return text[start:end], end + len(self.quote)

    def _object(self, text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
        at = expect(text, at, "{")
        values: dict[str, Any] = {}
        while not text.startswith("}", (at := skip_space(text, at))):
            at = expect(text, at, ",") if values else at
            here = skip_space(text, at)
            if text.startswith(self.quote, here):
                key, at = self._quoted(text, here)
                at = expect(text, at, ":")
            else:
                colon = text.find(":", here)
                if colon < 0:
                    raise MalformedCall("expected key:value")
                key, at = text[here:colon].strip().strip('"'), colon + 1
            values[key], at = self._value(text, at, depth)
        return values, at + 1

    def _list(self, text: str, at: int, depth: int) -> tuple[list[Any], int]:
        at = expect(text, at, "[")
        values: list[Any] = []
        while not text.startswith("]", (at := skip_space(text, at))):
            at = expect(text, at, ",") if values else at
            value, at = self._value(text, at, depth)
            values.append(value)
        return values, at + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelForm:
    """Calls as messages to a recipient: ``...to=functions.NAME...<|message|>{...}<|call|>`` (gpt-oss).

    The recipient may stand before or behind the channel's name.

    Example:
        >>> text = '<|channel|>commentary to=functions.inc <|constrain|>json<|message|>{"n": 1}'
        >>> ChannelForm().find(text, 0, None).calls
        (RawCall(name='inc', arguments={'n': 1}, error=None, id=None),)
    """

    close: str = "<|call|>"

    def find(self, text: str, start: int, tools: ToolSchemas) -> Found | None:
        match = _CHANNEL_CALL.search(text, start)
        if match is None:
            return None
        try:
            arguments, end = decode_json(text, match.end())
            after = skip_space(text, end)
            end = expect(text, after, self.close) if after < len(text) else end
        except MalformedCall as error:
            body_end, end = find_close(text, match.end(), self.close, "<|start|>")
            return Found(start=match.start(), end=end, calls=(malformed(text[match.start() : body_end], str(error)),))
        return Found(start=match.start(), end=end, calls=(RawCall(name=match.group(1), arguments=arguments),))


_CHANNEL_CALL = re.compile(
    r"(?:<\|start\|>assistant\s*)?(?:<\|channel\|>\w+\s*)?\bto=functions\.([\w.\-]+)\s*"
    r"(?:<\|channel\|>\w+\s*)?(?:<\|constrain\|>)?(?:json)?\s*<\|message\|>"
)
