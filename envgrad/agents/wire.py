"""``/v1/chat/completions`` as it is spoken: requests read and checked, answers and errors written.

::

    JSON body -> ChatRequest(messages, tools, limits)        ... the recorder answers ...
    Reply(message, log-probs, counts) -> chat.completion, or its chunks for a stream
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envgrad.agents.endpoint import MODEL
from envgrad.chat.template import content_text
from envgrad.errors import ConfigurationError
from envgrad.types import Message

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
TEXT_BLOCKS = ("text", "input_text", "output_text")


class ApiError(Exception):
    """A request that is answered with an error, in OpenAI's form."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def refuse(message: str, param: str) -> ApiError:
    """The error for a request that asks for what cannot be had."""
    return ApiError(400, message, code="invalid_value", param=param)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One call of the agent, checked; messages are in the form that templates print."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    stream: bool = False
    stream_usage: bool = False


def read_request(body: object) -> ChatRequest:
    """A request's body.

    Sampling is the policy's own: ``temperature``, ``top_p``, ``seed``, penalties and their kin are read over. What
    would change the answer's form and cannot be given is refused.

    Raises:
        ApiError: 400, with what is wrong.

    Example:
        >>> read_request({"messages": [{"role": "user", "content": "Hi"}], "temperature": 0}).messages
        ({'role': 'user', 'content': 'Hi'},)
        >>> read_request({"messages": [], "n": 2})
        Traceback (most recent call last):
        envgrad.agents.wire.ApiError: n=2: one answer is sampled for each call; ask again for another
    """
    if not isinstance(body, Mapping):
        raise refuse("the body must be a JSON object", "body")
    if body.get("n") not in (None, 1):
        raise refuse(f"n={body['n']}: one answer is sampled for each call; ask again for another", "n")
    _check_form(body)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise refuse("messages must be a list of at least one message", "messages")
    tools = read_tools(body.get("tools"))
    if body.get("tool_choice") == "none":
        tools = ()
    options = body.get("stream_options")
    return ChatRequest(
        messages=tuple(read_message(message, index) for index, message in enumerate(messages)),
        tools=tools,
        max_tokens=read_limit(body, "max_completion_tokens", "max_tokens"),
        stop=_read_stop(body.get("stop")),
        logprobs=bool(body.get("logprobs")),
        stream=bool(body.get("stream")),
        stream_usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
    )


def _check_form(body: Mapping[str, Any]) -> None:
    """Refuse what would be of another form than a sampled text."""
    check_choice(body.get("tool_choice"))
    form = body.get("response_format")
    if isinstance(form, Mapping) and form.get("type") not in (None, "text"):
        raise refuse(
            f"response_format={form.get('type')!r}: the policy's answers are not forced into a form; ask for it in the "
            "prompt",
            "response_format",
        )
    if body.get("top_logprobs"):
        raise refuse("top_logprobs: only the sampled tokens' log-probs are kept", "top_logprobs")
    for name in ("functions", "function_call", "audio", "prediction"):
        if body.get(name):
            raise refuse(f"{name} is not supported; use messages and tools", name)


def check_choice(choice: object) -> None:
    """
    Raises:
        ApiError: the model would have to be forced to call a tool.
    """
    if choice not in (None, "auto", "none"):
        raise refuse(
            f"tool_choice={choice!r}: the policy decides by itself whether to call a tool; use 'auto' or 'none'",
            "tool_choice",
        )


def read_limit(body: Mapping[str, Any], *names: str) -> int | None:
    """The first of ``names`` that is given: a number of tokens.

    Raises:
        ApiError: it is none.
    """
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise refuse(f"{name}={value!r} must be a number of at least 1", name)
        return value
    return None


def _read_stop(stop: object) -> tuple[str, ...]:
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
        raise refuse(f"stop={stop!r} must be a text or a list of texts", "stop")
    return tuple(stops)


def read_tools(tools: object) -> tuple[dict[str, Any], ...]:
    """
    Raises:
        ApiError: not a list of functions.
    """
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise refuse("tools must be a list", "tools")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise refuse(f"{json.dumps(tool)[:120]} is no tool of type 'function' with a name", "tools")
    return tuple(dict(tool) for tool in tools)


