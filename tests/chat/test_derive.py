from __future__ import annotations

import pytest

from envgrad.chat.call_forms import CallForm, JsonForm, NamedForm
from envgrad.chat.derive import derive_calls, derive_reasoning
from envgrad.chat.reading import ReasoningMarks
from envgrad.chat.template import ChatTemplate
from envgrad.chat.text_forms import BareObjectForm, ChannelForm, PythonForm, TaggedForm
from helpers.chat_templates import CASES
from helpers.tokenizers import CHATML, bpe_tokenizer

HERMES = JsonForm(open="<tool_call>", close="</tool_call>")


def probe(name: str) -> ChatTemplate:
    return ChatTemplate.probe(CASES[name].tokenizer(), None, {})


@pytest.mark.parametrize(
    ("name", "end", "form"),
    [
        ("chatml", "<|im_end|>", HERMES),
        ("merges_results", "<|im_end|>", HERMES),
        ("llama", "<|eot_id|>", JsonForm(open="", close="", arguments_key="parameters")),
        ("mistral", "</s>", JsonForm(open="[TOOL_CALLS]", close="")),
        ("channels", "<|end|>", ChannelForm()),
        (
            "text_arguments",
            "<|im_end|>",
            NamedForm(open="<|calls|><|call|>function<|sep|>", middle="\n```json\n", close="\n```<|done|>"),
        ),
        (
            "tagged",
            "<|im_end|>",
            TaggedForm(
                open="<tool_call>\n<function=",
                middle=">\n",
                key_open="<parameter=",
                key_close=">\n",
                value_close="\n</parameter>",
                close="</function>\n</tool_call>",
            ),
        ),
        ("python", "<|im_end|>", PythonForm(open="<|calls|>", close="<|done|>")),
        ("bare", "<|im_end|>", BareObjectForm(open="<|call|>call:", close="<|done|>", quote="<|q|>")),
    ],
)
def test_forms_are_found_by_rendering(name: str, end: str, form: CallForm) -> None:
    writing = derive_calls(probe(name), end)
    assert writing is not None and writing.form == form
    assert writing.template.arguments_as_text == (name == "text_arguments")


def test_wrappers_around_all_calls_are_not_part_of_one() -> None:
    source = CHATML.replace(
        "{% for call in", "{% if message.tool_calls %}{{ '<calls>' }}{% endif %}{% for call in"
    ).replace(
        "{{ '\n</tool_call>' }}{% endfor %}",
        "{{ '\n</tool_call>' }}{% endfor %}{% if message.tool_calls %}{{ '</calls>' }}{% endif %}",
    )
    writing = derive_calls(ChatTemplate.probe(bpe_tokenizer(source), None, {}), "<|im_end|>")
    assert writing is not None and writing.form == HERMES
    assert set(writing.wrappers) == {"<calls>", "</calls>"}


@pytest.mark.parametrize("name", ["no_tools", "blocks", "results_as_answers"])
def test_a_template_that_prints_no_calls_has_no_form(name: str) -> None:
    assert derive_calls(probe(name), "<end>") is None


@pytest.mark.parametrize(
    ("name", "marks", "headers"),
    [
        ("chatml", ReasoningMarks(), ()),
        ("drops_earlier_thinking", ReasoningMarks(), ()),
        ("prompt_opens_thinking", ReasoningMarks(opened=True), ()),
        (
            "channels",
            ReasoningMarks(open="<|channel|>analysis<|message|>", close="<|end|>"),
            ("<|start|>assistant<|channel|>final<|message|>", "<|channel|>final<|message|>"),
        ),
    ],
)
def test_reasoning_marks(name: str, marks: ReasoningMarks, headers: tuple[str, ...]) -> None:
    template = probe(name)
    specials = [token.content for token in template.tokenizer.added_tokens_decoder.values()]
    assert derive_reasoning(template, specials) == (marks, headers)


def test_reasoning_marks_of_ones_own() -> None:
    source = CHATML.replace(
        "'\n' + message.content }}",
        "'\n' }}{% if message.reasoning_content %}{{ '[THINK]' + message.reasoning_content + '[/THINK]' }}{% endif %}"
        "{{ message.content }}",
    )
    marks, _ = derive_reasoning(ChatTemplate.probe(bpe_tokenizer(source), None, {}), ())
    assert marks == ReasoningMarks(open="[THINK]", close="[/THINK]")
