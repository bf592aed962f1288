from __future__ import annotations

import ast
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from envgrad.chat import ChatRenderer
from envgrad.errors import ChatTemplateError, ConfigurationError
from envgrad.types import Message
from helpers.chat_templates import CASES, TOOLS, Case
from helpers.tokenizers import CHATML, bpe_tokenizer, chatml_tokenizer

RENDERERS = {name: case.renderer() for name, case in CASES.items()}
OPENING: list[Message] = [{"role": "user", "content": "Count to 3."}]


def result(content: str, call_id: str = "c00000000", name: str = "inc") -> Message:
    return {"role": "tool", "name": name, "tool_call_id": call_id, "content": content}


def call(call_id: str = "c00000000", **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "inc", "arguments": arguments}}


def written(renderer: ChatRenderer, messages: list[Message], answer: Message) -> list[int]:
    """An answer's ids as this template would print it, with the first terminator and nothing behind it."""
    before = renderer.render(messages, TOOLS, generation=True)
    after = renderer.render([*messages, answer], TOOLS)
    assert after.startswith(before)
    ids = renderer.tokenizer.encode(after[len(before) :], add_special_tokens=False)
    stop = next(index for index, token in enumerate(ids) if token in renderer.stop_token_ids)
    return list(ids[: stop + 1])


def assert_text(renderer: ChatRenderer, row: list[int], expected: str) -> None:
    assert renderer.tokenizer.decode(row, skip_special_tokens=False) == expected


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.history and case.tool_role])
def test_row_decodes_to_the_templates_own_rendering(name: str) -> None:
    renderer, case = RENDERERS[name], CASES[name]
    row, messages = renderer.open(OPENING, TOOLS), list(OPENING)
    two = case.many_calls and name != "blocks"
    for turn, contents in enumerate((["1"], [" two\n lines ", "<b> \u00e9"] if two else ["2"])):
        answer: Message = {"role": "assistant", "content": ""}
        if name == "blocks":  # prints no calls
            answer["content"] = "I count."
        else:
            answer["tool_calls"] = [call(f"c0000{turn}{index:03d}", n=index) for index in range(len(contents))]
        results = [result(content, f"c0000{turn}{index:03d}") for index, content in enumerate(contents)]
        sampled = written(renderer, messages, answer)
        row += sampled
        row += renderer.suffix(sampled, results, TOOLS)
        messages += [answer, *results]
    assert_text(renderer, row, renderer.render(messages, TOOLS, generation=True))
    # In one piece these templates' chats are the same tokens: the suffix is encoded behind the end of turn.
    assert row == renderer.tokenizer.encode(renderer.render(messages, TOOLS, generation=True), add_special_tokens=False)


@pytest.mark.parametrize("name", [name for name in CASES if name != "prompt_opens_thinking"])
def test_observations_follow_as_user_messages(name: str) -> None:
    renderer = RENDERERS[name]
    answer: Message = {"role": "assistant", "content": "I guess 3."}
    observation: Message = {"role": "user", "content": "higher"}
    body = renderer.tokenizer.encode("I guess 3.", add_special_tokens=False)
    opening = renderer.open(OPENING, None)
    expected = renderer.render([*OPENING, answer, observation], generation=True)
    row = opening + body + renderer.suffix(body, [observation], None)
    behind = expected.partition("I guess 3.")[2]
    assert renderer.tokenizer.decode(row, skip_special_tokens=False).endswith("I guess 3." + behind)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.tool_role])
@settings(max_examples=15, deadline=None)
@given(content=st.text(max_size=40))
def test_composed_suffix_equals_the_rendering(name: str, content: str) -> None:
    renderer = RENDERERS[name]
    suffixes = renderer._suffixes
    assert suffixes is not None
    message = result(content)
    end, tail = suffixes.write([message], TOOLS)
    assert end == suffixes.tool_style.end_of_turn
    assert tail == suffixes._cut([message], TOOLS, suffixes.tool_style)


