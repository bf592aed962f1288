"""``/v1/responses``: the same calls in OpenAI's other form. Stateless: each request carries its whole input."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from envgrad.agents.endpoint import MODEL
from envgrad.agents.wire import (
    ChatRequest,
    Reply,
    check_choice,
    event,
    read_arguments,
    read_limit,
    read_message,
    read_tools,
    refuse,
    written_calls,
)
from envgrad.types import Message


def read_responses_request(body: object) -> ChatRequest:
    """A request's body, as the chat request that it stands for.

    Raises:
        ApiError: 400, with what is wrong.

    Example:
        >>> request = read_responses_request({"instructions": "Be brief.", "input": "Hi", "max_output_tokens": 9})
        >>> [message["role"] for message in request.messages], request.max_tokens
        (['system', 'user'], 9)
    """
    if not isinstance(body, Mapping):
        raise refuse("the body must be a JSON object", "body")
    if body.get("previous_response_id") or body.get("conversation"):
        raise refuse(
            "previous_response_id and conversation: nothing is kept between requests; send the whole input",
            "previous_response_id",
        )
    form = (body.get("text") or {}).get("format") or {}
    if form.get("type", "text") != "text":
        raise refuse(f"text.format={form.get('type')!r}: answers are not forced into a form", "text")
    check_choice(body.get("tool_choice"))
    tools = [
        {"type": "function", "function": {key: value for key, value in tool.items() if key not in ("type", "strict")}}
        if isinstance(tool, Mapping) and tool.get("type") == "function"
        else tool
        for tool in body.get("tools") or ()
    ]
    return ChatRequest(
        messages=tuple(_messages(body)),
        tools=() if body.get("tool_choice") == "none" else read_tools(tools),
        max_tokens=read_limit(body, "max_output_tokens"),
        stream=bool(body.get("stream")),
    )


def _messages(body: Mapping[str, Any]) -> list[Message]:
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise refuse("input must be a text or a list of items", "input")
    messages: list[Message] = []
    if body.get("instructions"):
        messages.append(read_message({"role": "system", "content": body["instructions"]}, 0))
    for index, item in enumerate(items):
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if kind == "function_call":
            _add_call(messages, item)
        elif kind == "function_call_output":
            result = {"role": "tool", "tool_call_id": str(item.get("call_id")), "content": item.get("output")}
            messages.append(read_message(result, index))
        elif kind == "reasoning":
            continue  # what was thought before is not sent back into the prompt
        elif kind == "message":
            messages.append(read_message(item, index))
        else:
            raise refuse(f"input[{index}]: items of type {kind!r} are not known", "input")
    return messages


def _add_call(messages: list[Message], item: Mapping[str, Any]) -> None:
    """Items of one answer stand one after the other: its text, then its calls."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).append(
        {
            "id": str(item.get("call_id")),
            "type": "function",
            "function": {"name": str(item.get("name")), "arguments": read_arguments(item.get("arguments", ""))},
        }
    )


def response_body(reply: Reply) -> dict[str, Any]:
    """The ``response`` object."""
    return _response(reply, _output(reply), "incomplete" if reply.finish_reason == "length" else "completed")


def response_events(reply: Reply) -> Iterator[str]:
    """The answer as server-sent events. It is sampled as a whole before the first of them."""
    output = _output(reply)
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": _response(reply, [], "in_progress")},
        {"type": "response.in_progress", "response": _response(reply, [], "in_progress")},
    ]
    for index, item in enumerate(output):
        events.append({"type": "response.output_item.added", "output_index": index, "item": _begun(item)})
        where = {"item_id": item["id"], "output_index": index}
        if item["type"] == "message":
            part = item["content"][0]
            where = {**where, "content_index": 0}
            events += [
                {"type": "response.content_part.added", **where, "part": {**part, "text": ""}},
                {"type": "response.output_text.delta", **where, "delta": part["text"], "logprobs": []},
                {"type": "response.output_text.done", **where, "text": part["text"], "logprobs": []},
                {"type": "response.content_part.done", **where, "part": part},
            ]
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            events += [
                {"type": "response.function_call_arguments.delta", **where, "delta": item["arguments"]},
                {"type": "response.function_call_arguments.done", **where, **done},
            ]
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    body = response_body(reply)
    events.append({"type": f"response.{body['status']}", "response": body})
    for number, one in enumerate(events):
        yield event({**one, "sequence_number": number}, one["type"])


def _begun(item: Mapping[str, Any]) -> dict[str, Any]:
    empty: dict[str, Any] = {"content": []} if item["type"] == "message" else {"arguments": ""}
    return {**item, **empty, "status": "in_progress"}


def _output(reply: Reply) -> list[dict[str, Any]]:
    output: list[dict[str, Any]] = []
    calls = written_calls(reply.message)
    if reply.message["content"] or not calls:
        text = {"type": "output_text", "text": reply.message["content"], "annotations": []}
        item = {"type": "message", "id": f"msg-{reply.id}", "role": "assistant", "status": "completed"}
        output.append({**item, "content": [text]})
    for call in calls:
        output.append(
            {
                "type": "function_call",
                "id": f"fc-{call['id']}",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
                "status": "completed",
            }
        )
    return output


def _response(reply: Reply, output: list[dict[str, Any]], status: str) -> dict[str, Any]:
    done = status != "in_progress"
    return {
        "id": reply.id.replace("chatcmpl", "resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": MODEL,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": reply.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": reply.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        }
        if done
        else None,
    }
