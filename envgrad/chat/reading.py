"""Sampled text -> reasoning, content and raw calls, in one scan from left to right."""

from __future__ import annotations

from dataclasses import dataclass

from .call_forms import CallForm, RawCall
from .template import ToolSchemas


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A sampled turn in parts. ``reasoning`` is None if the turn has none."""

    content: str
    reasoning: str | None
    calls: tuple[RawCall, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningMarks:
    """What a template writes around reasoning.

    Attributes:
        open, close: the marks.
        opened: the generation prompt has written ``open`` already, so the sampled text starts inside.
    """

    open: str = "<think>"
    close: str = "</think>"
    opened: bool = False


def scan(text: str, form: CallForm, marks: ReasoningMarks, tools: ToolSchemas) -> Parsed:
    """Split a sampled text. Calls inside reasoning are reasoning; text around calls is content; nothing is lost.

    Example:
        >>> from envgrad.chat.call_forms import JsonForm
        >>> form = JsonForm(open="<tool_call>", close="</tool_call>")
        >>> scan('<think>hm</think>ok<tool_call>{"name": "inc"}</tool_call>', form, ReasoningMarks(), None)
        Parsed(content='ok', reasoning='hm', calls=(RawCall(name='inc', arguments={}, error=None, id=None),))
    """
    at = 0
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[RawCall] = []
    if marks.opened:
        at = len(text) - len(text.lstrip()) if text.lstrip().startswith(marks.open) else 0
        at += len(marks.open) if text.startswith(marks.open, at) else 0
        at = _take_reasoning(text, at, marks, reasoning)
    while True:
        thought = text.find(marks.open, at)
        found = form.find(text, at, tools)
        if thought >= 0 and (found is None or thought < found.start):
            content.append(text[at:thought])
            at = _take_reasoning(text, thought + len(marks.open), marks, reasoning)
        elif found is not None:
            content.append(text[at : found.start])
            if any(call.error is not None for call in found.calls):
                content.append(text[found.start : found.end])
            calls.extend(found.calls)
            at = found.end
        else:
            content.append(text[at:])
            break
    return Parsed(
        content="".join(content).strip() if calls or reasoning else "".join(content),
        reasoning="\n".join(reasoning) if reasoning else None,
        calls=tuple(calls),
    )


def _take_reasoning(text: str, start: int, marks: ReasoningMarks, reasoning: list[str]) -> int:
    end = text.find(marks.close, start)
    stop = end if end >= 0 else len(text)
    reasoning.append(text[start:stop].strip())
    return stop + len(marks.close) if end >= 0 else stop
