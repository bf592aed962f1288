"""Episodes as flat rows, which parts hold, and back as records.

::

    Round --Flattener--> FlatRow --parts--> FlatRow --whole.read_record--> EpisodeRecord
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum, isfinite
from typing import Any, TypeAlias

from envgrad.environments.arguments import clean_text
from envgrad.episodes.parts import as_json, packed
from envgrad.episodes.records import Use
from envgrad.rollout.runner import Round
from envgrad.types import Episode, FailedEpisode, Group, Message, TrainingSample, Turn

RowKey: TypeAlias = tuple[str, int, int]
"""``Episode.key`` and the token row"""

TEXT_LIMIT = 4_000
"""characters of prompt, answers and tool results each that are searched"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """What training knows of a round's episodes beside what was played."""

    advantages: Mapping[RowKey, tuple[float, ...]] = field(default_factory=dict)
    """of every token of a row, 0 where the mask is 0"""
    trainer_logprobs: Mapping[RowKey, tuple[float, ...]] = field(default_factory=dict)
    """of the trained tokens only, in their order"""

    @classmethod
    def of(
        cls, samples: Sequence[TrainingSample], trainer_logprobs: Mapping[RowKey, tuple[float, ...]] | None = None
    ) -> Credit:
        """The credit that a round's ``samples`` carry."""
        advantages = {
            (*sample.episode.key, sample.row): sample.advantages for sample in samples if sample.episode is not None
        }
        return cls(advantages=advantages, trainer_logprobs=trainer_logprobs or {})


class Flattener:
    """Makes a round's episodes rows, numbered from ``number`` on, its groups from ``group`` on; in task order.

    Those that failed come behind their siblings. Beside its columns a row has ``words``, which the index searches.
    """

    def __init__(self, *, step: int, credit: Credit, number: int, group: int) -> None:
        self._step = step
        self._credit = credit
        self._number = number
        self._group = group
        self._tools: dict[tuple[int, ...], str] = {}
        """siblings show the same schemas: their JSON is made once"""

    def rows(self, round: Round) -> list[dict[str, Any]]:
        """The rows of ``round``. Other parts of the policy's in the same game follow their episode."""
        uses = {
            Use.TRAINED: round.groups,
            Use.FILTERED: round.filtered,
            Use.STALE: round.stale,
            Use.DROPPED: round.dropped,
        }
        placed = [(one.task.split, one.task.position, one, use) for use, groups in uses.items() for one in groups]
        rows: list[dict[str, Any]] = []
        for split, _, group, use in sorted(placed, key=lambda place: place[:2]):
            use = Use.EVALUATED if use is Use.TRAINED and split == "eval" else use
            common = {"step": self._step} | _task_columns(group)
            played = [one for episode in group.episodes for one in (episode, *episode.parts)]
            found = [self._episode(one, use) for one in played]
            found += [_failure_columns(failure) for failure in group.failures]
            for columns in found:
                rows.append({"number": self._number, "group": self._group} | common | columns)
                self._number += 1
            self._group += 1
        return rows

    def _episode(self, episode: Episode, use: Use) -> dict[str, Any]:
        rows = episode.rows
        versions = set().union(*(row.versions for row in rows)) - {-1}  # -1 stands at tokens that were not sampled
        advantages, mean = _advantages(episode, len(rows), self._credit)
        places = {id(message): index for index, message in enumerate(episode.messages)}
        first = places.get(id(episode.main_turns[0].message)) if episode.main_turns else None
        opening = len(episode.messages) if first is None else first
        reward = episode.reward
        return {
            "sibling": episode.sibling,
            "part": episode.part,
            "attempt": episode.attempt,
            "use": str(use),
            "reward": reward if reward is None or isfinite(reward) else None,
            "rewards": as_json(episode.rewards),
            "advantage": mean,
            "stop_reason": str(episode.stop_reason),
            "failed": None,
            "error": None,
            "truncated": episode.truncated,
            "turns": len(episode.turns),
            "prompt_tokens": episode.num_prompt_tokens,
            "sampled_tokens": episode.num_sampled_tokens,
            "seconds": fsum(episode.seconds.values()),
            "first_version": min(versions, default=None),
            "last_version": max(versions, default=None),
            "body": as_json(_body(episode, places, opening)),
            "tools": self._schemas(episode.tools),
            "token_ids": packed("token_ids", _joined([row.token_ids for row in rows])),
            "mask": packed("mask", _joined([row.mask for row in rows])),
            "logprobs": packed("logprobs", _joined([row.logprobs for row in rows])),
            "versions": packed("versions", _joined([row.versions for row in rows])),
            "advantages": packed("advantages", advantages),
            "trainer_logprobs": packed("trainer_logprobs", _trainer_logprobs(episode, self._credit)),
            "row_lengths": packed("row_lengths", [len(row.mask) for row in rows]),
            "prompt_lengths": packed("prompt_lengths", [row.prompt_length for row in rows]),
            "words": search_texts(episode.messages, opening),
        }

    def _schemas(self, tools: Sequence[Mapping[str, Any]]) -> str:
        key = tuple(id(schema) for schema in tools)
        if key not in self._tools:
            self._tools[key] = as_json(tools)
        return self._tools[key]


