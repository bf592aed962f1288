from __future__ import annotations

from keyword import iskeyword
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envgrad.chat import ChatRenderer, SampledTurn
from envgrad.errors import ConfigurationError
from envgrad.types import ToolCall
from helpers.chat_templates import CASES, TOOLS
from helpers.tokenizers import CHATML, bpe_tokenizer

RENDERERS = {name: case.renderer() for name, case in CASES.items()}
HERMES = RENDERERS["chatml"]
WRITES_CALLS = [name for name, case in CASES.items() if case.tool_role and name != "blocks"]

EXAMPLES = 6  # for each template

NAMES = st.text("abcdefgXYZ_", min_size=1, max_size=8)
# Surrogates are no text, and a tokenizer cannot carry them.
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
SCALARS = st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.floats(-1e6, 1e6) | TEXT
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=4
)


def read(renderer: ChatRenderer, text: str, tools: Any = TOOLS, turn: int = 0) -> SampledTurn:
    return renderer.read(renderer.tokenizer.encode(text, add_special_tokens=False), tools, turn=turn)


def write_calls(renderer: ChatRenderer, calls: list[tuple[str, Any]], content: str = "") -> str:
    """The turn as the template prints it, without its header, up to and with the terminator."""
    user = [{"role": "user", "content": "hi"}]
    written = [
        {"id": f"c0000000{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(calls)
    ]
    before = renderer.render(user, generation=True)
    header = before.removesuffix("<think>\n")
    text = renderer.render([*user, {"role": "assistant", "content": content, "tool_calls": written}])
    assert text.startswith(header)
    return text[len(header) :]


def as_sampled(renderer: ChatRenderer, text: str) -> list[int]:
    ids = renderer.tokenizer.encode(text, add_special_tokens=False)
    stop = max(index for index, token in enumerate(ids) if token in renderer.stop_token_ids)
    return list(ids[: stop + 1])


@pytest.mark.parametrize("name", WRITES_CALLS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_calls_that_the_template_writes_are_read_back_equal(name: str, data: st.DataObject) -> None:
    case, renderer = CASES[name], RENDERERS[name]
    if case.values == "text":  # plain values: the schema says which are strings
        arguments = st.fixed_dictionaries(
            {"n": st.integers(-99, 99), "note": TEXT.filter(lambda text: "</" not in text)}
        )
        names: st.SearchStrategy[str] = st.just("inc")
    elif name == "python":
        arguments = st.dictionaries(NAMES.filter(lambda key: not iskeyword(key)), JSON, max_size=3)
        names = NAMES.filter(lambda key: not iskeyword(key))
    else:
        arguments, names = st.dictionaries(NAMES, JSON, max_size=3), NAMES
    count = 3 if case.many_calls else 1
    calls = data.draw(st.lists(st.tuples(names, arguments), min_size=1, max_size=count))
    text = write_calls(renderer, calls)
    if renderer.tokenizer.decode(renderer.tokenizer.encode(text, add_special_tokens=False)) != text:
        return  # special tokens of the tokenizer inside a value
    turn = renderer.read(as_sampled(renderer, text), TOOLS, turn=1)
    prompt_opens = name == "prompt_opens_thinking"
    if prompt_opens:
        turn = renderer.read(as_sampled(renderer, "hm</think>" + text), TOOLS)
    assert [(call.name, call.arguments, call.error) for call in turn.calls] == [(*call, None) for call in calls]
    assert turn.message["content"] == ""
    functions = [call["function"] for call in turn.message["tool_calls"]]
    assert functions == [{"name": name, "arguments": arguments} for name, arguments in calls]


@pytest.mark.parametrize("name", sorted(CASES))
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_no_text_is_an_exception(name: str, data: st.DataObject) -> None:
    renderer = RENDERERS[name]
    marks = [
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "{",
        "}",
        '"name": "inc"',
        '"',
        "[",
        "]",
        ",",
        ":",
        "\\",
    ]
    marks += ["<function=inc>", "<parameter=n>", "</parameter>", "<arg_key>", "inc(", ")", "n=1", "[TOOL_CALLS]", "\n"]
    marks += [token.content for token in renderer.tokenizer.added_tokens_decoder.values()]
    text = "".join(data.draw(st.lists(st.sampled_from(marks) | TEXT, max_size=12)))
    turn = read(renderer, text)
    assert isinstance(turn.message["content"], str)
    assert all(call.error is not None or call.name for call in turn.calls)
    assert len({call.id for call in turn.calls}) == len(turn.calls)


@settings(max_examples=EXAMPLES, deadline=None)
@given(ids=st.lists(st.integers(0, len(HERMES.tokenizer) - 1), max_size=30))
def test_no_ids_are_an_exception(ids: list[int]) -> None:
    assert HERMES.read(ids, TOOLS).message["role"] == "assistant"


def test_two_calls_in_one_turn_in_order_with_text_around() -> None:
    one, two = '{"name": "inc", "arguments": {"n": 1}}', '{"name": "inc", "arguments": {"n": 2}}'
    turn = read(HERMES, f"First. <tool_call>{one}</tool_call>\n<tool_call>\n{two}\n</tool_call> Done.<|im_end|>")
    assert [call.arguments for call in turn.calls] == [{"n": 1}, {"n": 2}]
    assert turn.message["content"].split() == ["First.", "Done."]
    assert turn.text.endswith("Done.")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{"name": "inc", "arguments": {"n": 1,,}}', "malformed"),
        ('{"name": "inc", "arguments": {"n": 1}', "malformed"),
        ("", "malformed"),
        ("[1]", "must be a JSON object, got int"),
        ('"inc"', "must be a JSON object, got str"),
        ("null", "must be a JSON object, got NoneType"),
        ("[]", "must be a JSON object, got list"),
        ('{"arguments": {"n": 1}}', "must name its tool"),
        ('{"name": 3, "arguments": {}}', "must name its tool"),
        ('{"name": "inc", "arguments": {"n": 1}} and so on', "text between"),
    ],
)
def test_a_call_that_cannot_be_run_says_why(body: str, reason: str) -> None:
    good = '<tool_call>{"name": "inc", "arguments": {"n": 2}}</tool_call>'
    turn = read(HERMES, f"<tool_call>{body}</tool_call>{good}<|im_end|>")
    bad, following = turn.calls
    assert bad.name is None and bad.error is not None and reason in bad.error
    assert following.arguments == {"n": 2}
    assert [call["function"]["arguments"] for call in turn.message["tool_calls"]] == [{"n": 2}]
    assert f"<tool_call>{body}</tool_call>" in turn.message["content"]


