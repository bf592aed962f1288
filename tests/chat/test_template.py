from __future__ import annotations

import json
from typing import Any

import pytest

from envgrad.chat.template import ChatTemplate, content_text
from envgrad.errors import ChatTemplateError, ConfigurationError
from helpers.chat_templates import CASES, TOOLS
from helpers.tokenizers import bpe_tokenizer


def probe(name: str) -> ChatTemplate:
    return ChatTemplate.probe(CASES[name].tokenizer(), None, {})


@pytest.mark.parametrize(
    ("name", "blocks", "tools", "system"),
    [
        ("chatml", False, True, True),
        ("no_tools", False, False, False),
        ("blocks", True, False, True),
        ("llama", False, True, True),
        ("mistral", False, True, False),
    ],
)
def test_what_a_template_prints(name: str, blocks: bool, tools: bool, system: bool) -> None:
    template = probe(name)
    assert (template.content_blocks, template.knows_tools, template.system_role) == (blocks, tools, system)


def test_schemas_extend_the_system_prompt_or_the_first_user_message() -> None:
    blocks = probe("blocks").render([{"role": "system", "content": "Be."}, {"role": "user", "content": "hi"}], TOOLS)
    assert blocks.startswith("System: Be.\n\n# Tools") and blocks.endswith("User: hi<end>\nAssistant: ")
    assert json.dumps(TOOLS[0]) in blocks
    alone = probe("blocks").render([{"role": "user", "content": "hi"}], TOOLS)
    assert alone.startswith("System: # Tools")
    user = probe("no_tools").render([{"role": "user", "content": "hi"}], TOOLS)
    assert user.startswith("<s><start>user\n# Tools") and user.endswith("</tool_call>\n\nhi<end>\n<start>assistant\n")


def test_messages_are_not_changed() -> None:
    call: dict[str, Any] = {"id": "a", "function": {"name": "inc", "arguments": {"n": 1}}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
    before = json.dumps(messages)
    probe("no_tools").render(messages, TOOLS)
    assert json.dumps(messages) == before


def test_arguments_take_the_form_that_the_template_prints() -> None:
    function = {"name": "inc", "arguments": '{"n": 1}'}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": function}]},
    ]
    assert '"arguments": {"n": 1}' in probe("dict_arguments").render(messages)


def test_errors_carry_the_templates_own_words() -> None:
    with pytest.raises(ChatTemplateError, match="roles must alternate") as caught:
        probe("no_tools").render([{"role": "user", "content": "a"}] * 2)
    assert caught.value.__cause__ is not None
    with pytest.raises(ChatTemplateError, match="does not print the content of a user message"):
        ChatTemplate.probe(bpe_tokenizer("nothing"), None, {})
    with pytest.raises(ChatTemplateError, match="nobody"):
        ChatTemplate.probe(bpe_tokenizer("{{ raise_exception('nobody') }}"), None, {})


def test_generation_prompt() -> None:
    assert probe("chatml").generation_prompt() == "<|im_start|>assistant\n"
    assert probe("mistral").generation_prompt() == ""


@pytest.mark.parametrize("content", [3, {"text": "a"}, [{"type": "image_url"}], [3]])
def test_content_that_is_not_text(content: object) -> None:
    with pytest.raises(ConfigurationError, match="text"):
        content_text(content)
