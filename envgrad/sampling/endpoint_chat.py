"""Chats with a server that speaks messages, not token ids: the renderer's half of ``endpoint``.

The rollout code moves rows of ids. Here an id is a handle: a negative number, one per token as far as the server or an
estimate tells, so that lengths and limits keep their meaning and nothing can take it for a token::

    row      -1 .. -40      | -41 .. -52           | -53 .. -60
    pieces   opening, tools | the answer (usage)   | tool results
    chat     [system, user] + [assistant, calls]   + [tool, tool]   -> POST /chat/completions
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envgrad.chat.call_forms import malformed
from envgrad.chat.template import ToolSchemas
from envgrad.chat.tool_calls import SampledTurn
from envgrad.environments.arguments import clean_text
from envgrad.types import Message, ToolCall

BYTES_PER_TOKEN = 4
"""what a token is taken to hold where the server does not count"""


def estimate_tokens(value: object) -> int:
    """About how many tokens a text, or a value as JSON, has; at least 1.

    Example:
        >>> estimate_tokens("eight characters and more"), estimate_tokens("")
        (6, 1)
    """
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return max(1, len(text.encode("utf-8", "replace")) // BYTES_PER_TOKEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An assistant message in two forms: as the server takes it back, and as episodes keep it."""

    raw: Message
    turn: SampledTurn


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """What a row of handles stands for."""

    messages: tuple[Message, ...]
    """in the form that servers take"""
    tools: ToolSchemas


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    count: int
    messages: tuple[Message, ...]
    tools: ToolSchemas = None
    answer: Answer | None = None


class EndpointRenderer:
    """Keeps the messages behind handles. It holds them as long as it lives: a run's episodes hold them as well.

    Example:
        >>> renderer = EndpointRenderer()
        >>> row = renderer.open([{"role": "user", "content": "What is 1+1?"}], None)
        >>> row += renderer.add(read_answer({"content": "2"}, number=0), count=2)
        >>> row
        [-1, -2, -3, -4, -5, -6, -7, -8, -9, -10, -11, -12, -13]
        >>> renderer.chat(row).messages
        ({'role': 'user', 'content': 'What is 1+1?'}, {'role': 'assistant', 'content': '2'})
        >>> renderer.read(row[-2:], None).message
        {'role': 'assistant', 'content': '2'}
    """

    stop_token_ids: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._next = -1
        self._pieces: dict[int, _Piece] = {}
        """by a piece's first handle"""

    def check(self, tools: ToolSchemas) -> None:
        """Nothing can be checked here: the server's template decides, and it says so in its first answer."""

    def open(self, messages: Sequence[Message], tools: ToolSchemas) -> list[int]:
        """Handles of the opening messages and the tools' schemas; their number is an estimate."""
        sent = tuple(_for_server(message) for message in messages)
        return self._add(_Piece(count=estimate_tokens([*sent, *(tools or ())]), messages=sent, tools=tools))

    def open_text(self, text: str) -> list[int]:
        """Plain text becomes a user message: a chat endpoint takes nothing else."""
        return self.open([{"role": "user", "content": text}], None)

    def suffix(self, turn_ids: Sequence[int], results: Sequence[Message], tools: ToolSchemas) -> list[int]:
        """Handles of the messages that answer a turn; their number is an estimate."""
        sent = tuple(_for_server(message) for message in results)
        return self._add(_Piece(count=estimate_tokens(list(sent)), messages=sent))

    def read(self, token_ids: Sequence[int], tools: ToolSchemas, *, turn: int = 0) -> SampledTurn:
        answer = self._pieces[token_ids[0]].answer
        if answer is None:
            raise AssertionError("these handles stand for no answer")
        return answer.turn

    def read_text(self, token_ids: Sequence[int]) -> SampledTurn:
        return self.read(token_ids, None)

    # -- the sampler's side

    def chat(self, row: Sequence[int]) -> Chat:
        """The chat that a whole row stands for."""
        messages: list[Message] = []
        tools: ToolSchemas = None
        at = 0
        while at < len(row):
            piece = self._pieces[row[at]]
            messages += piece.messages
            tools = piece.tools if piece.tools is not None else tools
            at += piece.count
        return Chat(messages=tuple(messages), tools=tools)

    def add(self, answer: Answer, count: int) -> list[int]:
        """Handles of an answer of ``count`` tokens."""
        return self._add(_Piece(count=count, messages=(answer.raw,), answer=answer))

    def _add(self, piece: _Piece) -> list[int]:
        first = self._next
        self._pieces[first] = piece
        self._next -= piece.count
        return list(range(first, self._next, -1))