@pytest.mark.parametrize("name", sorted(CASES))
def test_opening_equals_apply_chat_template(name: str) -> None:
    renderer, case = RENDERERS[name], CASES[name]
    content: Any = [{"type": "text", "text": "Count to 3."}] if name == "blocks" else "Count to 3."
    expected = renderer.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}],
        tools=TOOLS if case.tool_role and name != "blocks" else None,
        add_generation_prompt=True,
        return_dict=False,
    )
    tools = TOOLS if case.tool_role and name != "blocks" else None
    assert renderer.open(OPENING, tools) == expected


def test_sampled_ids_are_never_re_encoded() -> None:
    renderer = RENDERERS["chatml"]
    tokenizer = renderer.tokenizer
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "hello"]
    assert tokenizer.encode("hello", add_special_tokens=False) != letters  # the tokenizer would merge them
    turn = [*letters, tokenizer.eos_token_id]
    opening = renderer.open(OPENING, TOOLS)
    row = opening + turn + renderer.suffix(turn, [result("7")], TOOLS)
    assert row[len(opening) : len(opening) + len(turn)] == turn
    assert renderer.read(turn, TOOLS).message["content"] == "hello"


def test_separator_after_the_end_of_turn_is_part_of_the_suffix() -> None:
    renderer = RENDERERS["chatml"]
    eos = renderer.tokenizer.eos_token_id
    ids = renderer.suffix([5, eos], [result("7")], TOOLS)
    assert_text(renderer, ids, "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n")


def test_end_of_turn_is_added_only_where_it_was_not_sampled() -> None:
    renderer = RENDERERS["chatml"]
    end, other = renderer.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    sampled = renderer.suffix([5, end], [result("7")], TOOLS)
    assert end not in sampled[:1]
    assert renderer.suffix([5, other], [result("7")], TOOLS) == [
        end,
        *sampled,
    ]  # another terminator stays, end is added
    assert renderer.suffix([5], [result("7")], TOOLS) == [end, *sampled]  # cut by length
    assert renderer.suffix([], [result("7")], TOOLS) == [end, *sampled]


def test_text_before_the_terminator_is_not_asked_of_the_model() -> None:
    renderer = RENDERERS["results_as_answers"]  # writes " </s>" behind an answer
    observation: Message = {"role": "user", "content": "low"}
    eos = renderer.tokenizer.eos_token_id
    assert_text(renderer, renderer.suffix([5, eos], [observation], None), "[INST] low [/INST]")
    assert_text(renderer, renderer.suffix([5], [observation], None), " </s>[INST] low [/INST]")


def test_a_partly_sampled_end_of_turn_is_completed() -> None:
    source = CHATML.replace("'<|im_end|>\\n'", "'<done><|im_end|>\\n'").replace(
        "'<|im_end|>\n'", "'<done><|im_end|>\n'"
    )
    tokenizer = bpe_tokenizer(source, specials=("<done>", "<|im_start|>"))
    renderer = ChatRenderer(tokenizer)
    done, end = tokenizer.convert_tokens_to_ids(["<done>", "<|im_end|>"])
    whole = renderer.suffix([5, done, end], [result("7")], TOOLS)
    assert renderer.suffix([5, done], [result("7")], TOOLS) == [end, *whole]
    assert renderer.suffix([5], [result("7")], TOOLS) == [done, end, *whole]
    assert renderer.read([done, end], TOOLS).message["content"] == ""


def test_padding_that_is_the_end_of_turn_changes_nothing() -> None:
    padded, plain = ChatRenderer(chatml_tokenizer(pad="<|im_end|>")), ChatRenderer(chatml_tokenizer())
    assert padded.tokenizer.pad_token_id == padded.tokenizer.eos_token_id
    texts = []
    for renderer in (padded, plain):
        turn = [*renderer.tokenizer.encode("hello"), renderer.tokenizer.eos_token_id]
        texts.append(renderer.tokenizer.decode([*turn, *renderer.suffix(turn, [result("7")], TOOLS)]))
        assert renderer.read(turn, TOOLS).text == "hello"
    assert texts[0] == texts[1]


