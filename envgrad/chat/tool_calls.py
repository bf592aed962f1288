"""Sampled text -> tool calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from ..errors import ConfigurationError
from ..types import Message, ToolCall
from .call_forms import CallForm, JsonForm, RawCall
from .reading import Parsed, ReasoningMarks, scan
from .template import ChatTemplate, ToolSchemas

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ToolParser: TypeAlias = Callable[[str], tuple[Sequence[ToolCall], str]]
"""A parser of one's own: the sampled text without reasoning -> the calls in order, and the text around them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """What a sampled turn says.

    Attributes:
        message: the assistant message: ``content`` (always a string), and ``reasoning_content`` and ``tool_calls`` where
            the turn has them. A call that cannot be parsed stays in ``content`` as it was written.
        calls: all calls in order, those that cannot be parsed too (their ``error`` is set).
        text: the decoded turn without its terminator.
    """

    message: Message
    calls: tuple[ToolCall, ...]
    text: str


PARSERS: dict[str, CallForm] = {
    "hermes": JsonForm(open="<tool_call>", close="</tool_call>"),
}


class TurnReader:
    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate | None, tool_parser: str | ToolParser | None) -> None:
        self.template = template
        self.call_close = "</tool_call>"
        self.marks = ReasoningMarks()
        self._form = PARSERS["hermes"]

    def read(self, text: str, tools: ToolSchemas) -> Parsed:
        return scan(text, self._form, self.marks, tools)