def _for_server(message: Message) -> Message:
    """A message as servers take it: arguments of calls as JSON text, no fields beyond the protocol's."""
    role = message.get("role")
    content = message.get("content")
    sent: Message = {"role": role, "content": "" if content is None else content}
    if role == "tool":
        return {**sent, "tool_call_id": message.get("tool_call_id", "")}
    if message.get("name"):
        sent["name"] = message["name"]
    if role == "assistant" and message.get("tool_calls"):
        sent["tool_calls"] = [_call_for_server(call) for call in message["tool_calls"]]
    return sent


def _call_for_server(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": call.get("id", ""), "type": "function", "function": {"name": function.get("name"), "arguments": text}}


def read_answer(message: Mapping[str, Any], *, number: int) -> Answer:
    """What the server's message says; ``number`` of the chat's answers before it make its calls' ids unique.

    A call whose arguments are no JSON object goes back to the server with ``{}`` for them, since servers parse the
    history; what was wrong is in the call's result.

    Example:
        >>> call = {"id": "a", "type": "function", "function": {"name": "inc", "arguments": '{"n": 1,,}'}}
        >>> answer = read_answer({"content": None, "tool_calls": [call]}, number=0)
        >>> answer.turn.calls[0].error
        'malformed tool call: Expecting property name enclosed in double quotes at character 8, in: inc({"n": 1,,})'
        >>> answer.raw["tool_calls"][0]["function"]["arguments"], answer.turn.message
        ('{}', {'role': 'assistant', 'content': 'inc({"n": 1,,})'})
    """
    content = _text_of(message.get("content"))
    written = message.get("tool_calls")
    calls = written if isinstance(written, Sequence) and not isinstance(written, str) else []
    ids = [call.get("id") if isinstance(call, Mapping) else None for call in calls]
    read = [
        _read_call(call, str(own) if own and ids.count(own) == 1 else f"c{number % 10**5:05d}{index % 10**3:03d}")
        for index, (call, own) in enumerate(zip(calls, ids, strict=True))
    ]
    raw: Message = {"role": "assistant", "content": content}
    kept: Message = {"role": "assistant", "content": content}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        kept["reasoning_content"] = clean_text(reasoning)
    if read:
        raw["tool_calls"] = [_sent_call(call) for call, _ in read]
        broken = [text for call, text in read if call.error is not None]
        kept["content"] = "\n".join([*([content] if content else []), *broken])
        whole = [call for call, _ in read if call.error is None]
        if whole:
            kept["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in whole
            ]
    text = "\n".join([*([content] if content else []), *(text for _, text in read)])
    return Answer(raw=raw, turn=SampledTurn(message=kept, calls=tuple(call for call, _ in read), text=text))


def _text_of(content: object) -> str:
    """The text of a string or of text blocks; nothing of anything else: a server's answer is no fault of the user's."""
    if isinstance(content, str):
        return clean_text(content)
    if not isinstance(content, Sequence):
        return ""
    texts = [block.get("text") for block in content if isinstance(block, Mapping)]
    return clean_text("".join(text for text in texts if isinstance(text, str)))


def _sent_call(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False) if isinstance(call.arguments, dict) else "{}"
    return {"id": call.id, "type": "function", "function": {"name": call.name or "unknown", "arguments": arguments}}


def _read_call(call: object, call_id: str) -> tuple[ToolCall, str]:
    """A call, and its text as it was written."""
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        text = json.dumps(call, default=str)
        return _broken(call_id, None, text, "a call must name its tool"), text
    arguments = function.get("arguments")
    text = clean_text(f"{name}({arguments if isinstance(arguments, str) else json.dumps(arguments, default=str)})")
    if arguments in (None, ""):
        return ToolCall(id=call_id, name=name, arguments={}), text
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            return _broken(call_id, name, text, f"{error.msg} at character {error.pos}"), text
        except (ValueError, RecursionError) as error:
            return _broken(call_id, name, text, str(error)), text
    return ToolCall(id=call_id, name=name, arguments=arguments), text


def _broken(call_id: str, name: str | None, text: str, reason: str) -> ToolCall:
    return ToolCall(id=call_id, name=name, arguments=None, error=malformed(text, reason).error)