def _task_columns(group: Group) -> dict[str, Any]:
    task = group.task
    row, exact = None, True
    if task.row is not None:
        row = as_json(task.row)
        exact = bool(json.loads(row) == dict(task.row))
    return {
        "split": task.split,
        "environment": task.environment,
        "position": task.position,
        "task_index": task.task_index,
        "epoch": task.epoch,
        "group_id": task.group_id,
        "seed": task.seed,
        "row": row,
        "row_is_exact": exact,
        "start": group.start,
    }


def _body(episode: Episode, places: Mapping[int, int], opening: int) -> dict[str, Any]:
    """What is read with the whole episode only. A turn's message is its place in ``messages``, where it has one."""
    return {
        "messages": episode.messages,
        "opening": opening,
        "plain_prompt": episode.plain_prompt,
        "turns": [_turn(turn, places) for turn in episode.turns],
        "seconds": episode.seconds,
        "extras": episode.extras,
        "feedback": episode.feedback,
    }


def _joined(rows: Sequence[Sequence[float]]) -> Sequence[float]:
    return rows[0] if len(rows) == 1 else [value for row in rows for value in row]


def _advantages(episode: Episode, rows: int, credit: Credit) -> tuple[Sequence[float] | None, float | None]:
    """Per token, and their mean over the sampled ones."""
    found = [credit.advantages.get((*episode.key, row)) for row in range(rows)]
    present = [row for row in found if row is not None]
    if not present or len(present) < len(found):
        return None, None
    joined = _joined(present)
    return joined, fsum(joined) / max(1, episode.num_sampled_tokens)


def _trainer_logprobs(episode: Episode, credit: Credit) -> list[float] | None:
    """Spread over all tokens; None unless every row has them."""
    if not credit.trainer_logprobs:
        return None
    spread: list[float] = []
    for number, row in enumerate(episode.rows):
        values = credit.trainer_logprobs.get((*episode.key, number))
        if values is None or len(values) != row.num_sampled_tokens:
            return None
        left = iter(values)
        spread += [next(left) if sampled else 0.0 for sampled in row.mask]
    return spread


def _turn(turn: Turn, places: Mapping[int, int]) -> dict[str, Any]:
    return {
        "start": turn.start,
        "num_tokens": turn.num_tokens,
        "policy_version": turn.policy_version,
        "message": places.get(id(turn.message), turn.message),
        "text": turn.text,
        "calls": [
            {
                "id": outcome.call.id,
                "name": outcome.call.name,
                "arguments": outcome.call.arguments,
                "error": outcome.call.error,
                "result": outcome.content,
                "ok": outcome.ok,
                "reward": outcome.reward,
                "seconds": round(outcome.seconds, 6),
                "tool": outcome.tool,
            }
            for outcome in turn.outcomes
        ],
        "observation": turn.observation,
        "reward": turn.reward,
        "sample_seconds": round(turn.sample_seconds, 6),
        "tool_seconds": round(turn.tool_seconds, 6),
        "row": turn.row,
    }


def _failure_columns(failure: FailedEpisode) -> dict[str, Any]:
    error = clean_text(_error_text(failure.error))
    return {
        "sibling": failure.sibling,
        "part": "",
        "attempt": failure.attempts - 1,
        "use": str(Use.FAILED),
        "reward": None,
        "rewards": "{}",
        "advantage": None,
        "stop_reason": None,
        "failed": failure.kind,
        "error": error,
        "truncated": False,
        "turns": 0,
        "prompt_tokens": 0,
        "sampled_tokens": 0,
        "seconds": 0.0,
        "first_version": None,
        "last_version": None,
        "body": _EMPTY_BODY,
        "tools": "[]",
        "token_ids": b"",
        "mask": b"",
        "logprobs": b"",
        "versions": b"",
        "advantages": None,
        "trainer_logprobs": None,
        "row_lengths": b"",
        "prompt_lengths": b"",
        "words": ("", "", error[:TEXT_LIMIT]),
    }


_EMPTY_BODY = as_json(
    {"messages": [], "opening": 0, "plain_prompt": None, "turns": [], "seconds": {}, "extras": {}, "feedback": None}
)


def _error_text(error: BaseException) -> str:
    """The error and what it came from, a line each."""
    lines, seen = [], set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        lines.append(f"{type(cause).__name__}: {cause}")
        cause = cause.__cause__
    return "\n".join(lines)


def search_texts(messages: Sequence[Message], opening: int) -> tuple[str, str, str]:
    """What is searched of an episode: prompt, answers with their calls, and what the environment said; the last
    message first, so that a beginning of it can be shown.

    >>> chat = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "Left."},
    ...     {"role": "tool", "content": "wall"}]
    >>> search_texts(chat, 1)
    ('Go.', 'Left.', 'wall')
    """
    texts: tuple[list[str], list[str], list[str]] = ([], [], [])
    for index, message in enumerate(messages):
        texts[0 if index < opening else 1 if message.get("role") == "assistant" else 2].append(message_text(message))
    prompt, answers, results = (clean_text("\n".join(reversed(part))[:TEXT_LIMIT]) for part in texts)
    return prompt, answers, results


def message_text(message: Message) -> str:
    """All words of a message: reasoning, content, and calls as ``name(arguments)``."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(block.get("text", "")) for block in content if isinstance(block, Mapping))
    text = content if isinstance(content, str) else ""
    thought = message.get("reasoning_content")
    if isinstance(thought, str) and thought:
        text = f"{thought}\n{text}"
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        text += f"\n{function.get('name')}({function.get('arguments')})"
    return text
