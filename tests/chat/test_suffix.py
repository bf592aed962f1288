from __future__ import annotations

import pytest

from envgrad.chat.suffix import SuffixWriter, Terminators, TurnStyle
from envgrad.chat.template import ChatTemplate
from envgrad.types import Message
from helpers.chat_templates import CASES, TOOLS
from helpers.tokenizers import CHATML, bpe_tokenizer


def writer(source: str, stops: tuple[str, ...] = ("<|im_end|>",), specials: tuple[str, ...] = ()) -> SuffixWriter:
    template = ChatTemplate.probe(bpe_tokenizer(source), None, {})
    return SuffixWriter(template, Terminators(stops=stops, specials=specials), "</tool_call>")


def result(content: str, name: str = "inc", call_id: str = "c00000000") -> Message:
    return {"role": "tool", "name": name, "tool_call_id": call_id, "content": content}


def test_terminators() -> None:
    marks = Terminators(stops=("<b>", "<bb>"), specials=("<a>",))
    assert marks.cut("x<a><b>y") == 7  # a known stop token comes first, wherever it stands
    assert marks.cut("x<a>y") == 4
    assert marks.cut("xyz") == 0


def test_an_unknown_terminator_is_the_first_special_token() -> None:
    assert writer(CHATML, stops=(), specials=("<|im_start|>", "<|im_end|>")).tool_style.end_of_turn == "<|im_end|>"
    assert writer(CHATML, stops=()).tool_style.end_of_turn == ""


def test_a_template_that_ends_a_turn_with_a_call_in_its_own_way() -> None:
    source = CHATML.replace("{{ '<|im_end|>\n' }}", "{{ '<|end_call|>' if message.tool_calls else '<|im_end|>\n' }}")
    assert source != CHATML
    found = writer(source, stops=("<|im_end|>", "<|end_call|>"))
    assert found.tool_style == TurnStyle(role="tool", with_call=True, end_of_turn="<|end_call|>")
    expected = "<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"
    assert found.write([result("7")], TOOLS) == ("<|end_call|>", expected)
    assert found.write([result("7"), result("8")], TOOLS)[1].count("<|im_start|>tool") == 2
    assert found.write([{"role": "user", "content": "x"}], None)[0] == "<|im_end|>"


@pytest.mark.parametrize(
    ("expression", "contents"),
    [
        # What a template does to some contents only is found among its own string literals, or by length.
        ("(message.content if message.content != 'quit' else 'bye')", {"quit": "bye", "go": "go"}),
        ("message.content[:40]", {"a": "a", "a" * 50: "a" * 40}),
    ],
)
def test_a_result_that_cannot_be_composed_is_rendered(expression: str, contents: dict[str, str]) -> None:
    source = CHATML.replace("message.content }}", expression + " }}")
    assert source != CHATML
    found = writer(source)
    for content, printed in contents.items():
        tail = f"\n<|im_start|>tool\n{printed}<|im_end|>\n<|im_start|>assistant\n"
        assert found.write([result(content)], TOOLS)[1] == tail
    assert list(found._affixes.values()) == [None]


def test_composition_renders_once_for_each_tool_set() -> None:
    found = writer(CHATML)
    found.write([result("1")], TOOLS)
    rendered = []
    original = ChatTemplate.render

    def counted(self: ChatTemplate, *args: object, **options: object) -> str:
        rendered.append(args)
        return original(self, *args, **options)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChatTemplate, "render", counted)
        for content in ("2", "3", "\n", ""):
            found.write([result(content, name="made_up", call_id=content)], TOOLS)
        assert rendered == []
        found.write([result("1"), result("2")], TOOLS)
        assert len(rendered) == 1


def test_a_result_that_holds_the_sentinel_is_kept_whole() -> None:
    for name in ("chatml", "channels", "merges_results"):
        renderer = CASES[name].renderer()
        assert renderer._suffixes is not None
        messages = [result("envgradsentinel"), result("envgradresult envgradsentinel")]
        tail = renderer._suffixes.write(messages, TOOLS)[1]
        assert tail.count("envgradsentinel") == 2
