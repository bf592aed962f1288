"""Requests are read and refused with clear words; answers have OpenAI's form, which its own client parses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from envgrad.agents.responses import read_responses_request, response_body, response_events
from envgrad.agents.wire import ApiError, Reply, TokenLogprob, completion_body, completion_chunks, read_request
from helpers.agents import merged

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "inc", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c00000000", "type": "function", "function": {"name": "inc", "arguments": {"n": 1}}}


def reply(**changes: Any) -> Reply:
    message = {"role": "assistant", "content": "two", "tool_calls": [CALL]}
    known: dict[str, Any] = {
        "id": "chatcmpl-1", "message": message, "finish_reason": "tool_calls", "prompt_tokens": 5, "cached_tokens": 3,
        "completion_tokens": 2, "policy_version": 4,
    }  # fmt: skip
    return Reply(**(known | changes))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ([], "must be a JSON object"),
        ({"messages": []}, "at least one message"),
        ({"messages": [USER], "n": 2}, "n=2"),
        ({"messages": [{"role": "robot", "content": ""}]}, "role='robot'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "only text"),
        ({"messages": [USER], "tool_choice": "required"}, "decides by itself"),
        ({"messages": [USER], "response_format": {"type": "json_object"}}, "ask for it in the prompt"),
        ({"messages": [USER], "top_logprobs": 3}, "only the sampled tokens"),
        ({"messages": [USER], "max_tokens": 0}, "max_tokens=0"),
        ({"messages": [USER], "stop": [1]}, "stop="),
        ({"messages": [USER], "tools": [{"type": "web_search"}]}, "no tool of type 'function'"),
        ({"messages": [USER], "functions": [{}]}, "functions is not supported"),
    ],
)
def test_what_cannot_be_had_is_refused(body: Any, text: str) -> None:
    with pytest.raises(ApiError, match=text) as raised:
        read_request(body)
    assert raised.value.status == 400 and raised.value.body()["error"]["type"] == "invalid_request_error"


def test_a_request_is_read() -> None:
    read = read_request(
        {
            "model": "gpt-x", "temperature": 0.2, "seed": 3, "max_completion_tokens": 7, "stop": "END", "tools": [TOOL],
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": " brief."}]},
                {"role": "assistant", "content": None, "refusal": None, "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "inc", "arguments": '{"n": 1}'}}]},
                {"role": "tool", "tool_call_id": "1", "content": "ok"},
            ],
        }
    )  # fmt: skip
    assert (read.max_tokens, read.stop, read.tools) == (7, ("END",), (TOOL,))
    system, assistant, tool = read.messages
    assert system == {"role": "system", "content": "Be brief."}
    assert assistant["content"] == "" and assistant["tool_calls"][0]["function"]["arguments"] == {"n": 1}
    assert tool == {"role": "tool", "content": "ok", "tool_call_id": "1"}
    assert read_request({"messages": [USER], "tools": [TOOL], "tool_choice": "none"}).tools == ()


def test_an_answer_is_a_chat_completion() -> None:
    known = ChatCompletion.model_validate(completion_body(reply(logprobs=(TokenLogprob(text="two", logprob=-0.5),))))
    choice = known.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "two"
    call = choice.message.tool_calls[0]  # type: ignore[index]
    assert (call.id, json.loads(call.function.arguments)) == ("c00000000", {"n": 1})  # type: ignore[union-attr]
    assert known.usage.total_tokens == 7 and known.usage.prompt_tokens_details.cached_tokens == 3  # type: ignore[union-attr]
    assert choice.logprobs.content[0].logprob == -0.5  # type: ignore[union-attr, index]
    empty = completion_body(reply(message={"role": "assistant", "content": ""}, finish_reason="stop"))
    assert empty["choices"][0]["message"]["content"] == ""


def test_a_stream_adds_up_to_the_answer() -> None:
    events = list(completion_chunks(reply(), include_usage=True))
    assert events[-1] == "data: [DONE]\n\n"
    chunks = [ChatCompletionChunk.model_validate_json(event.removeprefix("data: ")) for event in events[:-1]]
    message, reason = merged(iter(chunks))
    whole = completion_body(reply())["choices"][0]["message"]
    assert reason == "tool_calls" and message["content"] == whole["content"]
    assert message["tool_calls"] == whole["tool_calls"]
    assert chunks[-1].usage.total_tokens == 7  # type: ignore[union-attr]


def test_responses_are_read_as_chats() -> None:
    read = read_responses_request(
        {
            "instructions": "Be brief.",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {"type": "reasoning", "summary": []},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "two"}]},
                {"type": "function_call", "call_id": "c00000000", "name": "inc", "arguments": '{"n": 1}'},
                {"type": "function_call_output", "call_id": "c00000000", "output": "now 1"},
            ],
            "tools": [{"type": "function", "strict": True, **TOOL["function"]}],
        }
    )
    chat = read_request(
        {
            "messages": [
                {"role": "system", "content": "Be brief."}, USER,
                {"role": "assistant", "content": "two", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c00000000", "content": "now 1"},
            ],
            "tools": [TOOL],
        }
    )  # fmt: skip
    assert read.messages == chat.messages and read.tools == chat.tools
    for body in ({"input": "Hi", "previous_response_id": "r"}, {"input": []}, {"input": [{"type": "image"}]}):
        with pytest.raises(ApiError):
            read_responses_request(body)


def test_an_answer_is_a_response_and_its_events() -> None:
    known = Response.model_validate(response_body(reply()))
    assert known.output_text == "two" and known.output[1].call_id == "c00000000"  # type: ignore[union-attr]
    assert Response.model_validate(response_body(reply(finish_reason="length"))).status == "incomplete"
    adapter = TypeAdapter(ResponseStreamEvent)
    events = [adapter.validate_json(event.partition("data: ")[2]) for event in response_events(reply())]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed" and events[-1].response.output_text == "two"  # type: ignore[union-attr]