def test_a_tokenizer_that_adds_bos_adds_it_nowhere() -> None:
    tokenizer = chatml_tokenizer(bos="<s>", adds_bos=True)
    bos = tokenizer.bos_token_id
    assert tokenizer.encode("a")[0] == bos
    renderer = ChatRenderer(tokenizer)
    assert bos not in renderer.open(OPENING, TOOLS)  # this template writes none
    assert bos not in renderer.suffix([5], [result("7")], TOOLS)
    llama = bpe_tokenizer(CASES["llama"].source, eos="<|eot_id|>", bos="<s>", adds_bos=True)
    assert ChatRenderer(llama).open(OPENING, None).count(llama.bos_token_id) == 1


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_a_tokenizer_that_treats_the_start_of_a_text_apart(scheme: str) -> None:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    specials = ["<|im_start|>", "<|im_end|>"]
    texts = ["user assistant tool 7 hi \n 8 ok", " a b"]
    backend.train_from_iterator(texts, trainers.BpeTrainer(special_tokens=specials, show_progress=False))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    renderer = ChatRenderer(tokenizer)
    answer: Message = {"role": "assistant", "content": "ok"}
    chat = [{"role": "user", "content": "hi"}, answer, result("7 8")]
    row = renderer.open(chat[:1], None)
    whole = tokenizer.encode(renderer.render(chat, generation=True), add_special_tokens=False)
    turn = whole[len(row) : whole.index(tokenizer.eos_token_id, len(row)) + 1]
    assert [*row, *turn, *renderer.suffix(turn, chat[2:], None)] == whole


def test_earlier_thinking_stays_in_the_row() -> None:
    renderer = RENDERERS["drops_earlier_thinking"]
    row = renderer.open(OPENING, TOOLS)
    text = "<think>\nfirst thought\n</think>\n\n"
    for _ in range(2):
        turn = [*renderer.tokenizer.encode(text), renderer.tokenizer.eos_token_id]
        row += turn + renderer.suffix(turn, [result("7")], TOOLS)
    assert renderer.tokenizer.decode(row).count("first thought") == 2


def test_variables_reach_every_rendering() -> None:
    source = CHATML.replace("assistant\n' }}{% endif %}", "assistant\n' + mood }}{% endif %}")
    assert source != CHATML
    renderer = ChatRenderer(bpe_tokenizer(source), chat_template_kwargs={"mood": "calm "})
    assert renderer.tokenizer.decode(renderer.open(OPENING, TOOLS)).endswith("assistant\ncalm ")
    assert renderer.tokenizer.decode(renderer.suffix([5], [result("7")], TOOLS)).endswith("assistant\ncalm ")
    assert renderer.tokenizer.decode(renderer.suffix([5], [{"role": "user", "content": "x"}], None)).endswith("calm ")


def test_a_given_template_replaces_the_tokenizers_own() -> None:
    renderer = ChatRenderer(bpe_tokenizer(None), chat_template=CHATML)
    assert_text(
        renderer,
        renderer.open([{"role": "user", "content": "a"}], None),
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n",
    )


@pytest.mark.parametrize(
    ("name", "stops"),
    [
        ("chatml", ["<|im_end|>"]),
        ("llama", ["<|eom_id|>", "<|eot_id|>"]),
        ("channels", ["<|call|>", "<|return|>"]),  # <|end|> also closes reasoning, in the middle of a turn
    ],
)
def test_stop_tokens(name: str, stops: list[str]) -> None:
    renderer = RENDERERS[name]
    assert renderer.tokenizer.convert_ids_to_tokens(renderer.stop_token_ids) == stops


def test_the_templates_terminator_stops_even_if_it_is_not_eos() -> None:
    renderer = ChatRenderer(chatml_tokenizer(eos="<|endoftext|>"))
    assert set(renderer.tokenizer.convert_ids_to_tokens(renderer.stop_token_ids)) == {"<|endoftext|>", "<|im_end|>"}