def test_a_call_cut_by_length_is_an_error_and_a_whole_one_without_its_close_is_not() -> None:
    (cut,) = read(HERMES, '<tool_call>{"name": "inc", "argum').calls
    assert cut.error is not None and "malformed" in cut.error
    (whole,) = read(HERMES, '<tool_call>{"name": "inc", "arguments": {"n": 1}}').calls
    assert whole == ToolCall(id=whole.id, name="inc", arguments={"n": 1})


@pytest.mark.parametrize("arguments", ['"{\\"n\\": 1}"', "[1]", "3", "null"])
def test_arguments_of_any_type_are_passed_on_as_parsed(arguments: str) -> None:
    expected = {'"{\\"n\\": 1}"': '{"n": 1}', "[1]": [1], "3": 3, "null": None}[arguments]
    (call,) = read(HERMES, f'<tool_call>{{"name": "inc", "arguments": {arguments}}}</tool_call>').calls
    assert call.error is None and call.arguments == expected


def test_double_encoded_arguments_are_decoded_where_the_template_writes_them_so() -> None:
    source = CHATML.replace("call.function.arguments} | tojson", "call.function.arguments | tojson} | tojson")
    renderer = ChatRenderer(bpe_tokenizer(source))
    (call,) = read(renderer, '<tool_call>\n{"name": "inc", "arguments": "{\\"n\\": 1}"}\n</tool_call>').calls
    assert call.arguments == {"n": 1}


def test_marks_inside_strings_do_not_end_a_call() -> None:
    note = "</tool_call> <tool_call> <think> {{}"
    text = write_calls(HERMES, [("inc", {"n": 1, "note": note})])
    turn = read(HERMES, text.removesuffix("\n"))
    assert [call.arguments for call in turn.calls] == [{"n": 1, "note": note}]
    assert "reasoning_content" not in turn.message


def test_calls_inside_reasoning_are_not_executed() -> None:
    call = '<tool_call>{"name": "inc", "arguments": {"n": 1}}</tool_call>'
    turn = read(HERMES, f"<think>\nmaybe {call}\n</think>\n\nNow {call}<|im_end|>")
    assert len(turn.calls) == 1
    assert turn.message["content"] == "Now"
    assert turn.message["reasoning_content"] == f"maybe {call}"
    later = read(HERMES, f"Hm. <think>{call}</think> Done.")
    assert later.calls == () and later.message["reasoning_content"] == call
    assert later.message["content"].split() == ["Hm.", "Done."]
    unfinished = read(HERMES, f"<think>{call}")
    assert unfinished.calls == () and unfinished.message["reasoning_content"] == call


def test_channels_are_reasoning_calls_and_answer() -> None:
    renderer = RENDERERS["channels"]
    called = read(
        renderer,
        "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>commentary to=functions.inc "
        '<|constrain|>json<|message|>{"n": 1}<|call|>',
    )
    assert called.message["reasoning_content"] == "I add." and called.message["content"] == ""
    assert [(call.name, call.arguments) for call in called.calls] == [("inc", {"n": 1})]
    final = "<|channel|>analysis<|message|>Done.<|end|><|start|>assistant<|channel|>final<|message|>It is 3.<|return|>"
    answered = read(renderer, final)
    assert answered.message == {"role": "assistant", "content": "It is 3.", "reasoning_content": "Done."}


def test_json_in_an_answer_is_no_call_without_a_mark() -> None:
    llama = RENDERERS["llama"]
    assert read(llama, '{"answer": 3}<|eot_id|>').calls == ()
    assert read(llama, 'I think {"name": "inc", "parameters": {}}').calls == ()
    assert [call.name for call in read(llama, '{"name": "inc", "parameters": {"n": 1}}<|eot_id|>').calls] == ["inc"]


