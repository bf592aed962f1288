"""Rollouts that never wait for training: groups in flight on the rollouts' loop, behind the bounded buffer.

Consumes tasks as the buffer has room; produces finished groups; the trainer waits for whole rounds. All state is the
loop thread's: the trainer's thread asks through ``loop.run``, which looks whether that thread lives. An error in a
group ends the producer, and is raised where the trainer waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TypeVar

from envgrad.environments.sources import State
from envgrad.rollout.activity import ActivityReport
from envgrad.rollout.runner import Round
from envgrad.training.buffer import Finished, GroupBuffer, Place, Unconsumed, sampled_versions
from envgrad.training.phases import Laps
from envgrad.training.rounds import RoundPlan, RoundsState
from envgrad.types import Group

T = TypeVar("T")


@dataclass(slots=True)
class _Since:
    """What came to nothing since the last round was taken."""

    dropped: list[Group] = field(default_factory=list)
    filtered: list[Group] = field(default_factory=list)
    stale: list[Group] = field(default_factory=list)
    draws: dict[int, State] = field(default_factory=dict)
    """what draws their tasks again, by position"""


class Producer:
    """Keeps as many groups in flight as the buffer and the plan's concurrency allow.

    Constructed anywhere; every method runs on the loop.
    """

    def __init__(self, plan: RoundPlan, buffer: GroupBuffer) -> None:
        self.buffer = buffer
        self.drawn: dict[int, State] = {}
        """tasks in play or waiting for their round, by position: the states that draw them again"""
        self._plan = plan
        self._running: dict[asyncio.Task[Group], Place] = {}
        self._since = _Since()
        self._before: RoundsState | None = None
        """the state before a round was taken that is not in hand"""
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._paused = False
        self._work: asyncio.Task[None] | None = None

    @property
    def exhausted(self) -> bool:
        """Whether no task is left to draw."""
        return self._plan.draws_left == 0

    def restore(self, state: Unconsumed, draws: Mapping[int, State]) -> None:
        """Take up the groups that a checkpoint holds, before ``start``."""
        self.buffer.restore(state)
        self.drawn = {one.group.task.position: draws[one.group.task.position] for one in state.waiting}
        came_to_nothing = (*state.dropped, *state.filtered, *state.stale)
        self._since = _Since(
            dropped=list(state.dropped),
            filtered=list(state.filtered),
            stale=list(state.stale),
            draws={group.task.position: draws[group.task.position] for group in came_to_nothing},
        )

    def state(self) -> RoundsState:
        """Where it stands; before the last round, if that one is not in hand."""
        if self._before is not None:
            return self._before
        since, unconsumed = self._since, self.buffer.state()
        waiting = {one.group.task.position for one in unconsumed.waiting}
        again = [self.drawn[position] for position in sorted(self.drawn) if position not in waiting]
        return RoundsState(
            tasks=self._plan.tasks.state_dict(again),
            unconsumed=replace(
                unconsumed, dropped=tuple(since.dropped), filtered=tuple(since.filtered), stale=tuple(since.stale)
            ),
            draws={position: self.drawn[position] for position in waiting} | since.draws,
        )

    def keep(self) -> None:
        """The round that was taken is in hand."""
        self._before = None

    def start(self) -> None:
        """Begin; nothing is played before the first publish."""
        self._work = asyncio.ensure_future(self._run())

    def publish(self, version: int) -> None:
        """Weights of ``version`` are served: there may be room for more groups."""
        for group in self.buffer.publish(version):
            self._came_to_nothing(group, self._since.stale)
        self.resume()

    async def drain(self) -> None:
        """Start no more groups until the next publish, and wait for those in play.

        Raises:
            BaseException: the error that ended the producer.
        """
        self._paused = True
        while self._running:
            await self._change()

    def resume(self) -> None:
        """Start groups again, behind ``drain``."""
        self._paused = False
        self._wake.set()

    async def take(self) -> tuple[list[Finished], _Since]:
        """Wait for the next round.

        Raises:
            BaseException: the error that ended the producer.
        """
        self._check()
        while not self.buffer.ready(no_more=self.exhausted):
            await self._change()
        self._before = None
        self._before = self.state()
        taken, since, self._since = self.buffer.take(), self._since, _Since()
        for one in taken:
            self.drawn.pop(one.group.task.position, None)
        self._wake.set()
        return taken, since

    async def close(self) -> None:
        """Cancel what is in play and wait until it has ended."""
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)

    def _check(self) -> asyncio.Task[None]:
        if self._work is None:
            raise AssertionError("the producer was not started")
        if self._work.done():
            self._work.result()
            raise AssertionError("the producer ended without an error")
        return self._work

    async def _change(self) -> None:
        """Wait until a group has ended, or raise what ended the producer."""
        work, changed = self._check(), asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait({work, changed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
        self._changed.clear()
        self._check()

    async def _run(self) -> None:
        try:
            while True:
                self._start_groups()
                self._changed.set()
                woken = asyncio.ensure_future(self._wake.wait())
                try:
                    await asyncio.wait({woken, *self._running}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    woken.cancel()
                self._wake.clear()
                for task in [one for one in self._running if one.done()]:
                    self._finish(task.result(), self._running.pop(task))
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    def _start_groups(self) -> None:
        plan = self._plan
        limit = plan.policy.max_groups or plan.runner.max_groups
        while not self._paused and not self.exhausted and self.buffer.room and len(self._running) < limit:
            task, state = plan.tasks.draw()
            self.drawn[task.position] = state
            place = self.buffer.admit()
            self._running[asyncio.ensure_future(plan.runner.play_group(task, plan.policy))] = place

    def _finish(self, group: Group, place: Place) -> None:
        plan, dynamic = self._plan, self._plan.dynamic
        if not plan.runner.is_of_use(group, plan.policy):
            self.buffer.give_up(place)
            self._came_to_nothing(group, self._since.dropped)
            return
        teaches = dynamic is None or dynamic.teaches(group)
        may_replace = dynamic is not None and len(self._since.filtered) < dynamic.max_rounds * plan.groups
        if not teaches and may_replace and not self.exhausted:
            self.buffer.give_up(place)
            self._came_to_nothing(group, self._since.filtered)
        elif not self.buffer.put(place, group, teaches=teaches):
            self._came_to_nothing(group, self._since.stale)

    def _came_to_nothing(self, group: Group, kept: list[Group]) -> None:
        kept.append(group)
        self._since.draws[group.task.position] = self.drawn.pop(group.task.position)


class BufferedRounds:
    """A ``RoundSource`` whose groups are played while the trainer trains.

    Args:
        plan: What a round is.
        max_staleness: Most publishes between a sample's oldest token and its first pass; at least 1.
        inflight: Weights are published while groups are in play; else they are waited for first.
        rounds_left: Rounds that the run still needs, asked before the first one; None: there is no last one.
        clock: Seconds, always growing.
    """

    def __init__(
        self,
        plan: RoundPlan,
        *,
        max_staleness: int,
        inflight: bool,
        rounds_left: Callable[[], int | None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._plan = plan
        self._max_staleness = max_staleness
        self._inflight = inflight
        self._rounds_left = rounds_left
        self._clock = clock
        self._producer: Producer | None = None
        self._taken_at = clock()
        self._closed = False
        self._restored: RoundsState | None = None
        """the groups of a checkpoint, until the first round"""
        self.metrics: Mapping[str, float] = {}

    def next(self, laps: Laps) -> Round:
        """``RoundSource.next``."""
        loop, plan = self._plan.runner.loop, self._plan
        producer = self._producer
        if producer is None:
            self._taken_at = self._clock()
            plan.runner.activity.take()
            producer = self._producer = loop.run(self._start())
        if not self._inflight:
            loop.run(producer.drain())
            laps.lap("idle")
        version = plan.publish()
        loop.run(_call(lambda: producer.publish(version)))
        laps.lap("publish")
        began = self._clock()
        taken, since = loop.run(producer.take())
        waited = self._clock() - began
        shares = plan.tasks.shares
        played = self._round(taken, since, shares)
        loop.run(_call(lambda: plan.tasks.observe(played.scored)))
        self.metrics = self._metrics(producer, played, waited)
        laps.lap("idle")
        return played

    async def _start(self) -> Producer:
        buffer = GroupBuffer(
            groups_per_round=self._plan.groups, max_staleness=self._max_staleness, max_rounds=self._rounds_left()
        )
        producer = Producer(self._plan, buffer)
        restored, self._restored = self._restored, None
        if restored is not None and restored.unconsumed is not None:
            producer.restore(restored.unconsumed, restored.draws)
        producer.start()
        return producer

    def _round(self, taken: list[Finished], since: _Since, shares: Mapping[str, float]) -> Round:
        plan, began, now = self._plan, self._taken_at, self._clock()
        self._taken_at = now
        return Round(
            groups=tuple(one.group for one in taken),
            dropped=tuple(since.dropped),
            filtered=tuple(since.filtered),
            stale=tuple(since.stale),
            unteaching=sum(not one.teaches for one in taken),
            dynamic=plan.dynamic is not None,
            shares=shares,
            seconds=now - began,
            activity=ActivityReport.of(plan.runner.activity.take(), began, now),
        )

    def _metrics(self, producer: Producer, played: Round, waited: float) -> dict[str, float]:
        buffer, stale = producer.buffer, len(played.stale)
        episodes = [episode for group in played.groups for episode in group.episodes]
        ages = [buffer.age_of(episode) for episode in episodes]
        spans = [len(sampled_versions(episode)) for episode in episodes]
        return {
            "async/staleness_mean": fmean(ages) if ages else 0.0,
            "async/staleness_max": float(max(ages, default=0)),
            "async/versions_per_episode": fmean(spans) if spans else 0.0,
            "async/dropped_share": stale / max(1, stale + len(played.groups)),
            "async/buffer_size": float(buffer.waiting),
            "async/in_flight": float(buffer.playing),
            "async/wait_seconds": waited,
        }

    def keep(self) -> None:
        """``RoundSource.keep``."""
        producer = self._producer
        if producer is not None:
            self._on_loop(producer.keep)

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """``RoundSource.settled``."""
        producer = self._producer
        if producer is None or self._inflight or self._closed:
            yield
            return
        self._plan.runner.loop.run(producer.drain())
        try:
            yield
        finally:
            self._on_loop(producer.resume)

    def state(self) -> RoundsState:
        """``RoundSource.state``: tasks in play are drawn again, finished groups wait for their round."""
        producer, restored = self._producer, self._restored
        if producer is not None:
            return self._on_loop(producer.state)
        tasks = self._plan.tasks.state_dict()
        return RoundsState(tasks=tasks) if restored is None else replace(restored, tasks=tasks)

    def restore(self, state: RoundsState) -> None:
        """``RoundSource.restore``."""
        self._plan.tasks.load_state_dict(state.tasks)
        self._restored = state

    def _on_loop(self, function: Callable[[], T]) -> T:
        return function() if self._closed else self._plan.runner.loop.run(_call(function))

    @property
    def unused(self) -> int:
        """Groups in play, and those that wait for their round."""
        if self._producer is not None:
            return len(self._producer.drawn)
        unconsumed = None if self._restored is None else self._restored.unconsumed
        return 0 if unconsumed is None else len(unconsumed.waiting)

    def close(self) -> None:
        """Cancel what is in play and wait until it has ended. Safe to call twice."""
        if self._producer is not None and not self._closed:
            self._closed = True
            self._plan.runner.loop.run(self._producer.close())


async def _call(function: Callable[[], T]) -> T:
    return function()
