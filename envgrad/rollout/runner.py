"""Plays groups: as many at once as fit, whole groups only, in task order; dropped groups are replaced, and with dynamic
sampling those that teach nothing.

Consumes tasks from a ``TaskStream``; produces ``Group``s; waits for the environments and the sampler, each with a
deadline of its own; the caller waits for a whole round.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from envgrad.environments.boundary import WorkerPool
from envgrad.environments.pool import InstancePool
from envgrad.environments.tasks import TaskStream
from envgrad.errors import ConfigurationError, EnvironmentContractError, TooManyFailures
from envgrad.rollout.activity import Activity, ActivityReport
from envgrad.rollout.context import EpisodeContext
from envgrad.rollout.custom import play_custom
from envgrad.rollout.group import GroupPolicy, GroupRun
from envgrad.rollout.loop import RolloutLoop, gather_or_cancel
from envgrad.rollout.tally import Tally
from envgrad.types import Group, Task

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round of rollouts: the groups that are of use, in task order, and what was dropped on the way."""

    groups: tuple[Group, ...]
    """what is trained"""
    dropped: tuple[Group, ...] = ()
    """too few siblings could be scored"""
    filtered: tuple[Group, ...] = ()
    """scored, and replaced by dynamic sampling because there is nothing in them to learn from"""
    stale: tuple[Group, ...] = ()
    """scored, and too old to be trained when they were finished; replaced"""
    unteaching: int = 0
    """of ``groups``, those that dynamic sampling would have replaced, had its bound not been reached"""
    dynamic: bool = False
    """whether dynamic sampling was on"""
    shares: Mapping[str, float] = field(default_factory=dict)
    """the shares of environments that a curriculum had set when the tasks were drawn; empty without one"""
    seconds: float = 0.0
    activity: ActivityReport = field(default_factory=ActivityReport)
    """what the round's time went to"""

    @property
    def scored(self) -> tuple[Group, ...]:
        """``groups`` and ``filtered``, in task order: what rewards are averaged over, so that they are not biased by
        what dynamic sampling leaves out."""
        return tuple(sorted((*self.groups, *self.filtered), key=_position))

    @property
    def failures(self) -> Counter[str]:
        """Failed episodes by kind, over all groups played."""
        return Counter(failure.kind for group in self._played for failure in group.failures)

    @property
    def faults(self) -> Counter[str]:
        """``Group.faults`` of all groups played."""
        counts: Counter[str] = Counter()
        for group in self._played:
            counts.update(group.faults)
        return counts

    @property
    def _played(self) -> tuple[Group, ...]:
        return (*self.scored, *self.dropped, *self.stale)


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicSampling:
    """Groups that teach nothing are replaced by further tasks, within bounds (DAPO, arXiv:2503.14476, section 3.2).

    DAPO samples until the batch is full. Here ``max_rounds`` bounds it: where every task is solved, or none, a batch
    would never fill.
    """

    teaches: Callable[[Group], bool]
    """whether there is anything in a group to learn from"""
    max_rounds: int
    """how often in a round the groups that teach nothing are replaced; what then is left of them fills the round"""

    def __post_init__(self) -> None:
        if self.max_rounds < 1:
            raise ConfigurationError(f"max_dynamic_rounds={self.max_rounds} must be at least 1")


class Waves(Protocol):
    """Plays what is drawn together on several processes."""

    async def play(self, runner: RolloutRunner, drawn: Sequence[Task], policy: GroupPolicy) -> list[Group]:
        """The groups of ``drawn``, in its order; the same on every process. On the loop."""
        ...

    def report(self, own: ActivityReport) -> ActivityReport:
        """A round's activity on all processes."""
        ...


@dataclass(slots=True)
class _Played:
    """A round in the making."""

    dynamic: bool
    teaching: list[Group] = field(default_factory=list)
    unteaching: list[Group] = field(default_factory=list)
    dropped: list[Group] = field(default_factory=list)

    @property
    def drawn(self) -> int:
        return len(self.teaching) + len(self.unteaching) + len(self.dropped)

    def finish(self, count: int, shares: Mapping[str, float], seconds: float) -> Round:
        """Places that are left go to groups that teach nothing, the earliest first."""
        left = count - len(self.teaching)
        fill, filtered = self.unteaching[:left], self.unteaching[left:]
        return Round(
            groups=tuple(sorted((*self.teaching, *fill), key=_position)),
            dropped=tuple(self.dropped),
            filtered=tuple(filtered),
            unteaching=len(fill),
            dynamic=self.dynamic,
            shares=shares,
            seconds=seconds,
        )


