"""Groups as bytes, from one rank to the others.

Only processes of one run read what their own group wrote. Tasks travel as their position: every rank has drawn them,
and a dataset's row may hold what cannot travel.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from envgrad.errors import EpisodeFailure, RankFailed
from envgrad.rollout.activity import ActivityReport
from envgrad.rollout.runner import Round
from envgrad.types import Episode, FailedEpisode, Group, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What one rank made of a wave."""

    groups: Mapping[int, Group]
    """by place in the wave"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """One rank's rollouts ended with an error."""

    text: str
    saves: bool
    """whether such an error leaves a checkpoint behind"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """A signal came to some rank."""

    signal: int


Answer: TypeAlias = Played | Failed | Stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class Led:
    """A round that one rank has played for all."""

    played: Round
    metrics: Mapping[str, float]
    unused: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """One rank's part of a round's activity."""

    report: ActivityReport = field(default_factory=ActivityReport)


Word: TypeAlias = Answer | Led | Reported


def to_bytes(value: Word) -> bytes:
    """
    Raises:
        RankFailed: an episode holds something that no other process can be given.
    """
    buffer = io.BytesIO()
    try:
        # The tasks of a round that one rank has played have been drawn by it alone.
        writer = pickle.Pickler if isinstance(value, Led) else _Writer
        writer(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(_sendable(value))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise RankFailed(
            f"an episode cannot be given to the other ranks: {error}. Messages, tools and calls of an environment (and "
            "a dataset's rows in asynchronous runs) must be plain data"
        ) from error
    return buffer.getvalue()


def from_bytes(data: bytes, drawn: Sequence[Task] = ()) -> Word:
    """What ``to_bytes`` wrote on another rank that has drawn the same tasks."""
    reader = _Reader(io.BytesIO(data), {task.key: task for task in drawn})
    found: Word = reader.load()
    return found


class _Writer(pickle.Pickler):
    def persistent_id(self, value: Any) -> str | None:
        return value.key if type(value) is Task else None


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tasks: Mapping[str, Task]) -> None:
        super().__init__(file)
        self._tasks = tasks

    def persistent_load(self, key: str) -> Task:
        return self._tasks[key]


def _sendable(value: Word) -> Word:
    if isinstance(value, Led):
        lists: dict[str, Any] = {name: tuple(map(_sendable_group, getattr(value.played, name))) for name in _LISTS}
        return replace(value, played=replace(value.played, **lists))
    if not isinstance(value, Played):
        return value
    return replace(value, groups={place: _sendable_group(group) for place, group in value.groups.items()})


_LISTS = ("groups", "dropped", "filtered", "stale")


def _sendable_group(group: Group) -> Group:
    return replace(
        group,
        episodes=tuple(_sendable_episode(episode) for episode in group.episodes),
        failures=tuple(_sendable_failure(failure) for failure in group.failures),
    )


def _sendable_episode(episode: Episode) -> Episode:
    """What reward functions logged goes to the episode log only: what is no plain value is shown as text there."""
    if not episode.extras:
        return episode
    plain = (bool, int, float, str, type(None))
    extras = {name: value if isinstance(value, plain) else str(value) for name, value in episode.extras.items()}
    return replace(episode, extras=extras)


def _sendable_failure(failure: FailedEpisode) -> FailedEpisode:
    """With the error's text: an exception of the user's may hold anything."""
    known = {one.kind: one for one in EpisodeFailure.__subclasses__()}
    kind = known.get(failure.kind, EpisodeFailure)
    return replace(failure, error=kind(str(failure.error)))
