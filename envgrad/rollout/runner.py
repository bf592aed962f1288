"""Plays groups: as many at once as fit, whole groups only, in task order; dropped groups are replaced.

Consumes tasks from a ``TaskStream``; produces ``Group``s; waits for the environments and the sampler, each with a
deadline of its own; the caller waits for a whole round.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from envgrad.environments.boundary import WorkerPool
from envgrad.environments.pool import InstancePool
from envgrad.environments.tasks import TaskStream
from envgrad.errors import EnvironmentContractError, TooManyFailures
from envgrad.rollout.context import EpisodeContext
from envgrad.rollout.group import GroupPolicy, GroupRun
from envgrad.rollout.loop import RolloutLoop, gather_or_cancel
from envgrad.types import Group, Task

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round of rollouts: the groups that are of use, in task order, and what was dropped on the way."""

    groups: tuple[Group, ...]
    dropped: tuple[Group, ...] = ()
    seconds: float = 0.0

    @property
    def failures(self) -> Counter[str]:
        """Failed episodes by kind, over all groups played."""
        return Counter(failure.kind for group in (*self.groups, *self.dropped) for failure in group.failures)


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
    consecutive_failures: int = field(init=False, default=0)
    _scored_once: set[str] = field(init=False, default_factory=set)
    _warned: set[str] = field(init=False, default_factory=set)
    _closed: bool = field(init=False, default=False)

    def play(self, tasks: TaskStream, count: int, policy: GroupPolicy, max_draws: int | None = None) -> Round:
        """Play ``count`` groups of tasks drawn from ``tasks`` (fewer only where the stream or ``max_draws`` ends).

        ``max_draws`` bounds the tasks drawn, those that replace dropped ones included.

        Raises:
            TooManyFailures: ``max_consecutive_failed_groups`` groups in a row were dropped.
        """
        return self.loop.run(self._play(tasks, count, policy, max_draws))

    async def _play(self, tasks: TaskStream, count: int, policy: GroupPolicy, max_draws: int | None) -> Round:
        began = time.perf_counter()
        gate = asyncio.Semaphore(policy.max_groups or self.max_groups)
        kept: list[Group] = []
        dropped: list[Group] = []
        while len(kept) < count:
            wanted = count - len(kept)
            if max_draws is not None:
                wanted = min(wanted, max_draws - len(kept) - len(dropped))
            drawn = tasks.take(wanted)
            if not drawn:
                break
            for group in await gather_or_cancel([self._run_group(task, policy, gate) for task in drawn]):
                (kept if self._is_of_use(group, policy) else dropped).append(group)
        return Round(groups=tuple(kept), dropped=tuple(dropped), seconds=time.perf_counter() - began)

    async def _run_group(self, task: Task, policy: GroupPolicy, gate: asyncio.Semaphore) -> Group:
        context, pool = self.contexts[task.environment], self.pools[task.environment]
        async with gate:
            group = await GroupRun(context=context, pool=pool, policy=policy, task=task).run()
        self._warn_of_mismatch(group)
        return group

    def _is_of_use(self, group: Group, policy: GroupPolicy) -> bool:
        """Whether enough siblings are scored; counts the groups in a row that are not."""
        scored = sum(episode.reward is not None for episode in group.episodes)
        name = group.task.environment
        self._check_first_reward(group)
        if scored >= min(2, policy.num_generations):
            self.consecutive_failures = 0
            return True
        self.consecutive_failures += 1
        last = group.failures[-1].error if group.failures else None
        why = f"the last failure was: {last}" if last else f"{name} scored none of them (get_reward returned None)"
        logger.warning(
            "group %s of %s dropped: %d of %d siblings scored; %s", group.task.key, name, scored,
            policy.num_generations, why,
        )  # fmt: skip
        if self.consecutive_failures >= self.max_consecutive_failed_groups:
            raise TooManyFailures(
                f"{self.consecutive_failures} groups in a row were dropped (max_consecutive_failed_groups="
                f"{self.max_consecutive_failed_groups}); {why}"
            ) from last
        return False

    def _check_first_reward(self, group: Group) -> None:
        """A whole first group in which nothing was ever paid shows an environment that has no reward."""
        name = group.task.environment
        # One episode alone (an evaluation's) may well have earned nothing.
        if name in self._scored_once or group.failures or len(group.episodes) < 2:
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
        self.workers.close()
        self.loop.close()


async def _close_pools(pools: Sequence[InstancePool]) -> None:
    await asyncio.gather(*(pool.close() for pool in pools))