def read_message(message: object, index: int) -> Message:
    """A message with string content, and arguments of calls as objects where they are JSON objects.

    Raises:
        ApiError: an unknown role, content that is not text, or calls that are none.
    """
    where = f"messages[{index}]"
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(message, Mapping) or role not in ROLES:
        raise refuse(f"{where}: role={role!r} must be one of {', '.join(ROLES)}", where)
    read: Message = {"role": ROLES[role], "content": _text(message.get("content"), where)}
    for name in ("reasoning_content", "tool_call_id", "name"):
        if isinstance(message.get(name), str):
            read[name] = message[name]
    calls = message.get("tool_calls")
    if calls and role == "assistant":
        if not isinstance(calls, list):
            raise refuse(f"{where}.tool_calls must be a list", where)
        read["tool_calls"] = [_read_call(call, where) for call in calls]
    return read


def _text(content: object, where: str) -> str:
    if isinstance(content, list):
        content = [
            {"type": "text", "text": block.get("text")}
            if isinstance(block, Mapping) and block.get("type") in TEXT_BLOCKS
            else block
            for block in content
        ]
    try:
        return content_text(content)
    except ConfigurationError as error:
        raise refuse(f"{where}: {error}", where) from error


def _read_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise refuse(f"{where}.tool_calls holds what is no call of a function", where)
    arguments = function.get("arguments", "")
    return {
        "id": str(call.get("id")),
        "type": "function",
        "function": {"name": str(function.get("name")), "arguments": read_arguments(arguments)},
    }


def read_arguments(arguments: object) -> object:
    """Arguments as the object that their JSON text stands for; other text stays as it is.

    Example:
        >>> read_arguments('{"n": 1}'), read_arguments("n = 1")
        ({'n': 1}, 'n = 1')
    """
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A sampled token, as ``logprobs`` shows it."""

    text: str
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer, in the terms of the API."""

    id: str
    message: Message
    finish_reason: str
    """``stop``, ``tool_calls`` or ``length``"""
    prompt_tokens: int
    cached_tokens: int
    """of the prompt: what the row held already"""
    completion_tokens: int
    policy_version: int
    logprobs: tuple[TokenLogprob, ...] | None = None


def written_calls(message: Message) -> list[dict[str, Any]]:
    """A message's calls with arguments as JSON text, as clients expect them."""
    return [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["function"]["name"], "arguments": written(call["function"]["arguments"])},
        }
        for call in message.get("tool_calls") or ()
    ]


def written(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def completion_body(reply: Reply) -> dict[str, Any]:
    """The ``chat.completion`` object."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.message["content"], "refusal": None}
    if "reasoning_content" in reply.message:
        message["reasoning_content"] = reply.message["reasoning_content"]
    if calls := written_calls(reply.message):
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": reply.finish_reason,
        "logprobs": _logprobs(reply.logprobs),
    }
    return {**_head(reply, "chat.completion"), "choices": [choice], "usage": usage(reply)}


def completion_chunks(reply: Reply, *, include_usage: bool) -> Iterator[str]:
    """The answer as server-sent events. It is sampled as a whole before the first of them."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if "reasoning_content" in reply.message:
        deltas.append({"reasoning_content": reply.message["reasoning_content"]})
    if reply.message["content"]:
        deltas.append({"content": reply.message["content"]})
    deltas += [{"tool_calls": [{"index": at, **call}]} for at, call in enumerate(written_calls(reply.message))]
    head = _head(reply, "chat.completion.chunk")
    logprobs = _logprobs(reply.logprobs)
    for number, delta in enumerate(deltas):
        of_chunk = logprobs if number == len(deltas) - 1 else None
        yield event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None, "logprobs": of_chunk}]})
    yield event({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": reply.finish_reason}]})
    if include_usage:
        yield event({**head, "choices": [], "usage": usage(reply)})
    yield "data: [DONE]\n\n"


def event(data: Mapping[str, Any], name: str | None = None) -> str:
    """One server-sent event."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n"


def _head(reply: Reply, kind: str) -> dict[str, Any]:
    return {
        "id": reply.id,
        "object": kind,
        "created": int(time.time()),
        "model": MODEL,
        "system_fingerprint": f"policy-version-{reply.policy_version}",
    }


def usage(reply: Reply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
    }


def _logprobs(tokens: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    if tokens is None:
        return None
    return {
        "content": [
            {
                "token": token.text,
                "logprob": token.logprob,
                "bytes": list(token.text.encode("utf-8", "replace")),
                "top_logprobs": [],
            }
            for token in tokens
        ]
    }
