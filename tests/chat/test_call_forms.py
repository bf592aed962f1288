from __future__ import annotations

import pytest

from envgrad.chat.call_forms import FirstOf, JsonForm, MalformedCall, NamedForm, coerce, decode_json, iter_found

HERMES = JsonForm(open="<tool_call>", close="</tool_call>")


def test_the_span_of_a_call_covers_its_marks() -> None:
    text = 'ab <tool_call> {"name": "f"} </tool_call> cd'
    found = HERMES.find(text, 0, None)
    assert found is not None
    assert text[: found.start] == "ab " and text[found.end :] == " cd"


def test_a_malformed_call_ends_where_the_next_begins() -> None:
    text = '<tool_call>{"name": <tool_call>{"name": "g"}</tool_call>'
    spans = [(found.start, found.end) for found in iter_found(HERMES, text, None)]
    assert spans == [(0, text.rindex("<tool_call>")), (text.rindex("<tool_call>"), len(text))]


def test_a_list_of_calls_and_nested_functions() -> None:
    form = JsonForm(open="[TOOL_CALLS]", close="")
    text = '[TOOL_CALLS][{"name": "f"}, {"type": "function", "function": {"name": "g", "arguments": {"a": 1}}}]'
    (found,) = iter_found(form, text, None)
    assert [(call.name, call.arguments) for call in found.calls] == [("f", {}), ("g", {"a": 1})]


def test_newlines_inside_strings_are_accepted() -> None:
    (found,) = iter_found(HERMES, '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>', None)
    assert found.calls[0].arguments == {"a": "x\ny"}


def test_other_keys_for_arguments_are_understood() -> None:
    (found,) = iter_found(HERMES, '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', None)
    assert found.calls[0].arguments == {"a": 1}


def test_several_bare_calls_but_none_in_prose() -> None:
    bare = JsonForm(open="", close="", arguments_key="parameters")
    text = '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}} {"x": 1}'
    assert [call.name for found in iter_found(bare, text, None) for call in found.calls] == ["f", "g"]
    assert bare.find('see {"name": "f"}', 0, None) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<c>{}", "must name its tool"),
        ("<c>f|", "Expecting value"),
        ("<c>f {}", "expected '|'"),
        ('<c>f|{"a": 1} more</c>', "text between"),
    ],
)
def test_a_named_call_that_does_not_parse(text: str, reason: str) -> None:
    found = NamedForm(open="<c>", middle="|", close="</c>").find(text, 0, None)
    assert found is not None and found.end == len(text)
    assert found.calls[0].error is not None and reason in found.calls[0].error


def test_of_two_forms_at_one_place_the_one_that_parses_is_taken() -> None:
    forms = FirstOf(forms=(JsonForm(open="!", close=""), NamedForm(open="!", middle="", close="")))
    assert [call.name for found in iter_found(forms, '!f{"a": 1} !{"name": "g"}', None) for call in found.calls] == [
        "f",
        "g",
    ]


def test_decode_json_counts_characters_from_the_value() -> None:
    with pytest.raises(MalformedCall, match="at character 6"):
        decode_json('   {"a": x}', 0)


@pytest.mark.parametrize(
    ("raw", "schema", "value"),
    [
        ("7", {"type": "string"}, "7"),
        ("7", {"type": "integer"}, 7),
        ("[1, 2]", {"type": "array"}, [1, 2]),
        ("True", {"type": "boolean"}, True),
        ("x y", {"type": "integer"}, "x y"),
        ("null", None, None),
        ('"a"', {"type": ["string", "null"]}, '"a"'),
    ],
)
def test_coerce(raw: str, schema: object, value: object) -> None:
    assert coerce(raw, schema) == value and type(coerce(raw, schema)) is type(value)
