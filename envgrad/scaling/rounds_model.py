"""Rounds of groups in simulated time: played while the trainer waits, or beside it behind the library's own buffer."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from envgrad.errors import ConfigurationError
from envgrad.training.buffer import GroupBuffer
from envgrad.types import Episode, Group, StopReason, Task

if TYPE_CHECKING:
    from envgrad.scaling.simulation import Pipeline

Process = Generator[Any, Any, None]


def load_simpy() -> Any:
    """The module.

    Raises:
        ConfigurationError: it is not installed.
    """
    try:
        import simpy
    except ImportError as error:
        raise ConfigurationError("the simulation needs simpy: pip install 'envgrad[plan]'") from error
    return simpy


@dataclass(slots=True, kw_only=True)
class TakenRound:
    """What the trainer trains next."""

    positions: list[int]
    staleness: float = 0.0
    buffered: int = 0
    playing: int = 0


class InlineRounds:
    """A round begins when it is asked for, and the trainer waits; whole groups in flight, as many as fit."""

    unfinished = 0

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._gate = load_simpy().Resource(pipeline.env, pipeline.load.in_flight // pipeline.load.siblings)

    def next(self, taken: list[TakenRound]) -> Process:
        pipeline = self._pipeline
        positions = [next(pipeline.positions) for _ in range(pipeline.load.groups)]
        yield pipeline.env.all_of([pipeline.env.process(self._play(position)) for position in positions])
        taken.append(TakenRound(positions=positions))

    def _play(self, position: int) -> Process:
        with self._gate.request() as place:
            yield place
            yield from self._pipeline.play_group(position)


class BesideRounds:
    """Groups go on beside training, as many as the library's buffer has room for."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        load = pipeline.load
        rounds = pipeline.first + pipeline.counted + pipeline.behind
        self._buffer = GroupBuffer(groups_per_round=load.groups, max_staleness=load.max_staleness, max_rounds=rounds)
        self._limit = load.in_flight // load.siblings
        self._changed = pipeline.env.event()

    @property
    def unfinished(self) -> int:
        return self._buffer.playing + self._buffer.waiting

    def next(self, taken: list[TakenRound]) -> Process:
        pipeline, buffer = self._pipeline, self._buffer
        pipeline.tasks["stale"] += len(buffer.publish(pipeline.version))
        self._start()
        while not buffer.ready():
            self._changed = pipeline.env.event()
            yield self._changed
        waiting, playing = buffer.waiting, buffer.playing
        found = buffer.take()
        self._start()
        taken.append(
            TakenRound(
                positions=[one.group.task.position for one in found],
                staleness=float(max((buffer.age(one.group) for one in found), default=0)),
                buffered=waiting,
                playing=playing,
            )
        )

    def _start(self) -> None:
        while self._buffer.room and self._buffer.playing < self._limit:
            place = self._buffer.admit()
            self._pipeline.env.process(self._play(place))

    def _play(self, place: Any) -> Process:
        pipeline = self._pipeline
        position = next(pipeline.positions)
        oldest = yield from pipeline.play_group(position)
        if not self._buffer.put(place, _finished(position, oldest)):
            pipeline.tasks["stale"] += 1
        self._start()
        if not self._changed.triggered:
            self._changed.succeed()


def _finished(position: int, version: int) -> Group:
    """A group for the buffer, of which it reads the task and the oldest token's version."""
    task = Task(position=position, split="train", environment="", group_id=position, seed=position)
    episode = Episode(
        task=task, sibling=0, token_ids=(0,), mask=(1,), logprobs=(0.0,), versions=(version,), prompt_length=0,
        messages=(), turns=(), stop_reason=StopReason.ANSWER, reward=0.0,
    )  # fmt: skip
    return Group(task=task, episodes=(episode,))
