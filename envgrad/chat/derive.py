"""How a template writes tool calls and reasoning, found by rendering probe messages.

Two calls with recognisable names and arguments are rendered. What stands around and between them gives the form::

    <tool_call>\\n{"name": "A", "arguments": {...}}\\n</tool_call>\\n<tool_call>\\n{"name": "B", "arguments": {...}}\\n</tool_call>
    [   before  ][           call                ][             between         ][            call               ][   after    ]

``open`` is the common end of *before* and *between*, ``close`` the common start of *between* and *after*. A form counts
only if it reads the rendered calls back, equal.
"""  # noqa: E501 - the picture is one line

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from ..types import Message
from .call_forms import CallForm, JsonForm, MalformedCall, NamedForm, decode_json, iter_found
from .reading import ReasoningMarks
from .template import PROBE_TOOL, PROBE_USER, SENTINEL, ChatTemplate
from .text_forms import BareObjectForm, ChannelForm, PythonForm, TaggedForm

_REASONING = "envgradreasoning"
MIN_MARK = 4
"""Text around calls is dropped from the content only if it is at least this long: ``<calls>``, but not ``,``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probe:
    name: str
    arguments: dict[str, Any]
    id: str

    def message(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


_FIRST = _Probe(name="envgradfirst", arguments={"envgradkey": "envgradvalue", "envgradcount": 7}, id="envgrad01")
_SECOND = _Probe(name="envgradsecond", arguments={"envgradkey": "envgradother", "envgradcount": 8}, id="envgrad02")
_KEY, _COUNT = tuple(_FIRST.arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallWriting:
    """How a template writes calls.

    Attributes:
        template: the template, told how it wants arguments.
        form: reads the calls back.
        wrappers: text that the template puts around all calls of a turn; it is not content.
    """

    template: ChatTemplate
    form: CallForm
    wrappers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """One rendered call, without what stands around it, and a form whose ``open`` and ``close`` are still empty."""

    start: int
    end: int
    form: CallForm


def derive_calls(template: ChatTemplate, end_of_turn: str) -> CallWriting | None:
    """The form in which ``template`` writes calls; None if it writes none, or in a form that is not understood."""
    for as_text in (False, True):
        told = replace(template, arguments_as_text=as_text)
        for content in (SENTINEL, ""):
            for probes in ((_FIRST, _SECOND), (_FIRST,)):
                region = _region(told, content, probes, end_of_turn)
                if region is None:
                    continue
                other = region if len(probes) > 1 else _region(told, content, (_SECOND,), end_of_turn)
                for form, wrappers in _forms(region, probes):
                    single = len(probes) > 1 or _reads_back(form, other or "", (_SECOND,))
                    if single and _reads_back(form, region, probes):
                        return CallWriting(template=told, form=form, wrappers=wrappers)
    return None


def derive_reasoning(template: ChatTemplate, specials: Sequence[str]) -> tuple[ReasoningMarks, tuple[str, ...]]:
    """The marks around reasoning, and the text that the template writes before content (channel headers and the like).

    Templates that print no reasoning get ``<think>`` and ``</think>``.
    """
    prompt = template.generation_prompt()
    marks, headers = ReasoningMarks(), []
    message: Message = {"role": "assistant", "content": SENTINEL, "reasoning_content": _REASONING}
    text = _turn(template, message)
    before, found, after = (text or "").partition(_REASONING)
    between, has_content, _ = after.partition(SENTINEL)
    if found and has_content:
        open_ = _behind(before, prompt).strip() or _last_tag(before)
        close, header = _first_tag(between, specials)
        if open_ and close:
            marks = ReasoningMarks(open=open_, close=close)
            headers.append(header)
    plain = _turn(template, {"role": "assistant", "content": SENTINEL})
    if plain is not None and SENTINEL in plain:
        headers.append(_behind(plain.partition(SENTINEL)[0], prompt).strip())
    kept = [mark for mark in headers if len(mark) >= MIN_MARK and marks.open not in mark and marks.close not in mark]
    opened = prompt.rfind(marks.open) > prompt.rfind(marks.close)
    return replace(marks, opened=opened), tuple(dict.fromkeys(sorted(kept, key=len, reverse=True)))


def _turn(template: ChatTemplate, message: Message) -> str | None:
    """The rendering behind the user's message."""
    text = template.try_render([{"role": "user", "content": PROBE_USER}, message], generation=False)
    return None if text is None else text.rpartition(PROBE_USER)[2]


def _behind(text: str, prompt: str) -> str:
    """``text`` behind the last generation prompt in it; empty if there is none."""
    return text.rpartition(prompt)[2] if prompt and prompt in text else ""


def _last_tag(text: str) -> str:
    match = re.search(r"(<[^<>\s]+>|\[[A-Z_]+\])\s*$", text)
    return match.group(1) if match else ""


