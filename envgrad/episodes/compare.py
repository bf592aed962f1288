"""The first difference between a recorded episode and its replay."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any

from envgrad.episodes.parts import as_json
from envgrad.episodes.records import EpisodeRecord, EpisodeSummary, TurnRecord
from envgrad.rollout.opening import Opening
from envgrad.types import Episode, StopReason, Turn

OF_TIME = (StopReason.EPISODE_TIMEOUT, StopReason.TOOL_TIMEOUT)
"""ends that a replay does not repeat"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where the replay leaves the record: both sides, as text."""

    where: str
    recorded: str
    replayed: str


def opening_difference(record: EpisodeRecord, opening: Opening) -> Difference | None:
    """Between the openings: messages one by one, then tools."""
    recorded = list(record.messages[: record.opening])
    for index, (first, second) in enumerate(zip(recorded, _plain(opening.messages), strict=False)):
        if first != second:
            return _difference(f"opening, message {index + 1}", first, second)
    if len(recorded) != len(opening.messages):
        return _difference("opening, number of messages", len(recorded), len(opening.messages))
    tools = _plain(opening.schemas or [])
    if list(record.tools) != tools:
        return _difference("opening, tools", list(record.tools), tools)
    return None


def episode_difference(record: EpisodeRecord, episode: Episode, others: Collection[str] = ()) -> Difference | None:
    """Between what was recorded and what the environment did with the same answers.

    ``others`` are components of the reward that the environment alone does not give. An end by the clock is not
    repeated: such an episode is compared up to its last turn.
    """
    for place, first, second in _sides(record, episode, others):
        if not _same(first, second):
            return _difference(place, first, second)
    return None


def failure_difference(record: EpisodeRecord, results: Sequence[Sequence[str]], error: str) -> Difference:
    """The same where the environment failed, which it did not when it was recorded; ``results`` is what came before."""
    for number, (turn, seen) in enumerate(zip(record.turns, results, strict=False)):
        recorded = [call.result for call in turn.calls] if turn.observation is None else [turn.observation]
        if recorded != list(seen):
            return _difference(f"turn {number + 1}, what the environment said", recorded, list(seen))
    return _difference(f"turn {len(results) + 1}", "the environment did not fail", error)


def turn_differences(number: int, recorded: TurnRecord, replayed: Turn) -> Iterator[tuple[str, object, object]]:
    """What is compared of a turn: ``(where, recorded, replayed)``."""
    where = f"turn {number + 1}"
    for index, (call, outcome) in enumerate(zip(recorded.calls, replayed.outcomes, strict=False)):
        name = f"{where}, call {index + 1} ({call.name})"
        yield f"{name}, result", call.result, outcome.content
        yield f"{name}, succeeded", call.ok, outcome.ok
        yield f"{name}, reward", call.reward, outcome.reward
    yield f"{where}, calls before the end", len(recorded.calls), len(replayed.outcomes)
    yield f"{where}, observation", recorded.observation, replayed.observation
    yield f"{where}, reward", recorded.reward, replayed.reward


def _sides(record: EpisodeRecord, episode: Episode, others: Collection[str]) -> Iterator[tuple[str, object, object]]:
    timed = record.summary.stop_reason in OF_TIME
    last = len(record.turns) - timed
    for number, (recorded, replayed) in enumerate(zip(record.turns[:last], episode.turns[:last], strict=False)):
        yield from turn_differences(number, recorded, replayed)
    if timed:
        yield "number of turns, at least", last, min(last, len(episode.turns))
        return
    yield "end", _how(len(record.turns), record.summary.stop_reason), _how(len(episode.turns), episode.stop_reason)
    own = [name for name in record.summary.rewards if name not in others]
    for name in dict.fromkeys([*own, *episode.rewards]):
        yield f"reward component {name!r}", _component(record.summary, name), _component(episode, name)
    if record.feedback is not None:
        yield "feedback", record.feedback, episode.feedback


def _component(side: EpisodeSummary | Episode, name: str) -> object:
    return side.rewards.get(name, "none of this name")


def _how(turns: int, reason: str | None) -> str:
    return f"{_end(reason)}, after {turns} {'turn' if turns == 1 else 'turns'}"


def _end(reason: str | None) -> str:
    """Limits of tokens are one: a replay has no tokens."""
    if reason in (StopReason.MAX_COMPLETION_LENGTH, StopReason.MAX_TURN_TOKENS, StopReason.CONTEXT):
        return "a limit of tokens"
    return str(reason)


def _same(first: object, second: object) -> bool:
    if isinstance(first, float) and isinstance(second, float) and isnan(first) and isnan(second):
        return True
    return first == second


def _plain(value: Sequence[Mapping[str, Any]]) -> list[Any]:
    """As it comes out of the record."""
    read: list[Any] = json.loads(as_json(list(value)))
    return read


def _difference(where: str, recorded: object, replayed: object) -> Difference:
    return Difference(where=where, recorded=_shown(recorded), replayed=_shown(replayed))


def _shown(value: object) -> str:
    return value if isinstance(value, str) else as_json(value)