def test_results_after_a_call_only_template_name_their_tool() -> None:
    renderer = RENDERERS["channels"]
    call_end, ended = renderer.tokenizer.convert_tokens_to_ids(["<|call|>", "<|return|>"])
    expected = (
        '<|start|>functions.look to=assistant<|channel|>commentary<|message|>"a \\"b\\""<|end|><|start|>assistant'
    )
    assert_text(renderer, renderer.suffix([5, call_end], [result('a "b"', name="look")], TOOLS), expected)
    assert_text(renderer, renderer.suffix([5, ended], [result('a "b"', name="look")], TOOLS), "<|call|>" + expected)
    made_up = renderer.tokenizer.decode(renderer.suffix([5, call_end], [result("no such tool", name="jump")], TOOLS))
    assert made_up.startswith("<|start|>functions.jump to=assistant")


def test_call_ids_are_printed_and_replaced_where_the_template_refuses_them() -> None:
    renderer = RENDERERS["mistral"]
    eos = renderer.tokenizer.eos_token_id
    assert '"call_id": "abcdef123"' in renderer.tokenizer.decode(
        renderer.suffix([eos], [result("7", "abcdef123")], TOOLS)
    )
    refused = renderer.tokenizer.decode(renderer.suffix([eos], [result("7", "short")], TOOLS))
    assert '"content": "7"' in refused and "short" not in refused


def test_results_of_one_turn_are_merged_by_a_template_that_merges_them() -> None:
    renderer = RENDERERS["merges_results"]
    ids = renderer.suffix([renderer.tokenizer.eos_token_id], [result("1"), result("2", "c00000001")], TOOLS)
    expected = (
        "\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
    )
    assert_text(renderer, ids, expected + "<|im_start|>assistant\n")


@pytest.mark.parametrize("name", ["no_tools", "results_as_answers"])
def test_a_template_without_tools_gets_schemas_in_the_prompt_and_results_as_a_user_message(name: str) -> None:
    renderer = RENDERERS[name]
    renderer.check(TOOLS)
    opening = renderer.tokenizer.decode(renderer.open(OPENING, TOOLS))
    assert '"name": "inc"' in opening and "<tool_call>" in opening and "Count to 3." in opening
    suffix = renderer.tokenizer.decode(renderer.suffix([5], [result("1"), result("2", "c00000001")], TOOLS))
    assert "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>" in suffix


def test_every_template_of_these_can_render_a_tool_round() -> None:
    for name, renderer in RENDERERS.items():
        renderer.check(TOOLS)
        renderer.check(None)
        written = renderer.tokenizer.decode(renderer.suffix([5], [result("it is 7391")], TOOLS))
        assert "it is 7391" in written, name


def test_a_template_that_can_render_no_tool_round_is_refused_only_with_tools() -> None:
    source = (
        "{% if messages | length > 2 %}{{ raise_exception('one answer only') }}{% endif %}"
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    renderer = ChatRenderer(bpe_tokenizer(source))
    renderer.check(None)
    with pytest.raises(ChatTemplateError, match=r"one answer only.*chat_template="):
        renderer.check(TOOLS)


def test_without_a_template_prompts_are_plain_text() -> None:
    tokenizer = bpe_tokenizer(None, bos="<s>", adds_bos=True)
    renderer = ChatRenderer(tokenizer)
    row = renderer.open([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], None)
    row += renderer.suffix([5], [{"role": "user", "content": "low"}], None)
    assert tokenizer.decode(row) == "<s>a\nb\nlow\n"
    assert renderer.stop_token_ids == (tokenizer.eos_token_id,)
    with pytest.raises(ChatTemplateError, match="tools need a chat template"):
        renderer.check(TOOLS)
    with pytest.raises(ChatTemplateError, match="tools need a chat template"):
        renderer.open([{"role": "user", "content": "b"}], TOOLS)
    with pytest.raises(ChatTemplateError, match="tool results need a chat template"):
        renderer.suffix([5], [result("7")], None)


def test_only_text_tokenizers_and_text_content() -> None:
    class Processor:
        pass

    with pytest.raises(ConfigurationError, match=r"Processor.*processor\.tokenizer"):
        ChatRenderer(Processor())  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="'image'"):
        RENDERERS["chatml"].open([{"role": "user", "content": [{"type": "image", "url": "x"}]}], None)