def _first_tag(text: str, specials: Sequence[str]) -> tuple[str, str]:
    """The closing mark at the start of ``text``, and what follows it."""
    found = [(at, -len(token), token) for token in specials if token and (at := text.find(token)) >= 0]
    match = re.search(r"</[^<>\s]+>|\[/[A-Z_]+\]", text)
    if match:
        found.append((match.start(), -len(match.group()), match.group()))
    if not found:
        return text.strip(), ""
    at, _, token = min(found)
    return text[:at].strip() + token, text[at + len(token) :].strip()


def _region(template: ChatTemplate, content: str, probes: Sequence[_Probe], end_of_turn: str) -> str | None:
    """The calls' text: behind the turn's content (or header), before the end of turn."""
    calls = [probe.message() for probe in probes]
    message: Message = {"role": "assistant", "content": content, "tool_calls": calls}
    text = _turn(template, message)
    if text is None or any(probe.name not in text for probe in probes):
        tools = [_schema(probe) for probe in probes]
        user = {"role": "user", "content": PROBE_USER}
        text = template.try_render([user, message], tools, generation=False)
        text = None if text is None else text.rpartition(PROBE_USER)[2]
    if text is None or any(probe.name not in text for probe in probes):
        return None
    first = text.find(probes[0].name)
    if content and content in text[:first]:
        text = text.partition(content)[2]
    else:
        text = _behind_header(template, text, first)
        text = text.replace(content, "") if content else text  # some templates print it behind the calls
    end = text.rfind(end_of_turn.strip()) if end_of_turn.strip() else -1
    return text[:end] if end > text.rfind(probes[-1].name) else text


def _behind_header(template: ChatTemplate, text: str, first: int) -> str:
    """``text`` without what the template writes before any answer."""
    prompt = template.generation_prompt()
    header = prompt if prompt in text else prompt.partition("<think>")[0]
    if header and header in text[:first]:
        return text.partition(header)[2]
    plain = _turn(template, {"role": "assistant", "content": SENTINEL}) or ""
    common = _common_start(text[:first], plain)
    return text[max(common.rfind(mark) for mark in ">])}\n") + 1 :]


def _schema(probe: _Probe) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": "A probe."} for key in probe.arguments}
    function = {
        **PROBE_TOOL["function"],
        "name": probe.name,
        "parameters": {"type": "object", "properties": properties},
    }
    return {"type": "function", "function": function}


def _forms(region: str, probes: Sequence[_Probe]) -> Iterator[tuple[CallForm, tuple[str, ...]]]:
    if "<|channel|>" in region and f"to=functions.{probes[0].name}" in region:
        yield ChannelForm(), ()
        return
    for find_span in (_json_span, _named_span, _python_span, _bare_span, _tagged_span):
        spans: list[_Span] = []
        at = 0
        for probe in probes:
            span = find_span(region, at, probe)
            if span is None:
                break
            spans.append(span)
            at = span.end
        if len(spans) == len(probes):
            yield _with_marks(region, spans)


def _with_marks(region: str, spans: Sequence[_Span]) -> tuple[CallForm, tuple[str, ...]]:
    first, last = spans[0], spans[-1]
    before, after = region[: first.start], region[last.end :]
    if len(spans) == 1:
        open_ = before.strip().rstrip("[")
        # A name that is written twice cannot be part of the mark.
        return _marked(first.form, open_[open_.rfind("<") :] if _FIRST.name in open_ else open_, ""), ()
    between = region[first.end : last.start]
    if isinstance(first.form, JsonForm | PythonForm) and between.strip() in ("", ",", ";"):
        if isinstance(first.form, JsonForm):
            return _marked(first.form, before.strip().rstrip("[").rstrip(), ""), ()
        return _marked(first.form, before.strip().removesuffix("["), after.strip().removeprefix("]")), ()
    close = _whole_tags(_common_start(between, after), between, after)
    rest = between[len(close) :]
    open_ = _common_end(before, rest).lstrip()
    start = re.search(r"[<\[]", open_)
    open_ = open_[start.start() :] if start else open_
    wrappers = (
        before[: len(before) - len(open_)].strip(),
        after[len(close) :].strip(),
        rest[: len(rest) - len(open_)].strip(),
    )
    return _marked(first.form, open_, close), tuple(
        mark for mark in wrappers if len(mark) >= MIN_MARK and "envgrad" not in mark
    )


def _common_start(left: str, right: str) -> str:
    equal = takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    return "".join(pair[0] for pair in equal)


def _common_end(left: str, right: str) -> str:
    return _common_start(left[::-1], right[::-1])[::-1]


