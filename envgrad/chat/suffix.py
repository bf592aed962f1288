"""What follows a sampled turn: end of turn, separator, results, next generation prompt.

The text is cut out of the template's own rendering. A sentinel stands where the sampled turn was::

    <|im_start|>user\\n..<|im_end|>\\n<|im_start|>assistant\\nSENTINEL<|im_end|>\\n<|im_start|>tool\\n7<|im_end|>\\n<|im_start|>assistant\\n
                                                         [ end_of_turn ][ tail                                              ]

Earlier turns are never rendered again, so it does not matter what the template would do to them.
"""  # noqa: E501 - the picture is one line

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from ..errors import ChatTemplateError
from ..types import Message
from .template import PROBE_RESULT, PROBE_TOOL, PROBE_USER, SENTINEL, ChatTemplate, ToolSchemas, content_text

_MAX_CACHED = 256
_MAX_LITERAL = 80
_SAFE_ID = "envgrad{:02d}"  # 9 letters and digits, the narrowest form of id that a published template asks for

_TRANSFORMS: tuple[Callable[[str], str], ...] = (
    lambda content: content,
    str.strip,
    lambda content: json.dumps(content, ensure_ascii=False),
)
"""What templates do to a result's text: nothing, ``| trim``, ``| tojson``."""

