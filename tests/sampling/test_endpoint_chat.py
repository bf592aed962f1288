from __future__ import annotations

import json

import pytest

from envgrad.sampling.endpoint_chat import EndpointRenderer, estimate_tokens, read_answer

TOOL = {"type": "function", "function": {"name": "inc", "description": "Add.", "parameters": {"type": "object"}}}


def call(arguments: object, name: object = "inc", call_id: object = "a") -> dict[str, object]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_row_is_the_chat_that_it_grew_from() -> None:
    renderer = EndpointRenderer()
    row = renderer.open([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Add."}], [TOOL])
    answer = renderer.add(read_answer({"content": None, "tool_calls": [call('{"n": 1}')]}, number=0), 7)
    assert len(answer) == 7
    row += answer
    result = {"role": "tool", "tool_call_id": "a", "name": "inc", "content": "now 1"}
    row += renderer.suffix(answer, [result], [TOOL])
    chat = renderer.chat(row)
    assert chat.tools == [TOOL]
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant", "tool"]
    assert chat.messages[2]["tool_calls"] == [call('{"n": 1}')]
    assert chat.messages[3] == {"role": "tool", "tool_call_id": "a", "content": "now 1"}
    # Handles are never token ids, and no two rows share one.
    other = renderer.open([{"role": "user", "content": "Add."}], None)
    assert max(row + other) < 0 and not set(row) & set(other)
    assert renderer.chat(other).tools is None


def test_lengths_of_what_is_sent_are_estimated_from_its_text() -> None:
    renderer = EndpointRenderer()
    short = renderer.open([{"role": "user", "content": "x"}], None)
    long = renderer.open([{"role": "user", "content": "x" * 4001}], None)
    assert len(long) - len(short) == 1000
    assert len(renderer.open([{"role": "user", "content": "x"}], [TOOL])) > len(short)
    assert estimate_tokens("ab" * 40) == 20


def test_calls_of_the_opening_are_sent_as_servers_take_them() -> None:
    renderer = EndpointRenderer()
    said = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call({"n": 1})]}
    (sent,) = renderer.chat(renderer.open([said], None)).messages
    assert sent == {"role": "assistant", "content": "", "tool_calls": [call('{"n": 1}')]}


def test_plain_text_is_a_user_message() -> None:
    renderer = EndpointRenderer()
    row = renderer.open_text("1+1=")
    assert renderer.chat(row).messages == ({"role": "user", "content": "1+1="},)
    answer = renderer.add(read_answer({"content": "2"}, number=0), 1)
    assert renderer.read_text(answer).text == "2"


def test_an_answer_is_kept_with_its_calls_and_its_reasoning() -> None:
    answer = read_answer({"content": "So:", "reasoning": "hm", "tool_calls": [call('{"n": 1}')]}, number=0)
    assert answer.turn.message == {
        "role": "assistant",
        "content": "So:",
        "reasoning_content": "hm",
        "tool_calls": [call({"n": 1})],
    }
    assert "reasoning_content" not in answer.raw  # some servers refuse it in the history
    assert answer.turn.text == 'So:\ninc({"n": 1})'


@pytest.mark.parametrize("arguments", ["", None, "{}", {}])
def test_no_arguments_are_an_empty_object(arguments: object) -> None:
    (found,) = read_answer({"tool_calls": [call(arguments)]}, number=0).turn.calls
    assert (found.arguments, found.error) == ({}, None)


@pytest.mark.parametrize("arguments", ['{"n": 1,,}', "{", "[" * 100_000, "n=1"])
def test_malformed_arguments_are_an_error_for_the_model_and_no_trouble_for_the_server(arguments: str) -> None:
    answer = read_answer({"content": "", "tool_calls": [call(arguments)]}, number=0)
    (found,) = answer.turn.calls
    assert found.error is not None and found.error.startswith("malformed tool call")
    assert (found.id, found.name) == ("a", "inc")
    assert answer.raw["tool_calls"] == [call("{}")]
    assert "tool_calls" not in answer.turn.message
    assert answer.turn.message["content"] == f"inc({arguments})"


@pytest.mark.parametrize("arguments", ["[1]", "3", "null", '"text"'])
def test_arguments_that_are_no_object_reach_the_tool_s_own_check(arguments: str) -> None:
    answer = read_answer({"tool_calls": [call(arguments)]}, number=0)
    (found,) = answer.turn.calls
    assert found.error is None and found.arguments == json.loads(arguments)
    assert answer.raw["tool_calls"] == [call("{}")]


@pytest.mark.parametrize("broken", [call("{}", name=None), call("{}", name=3), {"id": "a"}, "inc", None, 7])
def test_a_call_without_a_name_is_an_error_for_the_model(broken: object) -> None:
    (found,) = read_answer({"tool_calls": [broken]}, number=0).turn.calls
    assert found.name is None and found.error is not None and "must name its tool" in found.error


def test_ids_that_are_missing_or_equal_are_made_unique() -> None:
    message = {"tool_calls": [call("{}", call_id="x"), call("{}", call_id="x"), call("{}", call_id=None)]}
    first, second = read_answer(message, number=0), read_answer(message, number=1)
    ids = [found.id for found in (*first.turn.calls, *second.turn.calls)]
    assert len(set(ids)) == 6
    assert [sent["id"] for sent in first.raw["tool_calls"]] == ids[:3]


@pytest.mark.parametrize("content", [None, 3, {"a": 1}, [], [{"type": "image"}, 7]])
def test_content_of_any_kind_is_text(content: object) -> None:
    assert read_answer({"content": content}, number=0).turn.message["content"] == ""


def test_text_blocks_are_joined_and_half_surrogates_replaced() -> None:
    blocks = [{"type": "text", "text": "a"}, {"type": "text", "text": "\ud800"}]
    assert read_answer({"content": blocks}, number=0).turn.message["content"] == "a?"