def _whole_tags(common: str, between: str, after: str) -> str:
    """A common start that does not end inside a tag: ``</call><`` is cut back to ``</call>``."""
    if common in (between, after):
        return common
    end = max(common.rfind(mark) for mark in ">])}")
    return common[: end + 1]


def _marked(form: CallForm, open_: str, close: str) -> CallForm:
    if isinstance(form, JsonForm | PythonForm):
        return replace(form, open=open_.strip(), close=close.strip())
    if isinstance(form, NamedForm):
        return replace(form, open=open_.strip(), close=close)
    if isinstance(form, BareObjectForm | TaggedForm):
        return replace(form, open=open_.strip(), close=close.strip())
    return form


def _reads_back(form: CallForm, region: str, probes: Sequence[_Probe]) -> bool:
    calls = [call for found in iter_found(form, region, None) for call in found.calls]
    return [(call.name, call.arguments, call.error) for call in calls] == [
        (probe.name, probe.arguments, None) for probe in probes
    ]


def _json_span(region: str, start: int, probe: _Probe) -> _Span | None:
    name_at = region.find(probe.name, start)
    for match in re.finditer(r"\{", region[:name_at]):
        if match.start() < start:
            continue
        try:
            value, end = decode_json(region, match.start())
        except MalformedCall:
            continue
        fields = value.get("function", value) if isinstance(value, dict) else None
        if end <= name_at or not isinstance(fields, dict):
            continue
        name_keys = [key for key, item in fields.items() if item == probe.name]
        plain = [key for key, item in fields.items() if item == probe.arguments]
        wrapped = [key for key, item in fields.items() if isinstance(item, str) and _decodes_to(item, probe.arguments)]
        if name_keys and (plain or wrapped):
            key = (plain or wrapped)[0]
            form = JsonForm(open="", close="", name_key=name_keys[0], arguments_key=key, unwrap=not plain)
            return _Span(start=match.start(), end=end, form=form)
    return None


def _decodes_to(text: str, value: object) -> bool:
    try:
        return bool(decode_json(text, 0)[0] == value)
    except MalformedCall:
        return False


def _named_span(region: str, start: int, probe: _Probe) -> _Span | None:
    at = region.find(probe.name, start)
    behind = at + len(probe.name)
    for match in re.finditer(r"\{", region[behind:]):
        opening = behind + match.start()
        if not _decodes_to(region[opening:], probe.arguments):
            continue
        middle, id_open = region[behind:opening], ""
        if probe.id in middle:
            id_open, _, middle = middle.partition(probe.id)
        _, end = decode_json(region, opening)
        return _Span(start=at, end=end, form=NamedForm(open="", middle=middle, close="", id_open=id_open))
    return None


def _python_span(region: str, start: int, probe: _Probe) -> _Span | None:
    pattern = rf"{probe.name}\(\s*{_KEY}\s*=\s*([\"']){probe.arguments[_KEY]}\1\s*,\s*{_COUNT}\s*=\s*\d\s*\)"
    match = re.compile(pattern).search(region, start)
    return match and _Span(start=match.start(), end=match.end(), form=PythonForm(open="", close=""))


def _bare_span(region: str, start: int, probe: _Probe) -> _Span | None:
    pairs = [rf"{_KEY}\s*:\s*(?P<quote>\S+?){probe.arguments[_KEY]}(?P=quote)", rf"{_COUNT}\s*:\s*\d"]
    for first, second in (pairs, pairs[::-1]):  # some templates sort the keys
        match = re.compile(rf"{probe.name}\s*\{{\s*{first}\s*,\s*{second}\s*\}}").search(region, start)
        if match:
            form = BareObjectForm(open="", close="", quote=match.group("quote"))
            return _Span(start=match.start(), end=match.end(), form=form)
    return None


def _tagged_span(region: str, start: int, probe: _Probe) -> _Span | None:
    value, count = str(probe.arguments[_KEY]), str(probe.arguments[_COUNT])
    parts = re.compile(
        rf"{probe.name}(?P<head>(?:(?!{probe.name}).)*?){_KEY}(?P<key_close>.*?){value}(?P<turn>.*?){_COUNT}(?P=key_close){count}",
        re.DOTALL,
    ).search(region, start)
    if parts is None:
        return None
    head, turn = parts["head"], parts["turn"]
    key_open = _common_end(head, turn).lstrip()
    key_open = key_open[key_open.rfind("<") :] if "<" in key_open else key_open
    value_close = turn[: len(turn) - len(key_open)].rstrip() if key_open else ""
    middle = head[: len(head) - len(key_open)]
    end = parts.end() + len(value_close)
    if not key_open or not value_close.strip() or region[parts.end() : end] != value_close:
        return None
    form = TaggedForm(
        open="", middle=middle, key_open=key_open, key_close=parts["key_close"], value_close=value_close, close=""
    )
    return _Span(start=parts.start(), end=end, form=form)