_PROBE_CONTENTS = (
    *("", "0", "a", " \n", "  two words \n", "a\n\nb\n", "\\n", "\u00e9\u4e2d\U0001f600"),
    *('<b a="1">&</b>', "{'a': [1]}", '{"a": "\\n"}', "long " * 1000),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStyle:
    """How results follow an assistant turn in one template.

    Attributes:
        role: results are ``tool`` messages, or one ``user`` message with all of them.
        with_call: tool messages are legal only after a tool call, so the sentinel stands in a call's argument.
        end_of_turn: what the template writes right after an assistant turn, up to its terminator; may be empty.
    """

    role: Literal["tool", "user"]
    with_call: bool
    end_of_turn: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Affixes:
    """A tail as ``head + transform(content) + foot``, checked against the template's own rendering."""

    head: str
    transform: Callable[[str], str]
    foot: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminators:
    """Token texts that can end a turn: the known stop tokens first, then any special token."""

    stops: tuple[str, ...]
    specials: tuple[str, ...]

    def cut(self, gap: str) -> int:
        """Where the terminator in ``gap`` ends; 0 if there is none.

        Example:
            >>> Terminators(stops=("</s>",), specials=("<s>",)).cut(" </s><s>[INST]")
            5
        """
        for texts in (self.stops, self.specials):
            found = [(at, -len(text)) for text in texts if text and (at := gap.find(text)) >= 0]
            if found:
                at, length = min(found)
                return at - length
        return 0


class SuffixWriter:
    """Writes the text behind a sampled turn for one template.

    Args:
        template: the template.
        terminators: the tokenizer's terminators.
        call_close: what the template writes at the end of a tool call; empty if unknown.
    """

    def __init__(self, template: ChatTemplate, terminators: Terminators, call_close: str = "") -> None:
        self._template = template
        self._terminators = terminators
        self._call_close = call_close
        self.user_style = self._user_style()
        self._tool_style: TurnStyle | None = None
        self._affixes: dict[tuple[str | None, ...], Affixes | None] = {}
        self._prints_ids = self._prints_names = True

    @property
    def tool_style(self) -> TurnStyle:
        """How tool results follow a turn; found on first use, since environments without tools need none.

        Raises:
            ChatTemplateError: the template can render no tool round in any form.
        """
        if self._tool_style is None:
            self._tool_style = self._find_tool_style()
            self._prints_ids = self._prints("tool_call_id", *_ids(2))
            self._prints_names = self._prints("name", PROBE_TOOL["function"]["name"], "envgradother")
        return self._tool_style

    def ends_of_turn(self) -> list[str]:
        """What ends a turn that users answer, and one that tools answer (if this template has tool rounds)."""
        ends = [self.user_style.end_of_turn]
        with suppress(ChatTemplateError):
            ends.append(self.tool_style.end_of_turn)
        return [end for end in dict.fromkeys(ends) if end]

    def probe_tail(self) -> str:
        """What follows a turn with a tool call, for a probe result.

        Raises:
            ChatTemplateError: the template can render no tool round.
        """
        return self._tail([_probe_result()], None, self.tool_style)

    def write(self, results: Sequence[Message], tools: ToolSchemas) -> tuple[str, str]:
        """``(end_of_turn, tail)`` for ``results``, which are all messages that answer one turn.

        Raises:
            ChatTemplateError: no results, a role other than ``tool`` and ``user``, or the template refuses them.
        """
        roles = {str(message.get("role")) for message in results}
        if not results or not roles <= {"tool", "user"}:
            raise ChatTemplateError(
                f"a turn must be followed by at least one message with role 'tool' or 'user', got roles {sorted(roles)}"
            )
        if "tool" not in roles:
            return self.user_style.end_of_turn, self._tail(results, tools, self.user_style)
        style = self.tool_style
        return style.end_of_turn, self._tail(results, tools, style)

    def _tail(self, results: Sequence[Message], tools: ToolSchemas, style: TurnStyle) -> str:
        if style.role == "user":
            results = _as_user(results)
        if len(results) == 1:
            affixes = self._composition(results[0], tools, style)
            if affixes is not None:
                return affixes.head + affixes.transform(content_text(results[0].get("content"))) + affixes.foot
        try:
            return self._cut(results, tools, style)
        except ChatTemplateError:
            # An id that the model wrote may not have the form that the template demands.
            safe = [
                {**message, "tool_call_id": name} if "tool_call_id" in message else message
                for message, name in zip(results, _ids(len(results)), strict=True)
            ]
            return self._cut(safe, tools, style)

    def _try_tail(self, results: Sequence[Message], tools: ToolSchemas, style: TurnStyle) -> str | None:
        try:
            return self._cut(_as_user(results) if style.role == "user" else results, tools, style)
        except ChatTemplateError:
            return None

    def _cut(self, results: Sequence[Message], tools: ToolSchemas, style: TurnStyle) -> str:
        calls = [message for message in results if message.get("role") == "tool"] if style.with_call else []
        # Of several calls the last one is followed by the results; a template may print only the first.
        sentinel = SENTINEL
        while any(sentinel in content_text(message.get("content")) for message in results):
            sentinel += "x"
        for marked in dict.fromkeys((max(len(calls) - 1, 0), 0)):
            text = self._template.render([*_opening(calls, marked, sentinel), *results], tools)
            _, found, after = text.partition(sentinel)
            if found:
                return after[self._call_end(after) :] if style.with_call else after.removeprefix(style.end_of_turn)
        raise ChatTemplateError(
            "the chat template does not print the content of an assistant turn, so what follows the turn cannot be "
            "found: pass another template as chat_template="
        )

    def _prints(self, field: str, *values: str) -> bool:
        """Whether tool results are printed with this field of theirs."""
        tails = {self._try_tail([_probe_result(**{field: value})], None, self.tool_style) for value in values}
        return len(tails) > 1 or None in tails

    def _call_end(self, after: str) -> int:
        start = self._skip_call(after)
        return start + self._terminators.cut(after[start:])

    def _skip_call(self, after: str) -> int:
        """Behind the call's own closing text, unless a known stop token is part of it."""
        stops = [at for text in self._terminators.stops if text and (at := after.find(text)) >= 0]
        close = after.find(self._call_close) if self._call_close else -1
        if close < 0 or (stops and min(stops) < close + len(self._call_close)):
            return 0
        return close + len(self._call_close)

    def _composition(self, result: Message, tools: ToolSchemas, style: TurnStyle) -> Affixes | None:
        as_tool = style.role == "tool"
        name = str(result.get("name")) if as_tool and self._prints_names else None
        if as_tool and (self._prints_ids or (name is not None and name not in _tool_names(tools))):
            return None  # every id, and every name that the model made up, has a head of its own
        key = (style.role, name, _tools_key(tools))
        if key not in self._affixes:
            if len(self._affixes) >= _MAX_CACHED:
                self._affixes.clear()
            self._affixes[key] = self._prove(result, tools, style)
        return self._affixes[key]

    def _prove(self, result: Message, tools: ToolSchemas, style: TurnStyle) -> Affixes | None:
        """The affixes, if composing equals rendering on every probe content.

        A template treats a content apart by its length, or by comparing it with string literals: these are probes too.
        """
        marked = self._try_tail([{**result, "content": PROBE_RESULT}], tools, style)
        if marked is None or marked.count(PROBE_RESULT) != 1:
            return None
        contents = [*_PROBE_CONTENTS, *_literals(self._template)]
        rendered = [(content, self._try_tail([{**result, "content": content}], tools, style)) for content in contents]
        for transform in _TRANSFORMS:
            head, found, foot = marked.partition(transform(PROBE_RESULT))
            if found and all(head + transform(content) + foot == tail for content, tail in rendered):
                return Affixes(head=head, transform=transform, foot=foot)
        return None

    def _user_style(self) -> TurnStyle:
        text = self._template.try_render([*_opening([]), {"role": "user", "content": PROBE_RESULT}])
        gap = _gap(text)
        end = "" if gap is None else gap[: self._terminators.cut(gap)]
        return TurnStyle(role="user", with_call=False, end_of_turn=end)

    def _find_tool_style(self) -> TurnStyle:
        result = _probe_result()
        plain = self._tool_text([], result)
        called = self._tool_text([result], result)
        # The turn that was sampled holds a call: where the template writes something else behind a call than behind
        # plain text, the call's rendering is the right one.
        after_plain = None if plain is None else plain.partition(SENTINEL)[2]
        if after_plain is not None and (called is None or called.endswith(after_plain)):
            return self._plain_style(after_plain)
        if called is not None:
            after = called.partition(SENTINEL)[2]
            start = self._skip_call(after)
            gap = after[start : after.find(PROBE_RESULT)]
            cut = self._terminators.cut(gap)
            if cut:
                # A stop token that closes the call is the whole end of turn; text before it belongs to the call.
                end = gap[:cut] if start else _last_token(gap[:cut], self._terminators)
                return TurnStyle(role="tool", with_call=True, end_of_turn=end)
        if after_plain is not None:
            return self._plain_style(after_plain)
        if self._template.try_render([*_opening([]), {"role": "user", "content": PROBE_RESULT}]) is None:
            self._template.render([*_opening([]), result])
            raise ChatTemplateError(
                "the chat template prints neither tool messages nor a second user message, so it cannot render a tool "
                "round: pass another template as chat_template="
            )
        return self.user_style

    def _plain_style(self, after: str) -> TurnStyle:
        gap = after[: after.find(PROBE_RESULT)]
        return TurnStyle(role="tool", with_call=False, end_of_turn=gap[: self._terminators.cut(gap)])

    def _tool_text(self, calls: Sequence[Message], result: Message) -> str | None:
        """The rendering of a tool round, or None if the template does not know the ``tool`` role."""
        opening = _opening(calls)
        text = self._template.try_render([*opening, result])
        if text is None or _gap(text) is None:
            return None
        as_answer = self._template.try_render([*opening, {"role": "assistant", "content": PROBE_RESULT}])
        return None if text == as_answer else text


def _probe_result(**fields: str) -> Message:
    name = PROBE_TOOL["function"]["name"]
    return {"role": "tool", "name": name, "tool_call_id": _ids(1)[0], "content": PROBE_RESULT, **fields}


def _opening(calls: Sequence[Message], marked: int = 0, sentinel: str = SENTINEL) -> list[Message]:
    """A user message and a turn with the sentinel: as its content, or as an argument of call number ``marked``."""
    user: Message = {"role": "user", "content": PROBE_USER}
    if not calls:
        return [user, {"role": "assistant", "content": sentinel}]
    written = [
        {
            "id": call.get("tool_call_id") or name,
            "type": "function",
            "function": {
                "name": call.get("name") or PROBE_TOOL["function"]["name"],
                "arguments": {"envgradkey": sentinel if index == marked else ""},
            },
        }
        for index, (call, name) in enumerate(zip(calls, _ids(len(calls)), strict=True))
    ]
    return [user, {"role": "assistant", "content": "", "tool_calls": written}]


def _as_user(results: Sequence[Message]) -> list[Message]:
    """Results of a template without tool messages: one user message, tool results in Hermes form."""
    parts = [
        f"<tool_response>\n{content_text(message.get('content'))}\n</tool_response>"
        if message.get("role") == "tool"
        else content_text(message.get("content"))
        for message in results
    ]
    return [{"role": "user", "content": "\n".join(parts)}]


def _gap(text: str | None) -> str | None:
    """What stands between the sentinel and the result; None if they are not there in this order."""
    if text is None:
        return None
    _, found, after = text.partition(SENTINEL)
    gap, has_result, _ = after.partition(PROBE_RESULT)
    return gap if found and has_result else None


def _last_token(text: str, terminators: Terminators) -> str:
    ends = [token for token in (*terminators.stops, *terminators.specials) if token and text.endswith(token)]
    return max(ends, key=len, default="")


def _ids(count: int) -> list[str]:
    return [_SAFE_ID.format(index) for index in range(count)]


def _tools_key(tools: ToolSchemas) -> str:
    return json.dumps(tools, sort_keys=True, default=str) if tools else ""


def _tool_names(tools: ToolSchemas) -> set[str]:
    return {str(tool.get("function", tool).get("name")) for tool in tools or ()}


def _literals(template: ChatTemplate) -> list[str]:
    from jinja2 import Environment

    source = template.tokenizer.get_chat_template(template.source)
    strings = [str(value)[1:-1] for _, kind, value in Environment().lex(source) if kind == "string"]
    found = dict.fromkeys(literal for literal in strings if literal and len(literal) <= _MAX_LITERAL)
    return [content for literal in found for content in (literal, f"{literal}x{literal}")]
