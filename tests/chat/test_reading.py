from __future__ import annotations

from envgrad.chat.call_forms import JsonForm
from envgrad.chat.reading import ReasoningMarks, scan

FORM = JsonForm(open="<tool_call>", close="</tool_call>")
OPENED = ReasoningMarks(opened=True)


def test_text_without_marks_is_content_as_it_is() -> None:
    parsed = scan("  a\n", FORM, ReasoningMarks(), None)
    assert (parsed.content, parsed.reasoning, parsed.calls) == ("  a\n", None, ())


def test_several_thoughts() -> None:
    parsed = scan("<think>a</think>b<think>c</think>d", FORM, ReasoningMarks(), None)
    assert (parsed.content, parsed.reasoning) == ("bd", "a\nc")


def test_an_opened_thought_may_be_opened_again() -> None:
    assert scan("<think>\na</think>b", FORM, OPENED, None).reasoning == "a"
    assert scan("a</think>b", FORM, OPENED, None).content == "b"


def test_an_empty_thought_is_still_a_thought() -> None:
    assert scan("\n</think>\n\nb", FORM, OPENED, None).reasoning == ""


def test_marks_of_other_names() -> None:
    marks = ReasoningMarks(open="[THINK]", close="[/THINK]")
    parsed = scan("[THINK]a[/THINK]<think>b", FORM, marks, None)
    assert (parsed.reasoning, parsed.content) == ("a", "<think>b")
