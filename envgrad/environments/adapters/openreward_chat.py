"""Chats as OpenReward writes them (role-tagged blocks) and as we do, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from envgrad.errors import EnvironmentFailure
from envgrad.types import Message

Blocks: TypeAlias = Sequence[Any]
"""of ``openreward.api.environments.types``: each has a ``type``"""


def block_text(blocks: Blocks) -> str:
    """What a tool answered; an image is named, since nobody here can see it."""
    shown = (block.text if block.type == "text" else f"({block.mimeType}, not shown)" for block in blocks)
    return "\n".join(shown)


def opening(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The opening from ``Session.get_messages("openai")``.

    Raises:
        EnvironmentFailure: no message, or images.

    Example:
        >>> opening([{"role": "user", "content": [{"type": "text", "text": "Hi."}]}])
        [{'role': 'user', 'content': [{'type': 'text', 'text': 'Hi.'}]}]
    """
    if not messages:
        raise EnvironmentFailure("the server's task has no prompt")
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and any(part.get("type") != "text" for part in content):
            raise EnvironmentFailure("the server's prompt has images; episodes are text only")
    return [_with_arguments(dict(message)) for message in messages]


def _with_arguments(message: Message) -> Message:
    """Arguments of calls as templates take them: not as JSON text."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    read = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in calls
    ]
    return {**message, "tool_calls": read}


def last_answer(messages: Sequence[Message]) -> str | None:
    """The model's last text, where the chat ends in it; None where it ends in a call or a tool's result.

    Example:
        >>> last_answer([{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}])
        '2'
    """
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or last.get("tool_calls"):
        return None
    return str(last.get("content") or "")


def candidate(messages: Sequence[Message], *, text_only: bool) -> list[Any]:
    """A chat after its opening as ``score_group`` takes it.

    ``text_only``: without calls, their results and reasoning, for servers that know no such blocks.
    """
    from openreward.api.environments.types import (
        Message as Wire,
    )
    from openreward.api.environments.types import (
        ReasoningBlock,
        TextBlock,
        ToolCallBlock,
        ToolResultBlock,
    )

    written: list[Any] = []
    for message in messages:
        role, text = message["role"], str(message.get("content") or "")
        if role == "tool":
            if not text_only:
                known = str(message.get("tool_call_id", ""))
                written.append(
                    Wire(role="user", blocks=[ToolResultBlock(tool_call_id=known, blocks=[TextBlock(text)])])
                )
            continue
        blocks: list[Any] = []
        if message.get("reasoning_content") and not text_only:
            blocks.append(ReasoningBlock(text=str(message["reasoning_content"])))
        blocks.append(TextBlock(text))
        for call in () if text_only else message.get("tool_calls") or ():
            function = call["function"]
            arguments = function["arguments"] if isinstance(function["arguments"], dict) else {}
            blocks.append(ToolCallBlock(id=str(call.get("id", "")), name=function["name"], input=arguments))
        written.append(Wire(role="user" if role not in ("assistant", "system") else role, blocks=blocks))
    return written
