"""Episodes as trackers show them: a few of a round, each as a row of figures and a transcript of bounded length."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envgrad.rollout.runner import Round
from envgrad.training.completions import mean_advantages
from envgrad.types import Episode, Message, TrainingSample

MAX_MESSAGES = 40
"""messages of an episode that are sent; of a longer one the middle is left out"""
MAX_CHARACTERS = 4000
"""of one message"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRow:
    """One episode of a table."""

    step: int
    environment: str
    task: str
    """``Task.key``: which draw of the task stream"""
    group_id: str
    """as text: 63 bits are more than a browser's numbers hold"""
    sibling: int
    reward: float | None
    advantage: float | None
    """mean over the sampled tokens; None where the episode could not be scored"""
    stop_reason: str
    turns: int
    tokens: int
    """sampled ones"""
    rewards: Mapping[str, float | None]
    messages: tuple[dict[str, Any], ...]
    """in the form that OpenAI's API has, all of it text"""

    @property
    def figures(self) -> dict[str, Any]:
        """All but messages and components, by column."""
        return {
            "step": self.step,
            "environment": self.environment,
            "task": self.task,
            "group_id": self.group_id,
            "sibling": self.sibling,
            "reward": self.reward,
            "advantage": self.advantage,
            "stop_reason": self.stop_reason,
            "turns": self.turns,
            "tokens": self.tokens,
        }

    @property
    def transcript(self) -> str:
        """The messages as ``role: text`` blocks."""
        return "\n\n".join(_block(message) for message in self.messages)


def episode_rows(
    played: Round, samples: Sequence[TrainingSample], *, step: int, limit: int, seed: int
) -> list[EpisodeRow]:
    """At most ``limit`` of the round's episodes, drawn at random from ``seed`` and ``step``, in the round's order."""
    episodes = [episode for group in played.groups for episode in group.episodes]
    if limit < len(episodes):
        chosen = random.Random(f"{seed}/{step}/episodes").sample(range(len(episodes)), limit)
        episodes = [episodes[index] for index in sorted(chosen)]
    advantages = mean_advantages(samples)
    return [_row(episode, step, advantages.get(episode.key)) for episode in episodes]


def _row(episode: Episode, step: int, advantage: float | None) -> EpisodeRow:
    return EpisodeRow(
        step=step,
        environment=episode.task.environment,
        task=episode.task.key,
        group_id=str(episode.task.group_id),
        sibling=episode.sibling,
        reward=episode.reward,
        advantage=advantage,
        stop_reason=str(episode.stop_reason),
        turns=len(episode.turns),
        tokens=episode.num_sampled_tokens,
        rewards=dict(episode.rewards),
        messages=tuple(plain_messages(episode.messages)),
    )


def table_columns(rows: Sequence[EpisodeRow]) -> list[dict[str, Any]]:
    """The rows with the same columns each: figures, a column for each reward component of any row, the transcript."""
    components = list(dict.fromkeys(name for row in rows for name in row.rewards))
    return [
        row.figures | {f"rewards/{name}": row.rewards.get(name) for name in components} | {"transcript": row.transcript}
        for row in rows
    ]


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages whose every value is text of bounded length; of a long chat its beginning and its end.

    Example:
        >>> call = {"type": "function", "function": {"name": "guess", "arguments": {"number": 3}}}
        >>> plain_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
        [{'role': 'assistant', 'content': '', 'tool_calls': [{'id': 'call_0', 'type': 'function', 'function': \
{'name': 'guess', 'arguments': '{"number": 3}'}}]}]
    """
    if len(messages) > MAX_MESSAGES:
        half = MAX_MESSAGES // 2
        left_out: Message = {"role": "system", "content": f"... {len(messages) - 2 * half} messages left out ..."}
        messages = [*messages[:half], left_out, *messages[len(messages) - half :]]
    return [_plain(message) for message in messages]


def _plain(message: Message) -> dict[str, Any]:
    thoughts = message.get("reasoning_content") or message.get("thinking")
    found: dict[str, Any] = {"role": str(message.get("role", "")), "content": _short(_text(message.get("content")))}
    if thoughts:
        found["reasoning_content"] = _short(_text(thoughts))
    for name in ("name", "tool_call_id"):
        if message.get(name):
            found[name] = str(message[name])
    calls = message.get("tool_calls")
    if calls:
        found["tool_calls"] = [_call(call, number) for number, call in enumerate(calls)]
    return found


def _call(call: object, number: int) -> dict[str, Any]:
    outer = call if isinstance(call, Mapping) else {}
    function = outer.get("function", outer)
    inner = function if isinstance(function, Mapping) else {}
    arguments = inner.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False, default=str)
    return {
        "id": str(outer.get("id") or f"call_{number}"),
        "type": "function",
        "function": {"name": str(inner.get("name")), "arguments": _short(arguments)},
    }


def _text(content: object) -> str:
    if isinstance(content, (list, tuple)):
        return "".join(
            str(block.get("text", f"[{block.get('type', 'block')}]")) if isinstance(block, Mapping) else str(block)
            for block in content
        )
    return "" if content is None else str(content)


def _short(text: str) -> str:
    # Half of a surrogate pair, which a cut token can leave behind, is nothing that a file can hold.
    whole = text.encode("utf-8", "replace").decode("utf-8")
    left_out = len(whole) - MAX_CHARACTERS
    return whole if left_out <= 0 else f"{whole[:MAX_CHARACTERS]} ... (+{left_out} characters)"


def _block(message: Mapping[str, Any]) -> str:
    parts = [message["reasoning_content"]] if "reasoning_content" in message else []
    parts += [message["content"]] if message["content"] else []
    for call in message.get("tool_calls", ()):
        parts.append(f"-> {call['function']['name']}({call['function']['arguments']})")
    return f"{message['role']}: " + "\n".join(parts)
