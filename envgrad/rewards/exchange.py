"""An episode as reward functions and reward models see it: a prompt and a completion, in chats or as plain text.

Whether it is a chat or plain text is read from the episode, so from the prompt that was used, and never from the row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from envgrad.chat.template import content_text
from envgrad.environments.spec import copied
from envgrad.types import Episode, Message, Turn

Text: TypeAlias = str | list[Message]
"""Plain text, or the messages of a chat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What went in and what came out, copied: changing it changes no episode."""

    prompt: Text
    completion: Text
    """plain text as it was sampled (with observations between turns), or all messages behind the opening"""
    completion_ids: list[int]
    """all tokens behind the prompt, tool results included"""


def exchange_of(episode: Episode, *, has_tools: bool) -> Exchange:
    """The prompt and the completion of ``episode``.

    Args:
        episode: a finished episode.
        has_tools: the trainer has tools. Then assistant messages come in parts, with ``reasoning_content`` apart, as
            in trl; else reasoning between think tags stays in ``content``, where it was sampled.

    Example:
        >>> from envgrad.types import StopReason, Task
        >>> task = Task(position=0, split="train", environment="", group_id=1, seed=2)
        >>> turn = Turn(start=1, num_tokens=2, policy_version=0, message={"role": "assistant", "content": " is 2"})
        >>> episode = Episode(task=task, sibling=0, token_ids=(5, 6, 7), mask=(0, 1, 1), logprobs=(0.0, -0.1, -0.2),
        ...     versions=(-1, 0, 0), prompt_length=1, messages=({"role": "user", "content": "1+1"}, turn.message),
        ...     turns=(turn,), stop_reason=StopReason.ANSWER, reward=None, plain_prompt="1+1")
        >>> exchange_of(episode, has_tools=False)
        Exchange(prompt='1+1', completion=' is 2', completion_ids=[6, 7])
    """
    ids = list(episode.token_ids[episode.prompt_length :])
    if episode.plain_prompt is not None:
        text = "".join(_plain_parts(episode.main_turns))
        return Exchange(prompt=episode.plain_prompt, completion=text, completion_ids=ids)
    split = len(episode.messages) - sum(_num_messages(turn) for turn in episode.main_turns)
    return Exchange(
        prompt=_copies(episode.messages[:split]),
        completion=_copies(_answers(episode.messages[split:], episode.main_turns, has_tools)),
        completion_ids=ids,
    )


def answer_text(completion: str | Sequence[Mapping[str, object]]) -> str:
    """The text of a completion's last answer, with its reasoning between think tags.

    Example:
        >>> answer_text([{"role": "assistant", "content": "4", "reasoning_content": "2+2"}])
        '<think>\\n2+2\\n</think>\\n4'
    """
    if isinstance(completion, str):
        return completion
    answers = [message for message in completion if message.get("role", "assistant") == "assistant"]
    return _message_text(answers[-1]) if answers else ""


def _plain_parts(turns: Sequence[Turn]) -> Iterator[str]:
    for turn, following in zip(turns, [*turns[1:], None], strict=True):
        yield turn.text or _message_text(turn.message)
        if following is not None:
            results = [turn.observation] if turn.observation is not None else [o.content for o in turn.outcomes]
            yield "\n" + "\n".join(results) + "\n"


def _num_messages(turn: Turn) -> int:
    return 1 + len(turn.outcomes) + (turn.observation is not None)


def _answers(messages: Sequence[Message], turns: Sequence[Turn], has_tools: bool) -> list[Message]:
    by_turn = iter(turns)
    return [
        _answer(message, next(by_turn), has_tools) if message["role"] == "assistant" else message
        for message in messages
    ]


def _answer(message: Message, turn: Turn, has_tools: bool) -> Message:
    if has_tools or message.get("tool_calls") or "reasoning_content" not in message or "</think>" not in turn.text:
        return message
    parts = {key: value for key, value in message.items() if key != "reasoning_content"}
    return {**parts, "content": turn.text}


def _message_text(message: Mapping[str, object]) -> str:
    content, reasoning = content_text(message.get("content")), message.get("reasoning_content")
    if not reasoning:
        return content
    ended = bool(content or message.get("tool_calls"))
    return f"<think>\n{reasoning}\n" + (f"</think>\n{content}" if ended else "")


def _copies(messages: Sequence[Message]) -> list[Message]:
    return [{key: copied(value) for key, value in message.items()} for message in messages]