def test_ids_that_the_model_wrote_are_kept() -> None:
    turn = read(RENDERERS["mistral"], '[TOOL_CALLS] [{"name": "inc", "arguments": {}, "id": "abcdef123"}]</s>')
    assert [call.id for call in turn.calls] == ["abcdef123"]
    twice = '[TOOL_CALLS] [{"name": "inc", "id": "abcdef123"}, {"name": "inc", "id": "abcdef123"}]</s>'
    assert len({call.id for call in read(RENDERERS["mistral"], twice).calls}) == 2


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", '<tool_call>{"name": "inc", "arguments": {"n": 1}}</tool_call>'),
        ("llama3_json", '<|python_tag|>{"name": "inc", "parameters": {"n": 1}}'),
        ("llama3_json", '{"type": "function", "function": {"name": "inc", "parameters": {"n": 1}}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "inc", "arguments": {"n": 1}}]'),
        ("mistral", '[TOOL_CALLS]inc[ARGS]{"n": 1}'),
        ("mistral", '[TOOL_CALLS]inc[CALL_ID]abcdef123[ARGS]{"n": 1}'),
        ("mistral", '[TOOL_CALLS]inc{"n": 1}'),
        ("pythonic", "<|tool_call_start|>[inc(n=1)]<|tool_call_end|>"),
        ("pythonic", "[inc(1)]"),
        ("tagged", "<tool_call>\n<function=inc>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>"),
        ("channels", 'to=functions.inc<|channel|>commentary json<|message|>{"n": 1}<|call|>'),
    ],
)
def test_named_parsers(parser: str, text: str) -> None:
    renderer = ChatRenderer(bpe_tokenizer(CHATML), tool_parser=parser)
    turn = read(renderer, text)
    assert [(call.name, call.arguments, call.error) for call in turn.calls] == [("inc", {"n": 1}, None)]
    assert turn.message["content"] == ""


def test_an_unknown_parser_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"tool_parser='hermess'.*'hermes', 'llama3_json'"):
        ChatRenderer(bpe_tokenizer(CHATML), tool_parser="hermess")


def test_a_parser_of_ones_own() -> None:
    def parser(text: str) -> tuple[list[ToolCall], str]:
        head, _, tail = text.partition("!")
        return [ToolCall(id="mine", name=tail.strip(), arguments={})], head.strip()

    turn = read(ChatRenderer(bpe_tokenizer(CHATML), tool_parser=parser), "<think>hm</think>go !look<|im_end|>")
    assert turn.calls == (ToolCall(id="mine", name="look", arguments={}),)
    assert turn.message["content"] == "go" and turn.message["reasoning_content"] == "hm"


RESPONSE_TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {},
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<go>",
            "close": "</go>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}


def test_the_tokenizers_response_template_comes_first() -> None:
    tokenizer = bpe_tokenizer(CHATML)
    tokenizer.response_template = RESPONSE_TEMPLATE
    renderer = ChatRenderer(tokenizer)
    turn = read(renderer, '<think>hm</think>ok<go>{"name": "inc", "arguments": {"n": 1}}</go><go>{"name": "look"}</go>')
    assert [(call.name, call.arguments) for call in turn.calls] == [("inc", {"n": 1}), ("look", {})]
    assert turn.message["content"] == "ok" and turn.message["reasoning_content"] == "hm"
    (bad,) = read(renderer, '<go>{"name": "inc",,}</go>').calls
    assert bad.error is not None and "malformed" in bad.error
    overridden = ChatRenderer(tokenizer, tool_parser="hermes")
    assert [call.name for call in read(overridden, '<tool_call>{"name": "inc"}</tool_call>').calls] == ["inc"]


def test_a_marker_in_the_vocabulary_names_the_form_where_the_template_prints_no_calls() -> None:
    source = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + CASES["no_tools"].source
    tokenizer = bpe_tokenizer(source, specials=("<|tool_call_start|>", "<|tool_call_end|>"), eos="<end>", bos="<s>")
    turn = read(ChatRenderer(tokenizer), "<|tool_call_start|>[inc(n=1)]<|tool_call_end|><end>")
    assert [call.arguments for call in turn.calls] == [{"n": 1}]


def test_deep_nesting_is_an_error_and_no_crash() -> None:
    depth = 100_000
    for parser, text in [
        ("hermes", "<tool_call>" + "[" * depth + "</tool_call>"),
        ("pythonic", "<|tool_call_start|>[" + "a." * 3000 + "b(n=" + "-" * 3000 + "1)]<|tool_call_end|>"),
        ("pythonic", "<|tool_call_start|>[f(n=" + "[" * 500 + "]" * 500 + ")]<|tool_call_end|>"),
    ]:
        renderer = ChatRenderer(bpe_tokenizer(CHATML), tool_parser=parser)
        calls = renderer._reader.read(text, TOOLS, prompt="").calls
        assert calls and all(call.error for call in calls)