def _position(group: Group) -> int:
    return group.task.position


@dataclass(slots=True, kw_only=True)
class RolloutRunner:
    """Owns the loop, the worker threads and the instance pools; plays rounds of groups.

    ``max_groups`` bounds the groups in flight (a policy may say otherwise), so that a group never waits for instances
    that its own siblings hold.
    """

    contexts: Mapping[str, EpisodeContext]
    pools: Mapping[str, InstancePool]
    workers: WorkerPool
    loop: RolloutLoop
    max_groups: int
    max_consecutive_failed_groups: int
    in_waves: bool = False
    """groups in excess of the bound start when all in flight have ended, not as each one ends: slower, but which groups
    are sampled together does not depend on the clock"""
    activity: Activity = field(default_factory=Activity)
    """the contexts' and the sampler's, if they share one"""
    tally: Tally = field(default_factory=Tally)
    """counts what goes wrong"""
    on_group: Callable[[Group], None] | None = None
    """told of each group as it ends, on the loop's thread: for progress displays and logs"""
    waves: Waves | None = None
    """who plays with this process; None: it plays alone"""
    consecutive_failures: Counter[str] = field(init=False, default_factory=Counter)
    """groups dropped in a row, by split: an evaluation's are counted apart from training's beside it"""
    _scored_once: set[str] = field(init=False, default_factory=set)
    _warned: set[str] = field(init=False, default_factory=set)
    _closed: bool = field(init=False, default=False)

    def play(
        self,
        tasks: TaskStream,
        count: int,
        policy: GroupPolicy,
        max_draws: int | None = None,
        dynamic: DynamicSampling | None = None,
    ) -> Round:
        """Play ``count`` groups of tasks drawn from ``tasks`` (fewer only where the stream or ``max_draws`` ends).

        ``max_draws`` bounds the tasks drawn, those that replace dropped and filtered ones included. With ``dynamic``,
        groups that teach nothing are replaced too.

        Raises:
            TooManyFailures: ``max_consecutive_failed_groups`` groups in a row were dropped.
        """
        self.activity.take()
        began = self.activity.clock()
        played = self.loop.run(self._play(tasks, count, policy, max_draws, dynamic))
        report = ActivityReport.of(self.activity.take(), began, self.activity.clock())
        return replace(played, activity=report if self.waves is None else self.waves.report(report))

    async def _play(
        self,
        tasks: TaskStream,
        count: int,
        policy: GroupPolicy,
        max_draws: int | None,
        dynamic: DynamicSampling | None,
    ) -> Round:
        began, shares, played = time.perf_counter(), tasks.shares, _Played(dynamic is not None)
        rounds, replaced = dynamic.max_rounds if dynamic is not None else 0, 0
        while True:
            if rounds and len(played.unteaching) > replaced:
                rounds, replaced = rounds - 1, len(played.unteaching)
            # Groups that teach nothing hold their places where they are not replaced any more.
            wanted = count - len(played.teaching) - (len(played.unteaching) - replaced)
            if max_draws is not None:
                wanted = min(wanted, max_draws - played.drawn)
            drawn = tasks.take(max(0, wanted))
            if not drawn:
                return played.finish(count, shares, time.perf_counter() - began)
            for group in await self._play_all(drawn, policy):
                if not self.is_of_use(group, policy):
                    played.dropped.append(group)
                elif dynamic is None or dynamic.teaches(group):
                    played.teaching.append(group)
                else:
                    played.unteaching.append(group)

    async def _play_all(self, drawn: Sequence[Task], policy: GroupPolicy) -> list[Group]:
        """The groups of ``drawn``, in its order."""
        if self.waves is None:
            return await self.play_here(drawn, policy)
        return await self.waves.play(self, drawn, policy)

    async def play_here(self, drawn: Sequence[Task], policy: GroupPolicy) -> list[Group]:
        """The groups of ``drawn``, in its order, played by this process. On the loop."""
        limit = policy.max_groups or self.max_groups
        gate = asyncio.Semaphore(limit)
        size = limit if self.in_waves else len(drawn)
        groups: list[Group] = []
        for start in range(0, len(drawn), size):
            wave = drawn[start : start + size]
            groups += await gather_or_cancel([self._run_group(task, policy, gate) for task in wave])
        return groups

    async def _run_group(self, task: Task, policy: GroupPolicy, gate: asyncio.Semaphore) -> Group:
        async with gate:
            return await self.play_group(task, policy)

    async def play_group(self, task: Task, policy: GroupPolicy) -> Group:
        """One group, on the loop; the caller bounds how many there are at once."""
        policy = policy.of(task.environment)
        context, pool = self.contexts[task.environment], self.pools[task.environment]
        if context.rollout_func is not None:
            group = await play_custom(context, policy, task)
        else:
            group = await GroupRun(context=context, pool=pool, policy=policy, task=task).run()
        self.take_in(group)
        return group

    def take_in(self, group: Group) -> None:
        """Count a group that has been played, here or by another process. On the loop."""
        self.tally.add(group)
        self._warn_of_mismatch(group)
        if self.on_group is not None:
            self.on_group(group)

    def is_of_use(self, group: Group, policy: GroupPolicy) -> bool:
        """Whether enough siblings are scored; counts the groups in a row that are not. On the loop.

        Raises:
            TooManyFailures: ``max_consecutive_failed_groups`` groups in a row were not.
        """
        scored = sum(episode.reward is not None for episode in group.episodes)
        name = group.task.environment
        policy = policy.of(name)
        self._check_first_reward(group)
        if scored >= min(2, policy.num_generations):
            self.consecutive_failures[group.task.split] = 0
            return True
        self.consecutive_failures[group.task.split] += 1
        in_a_row = self.consecutive_failures[group.task.split]
        self.tally.dropped += group.task.split == self.tally.split
        last = group.failures[-1].error if group.failures else None
        nobody = f"{name} scored none of them (get_reward returned None)" if name else "no reward function scored them"
        why = f"the last failure was: {last}" if last else nobody
        logger.warning(
            "group %s%s dropped: %d of %d siblings scored; %s", group.task.key, f" of {name}" if name else "", scored,
            policy.num_generations, why,
        )  # fmt: skip
        if in_a_row >= self.max_consecutive_failed_groups:
            raise TooManyFailures(
                f"{in_a_row} groups in a row were dropped (max_consecutive_failed_groups="
                f"{self.max_consecutive_failed_groups}); {why}"
            ) from last
        return False

    def _check_first_reward(self, group: Group) -> None:
        """A whole first group in which nothing was ever paid shows an environment that has no reward."""
        name = group.task.environment
        # One episode alone (an evaluation's) may well have earned nothing.
        if name in self._scored_once or group.failures or len(group.episodes) < 2:
            return
        if self.contexts[name].reward_sources:  # a reward function may not apply to any of them
            return
        ended = [episode for episode in group.episodes if not episode.truncated]
        if not any(value is not None for episode in group.episodes for value in episode.rewards.values()) and ended:
            raise EnvironmentContractError(
                f"{name}: a whole first group of {len(group.episodes)} episodes got no reward from anywhere; define "
                "get_reward() (a float, or a dict of floats), or return rewards from step or tools"
            )
        self._scored_once.add(name)

    def _warn_of_mismatch(self, group: Group) -> None:
        name = group.task.environment
        if group.start_mismatch is not None and name not in self._warned:
            self._warned.add(name)
            logger.warning(
                "siblings of one group of %s start differently: %s. Their baseline compares different tasks. Let reset "
                "take `seed` or `group_id` and draw the task from it, or define fork(); group_consistency='require' "
                "makes this an error.", name, group.start_mismatch,
            )  # fmt: skip

    def close(self) -> None:
        """Close every instance exactly once and stop the threads. Safe to call twice, and from ``finally``."""
        if self._closed:
            return
        self._closed = True
        self.loop.run(_close_pools(list(self.pools.values())))
        self.tally.closes += sum(pool.num_close_errors for pool in self.pools.values())
        self.tally.hung += self.workers.hung
        self.workers.close()
        self.loop.close()


async def _close_pools(pools: Sequence[InstancePool]) -> None:
    await asyncio.gather(*(pool.close() for pool in pools))