def test_a_suffix_needs_results() -> None:
    with pytest.raises(ChatTemplateError, match="at least one message"):
        RENDERERS["chatml"].suffix([5], [], TOOLS)
    with pytest.raises(ChatTemplateError, match="'assistant'"):
        RENDERERS["chatml"].suffix([5], [{"role": "assistant", "content": "x"}], TOOLS)


def test_call_ids_are_unique_in_an_episode() -> None:
    renderer = RENDERERS["chatml"]
    ids = renderer.tokenizer.encode('<tool_call>{"name": "inc"}</tool_call><tool_call>{"name": "inc"}</tool_call>')
    names = [call.id for turn in range(3) for call in renderer.read(ids, TOOLS, turn=turn).calls]
    assert len(set(names)) == 6
    assert all(len(name) == 9 and name.isalnum() for name in names)


def test_reasoning_that_the_prompt_opened() -> None:
    renderer = RENDERERS["prompt_opens_thinking"]
    assert renderer.tokenizer.decode(renderer.open(OPENING, TOOLS)).endswith("<think>\n")
    encode = renderer.tokenizer.encode
    turn = renderer.read(
        encode('I add.\n</think>\n\n<tool_call>{"name": "inc", "arguments": {"n": 1}}</tool_call>'), TOOLS
    )
    assert turn.message["reasoning_content"] == "I add."
    assert [call.arguments for call in turn.calls] == [{"n": 1}]
    cut = renderer.read(encode('I would <tool_call>{"name": "inc"}</tool_call>'), TOOLS)
    assert cut.calls == () and cut.message["content"] == ""
    assert cut.message["reasoning_content"] == 'I would <tool_call>{"name": "inc"}</tool_call>'


def test_reasoning_opened_only_in_the_first_prompt() -> None:
    prompt = "{% if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|im_start|>assistant\n<think>\n' }}"
    source = CHATML.replace("{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}", prompt)
    assert source != CHATML
    renderer = ChatRenderer(bpe_tokenizer(source))
    ids = renderer.tokenizer.encode('<tool_call>{"name": "inc"}</tool_call>')
    assert renderer.read(ids, TOOLS).calls == ()
    assert [call.name for call in renderer.read(ids, TOOLS, turn=1).calls] == ["inc"]


def test_thinking_switched_off_by_a_variable() -> None:
    source = CHATML.replace(
        "assistant\n' }}{% endif %}",
        "assistant\n' }}{% if not thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}",
    )
    renderer = ChatRenderer(bpe_tokenizer(source), chat_template_kwargs={"thinking": False})
    turn = renderer.read(renderer.tokenizer.encode("It is 3."), None)
    assert turn.message == {"role": "assistant", "content": "It is 3."}


def test_rows_only_grow_across_many_turns() -> None:
    renderer = RENDERERS["merges_results"]
    rows = [renderer.open(OPENING, TOOLS)]
    for turn in range(5):
        sampled = [7, 8, renderer.tokenizer.eos_token_id]
        rows.append([*rows[-1], *sampled, *renderer.suffix(sampled, [result(str(turn))], TOOLS)])
    assert all(longer[: len(row)] == row for row, longer in pairwise(rows))


def test_a_template_that_ships_with_transformers() -> None:
    package = Path(str(transformers.__file__)).parent
    tree = ast.parse((package / "models/smolvlm/processing_smolvlm.py").read_text())
    source = next(
        node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == "DEFAULT_CHAT_TEMPLATE"
    )
    case = Case(source=str(source), eos="<end_of_utterance>")
    renderer = case.renderer()
    renderer.check(TOOLS)
    row = renderer.open(OPENING, None)
    turn = [*renderer.tokenizer.encode("3"), renderer.tokenizer.eos_token_id]
    row += turn + renderer.suffix(turn, [{"role": "user", "content": "right"}], None)
    assert_text(
        renderer,
        row,
        "<|im_start|>User: Count to 3.<end_of_utterance>\nAssistant:3<end_of_utterance>\n"
        "User: right<end_of_utterance>\nAssistant:",
    )
