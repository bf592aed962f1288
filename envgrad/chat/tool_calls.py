"""Sampled text -> tool calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from ..errors import ConfigurationError
from ..types import Message, ToolCall
from .call_forms import CallForm, FirstOf, Found, JsonForm, NamedForm, RawCall, malformed
from .derive import MIN_MARK, derive_calls, derive_reasoning
from .reading import Parsed, ReasoningMarks, scan
from .template import ChatTemplate, ToolSchemas
from .text_forms import ChannelForm, PythonForm, TaggedForm

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ToolParser: TypeAlias = Callable[[str], tuple[Sequence[ToolCall], str]]
"""A parser of one's own: the sampled text without reasoning -> the calls in order, and the text around them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """What a sampled turn says.

    Attributes:
        message: the assistant message: ``content`` (always a string), with ``reasoning_content`` and ``tool_calls``
            where the turn has them. A call that cannot be parsed stays in ``content`` as it was written.
        calls: all calls in order, those that cannot be parsed too (their ``error`` is set).
        text: the decoded turn without its terminator.
    """

    message: Message
    calls: tuple[ToolCall, ...]
    text: str


PARSERS: Mapping[str, CallForm] = {
    "hermes": JsonForm(open="<tool_call>", close="</tool_call>"),
    "llama3_json": FirstOf(
        forms=(
            JsonForm(open="<|python_tag|>", close="", arguments_key="parameters"),
            JsonForm(open="", close="", arguments_key="parameters"),
        )
    ),
    "mistral": FirstOf(
        forms=(
            JsonForm(open="[TOOL_CALLS]", close=""),
            NamedForm(open="[TOOL_CALLS]", middle="[ARGS]", close="", id_open="[CALL_ID]"),
            NamedForm(open="[TOOL_CALLS]", middle="", close=""),
        )
    ),
    "pythonic": FirstOf(
        forms=(PythonForm(open="<|tool_call_start|>", close="<|tool_call_end|>"), PythonForm(open="", close=""))
    ),
    "tagged": TaggedForm(
        open="<tool_call>\n<function=",
        middle=">",
        key_open="<parameter=",
        key_close=">\n",
        value_close="\n</parameter>",
        close="</function>\n</tool_call>",
    ),
    "channels": ChannelForm(),
}
"""Named ways to write calls, for ``tool_parser=``."""

_MARKERS = {
    "<|tool_call_start|>": "pythonic",
    "[TOOL_CALLS]": "mistral",
    "<|python_tag|>": "llama3_json",
    "<|channel|>": "channels",
}
"""Tokens that give a form away where the template prints no calls."""

_PARSE_ERRORS = (ValueError, LookupError, TypeError, AttributeError, RecursionError)


class TurnReader:
    """Reads sampled texts of one tokenizer and template.

    By order: ``tool_parser``; the tokenizer's ``response_template``; the form derived from the template; a named form
    whose marker the tokenizer knows; Hermes.

    Raises:
        ConfigurationError: an unknown parser name.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: ChatTemplate | None,
        tool_parser: str | ToolParser | None,
        end_of_turn: str = "",
    ) -> None:
        if isinstance(tool_parser, str) and tool_parser not in PARSERS:
            raise ConfigurationError(
                f"tool_parser={tool_parser!r} is no known parser: use one of {sorted(PARSERS)}, or a callable that "
                "takes the sampled text and returns (tool calls, content)"
            )
        self._tokenizer = tokenizer
        self._parser = tool_parser if callable(tool_parser) else None
        self.template = template
        self.marks = ReasoningMarks()
        self._dropped: tuple[str, ...] = ()
        writing = None
        if template is not None:
            specials = [token.content for token in tokenizer.added_tokens_decoder.values()]
            self.marks, self._dropped = derive_reasoning(template, specials)
            footer = end_of_turn[: max((end_of_turn.rfind(token) for token in specials), default=0)].strip()
            self._dropped += (footer,) if len(footer) >= MIN_MARK else ()
            writing = derive_calls(template, end_of_turn)
        if writing is not None:
            self.template = writing.template
        self.call_close = "" if writing is None else writing.form.close
        self._uses_response_template = tool_parser is None and bool(tokenizer.response_template)
        if isinstance(tool_parser, str):
            self._form = PARSERS[tool_parser]
        elif writing is not None:
            # A template that prints calls but no schemas: the prompt asks for Hermes form, the model may use its own.
            known = writing.template.knows_tools
            self._form = writing.form if known else FirstOf(forms=(PARSERS["hermes"], writing.form))
            self._dropped += writing.wrappers
        else:
            self._form = PARSERS[_named(tokenizer, template)]

    def read(self, text: str, tools: ToolSchemas, *, prompt: str) -> Parsed:
        """The parts of a text sampled behind ``prompt``. Only a ``tool_parser`` of one's own can raise."""
        marks = replace(self.marks, opened=prompt.rfind(self.marks.open) > prompt.rfind(self.marks.close))
        if self._parser is not None:
            parsed = self._scan(text, _NoCalls(), marks, tools)
            calls, content = self._parser(parsed.content)
            raw = [RawCall(name=call.name, arguments=call.arguments, error=call.error, id=call.id) for call in calls]
            return replace(parsed, content=content, calls=tuple(raw))
        if self._uses_response_template:
            return self._read_response(text, marks, tools, prompt)
        return self._scan(text, self._form, marks, tools)

    def _scan(self, text: str, form: CallForm, marks: ReasoningMarks, tools: ToolSchemas) -> Parsed:
        parsed = scan(text, form, marks, tools)
        content = parsed.content
        for mark in self._dropped:
            content = content.replace(mark, "")
        return parsed if content == parsed.content else replace(parsed, content=content.strip())

    def _read_response(self, text: str, marks: ReasoningMarks, tools: ToolSchemas, prompt: str) -> Parsed:
        try:
            schemas = [dict(tool) for tool in tools or ()]
            message = self._tokenizer.parse_response(text, prefix=prompt, tools=schemas or None)
            return _parsed_message(message)
        except _PARSE_ERRORS as error:
            # One call that does not parse fails the whole response: read the turn call by call instead.
            parsed = self._scan(text, self._form, marks, tools)
            if parsed.calls:
                return parsed
            return replace(parsed, calls=(malformed(text, str(error)),))


def _parsed_message(message: Mapping[str, Any]) -> Parsed:
    content = message.get("content")
    reasoning = next((message[key] for key in ("reasoning_content", "thinking", "reasoning") if message.get(key)), None)
    calls = [_response_call(call) for call in message.get("tool_calls") or ()]
    return Parsed(
        content=content if isinstance(content, str) else "",
        reasoning=reasoning if isinstance(reasoning, str) else None,
        calls=tuple(calls),
    )


def _response_call(call: object) -> RawCall:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        return malformed(str(call), "a call must name its tool")
    written = call.get("id") if isinstance(call, Mapping) else None
    return RawCall(name=name, arguments=function.get("arguments", {}), id=written if isinstance(written, str) else None)


def _named(tokenizer: PreTrainedTokenizerBase, template: ChatTemplate | None) -> str:
    if template is None or not template.knows_tools:
        return "hermes"
    known = {token.content for token in tokenizer.added_tokens_decoder.values()}
    return next((name for marker, name in _MARKERS.items() if marker in known), "hermes")


@dataclass(frozen=True, slots=True)
class _NoCalls:
    close: str = ""

    def find(self, text: str, start: int, tools: ToolSchemas) -> Found | None:
        return None
