"""One group: one task, G siblings with one start, retries, and the group's own reward.

Failure policy (a failed episode is never a reward of 0): retried on a fresh instance with the same task, then dropped
and counted; a group that keeps fewer than two scored siblings is of no use to its trainer, which draws another task.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from envgrad.environments.boundary import Ok, call_user
from envgrad.environments.contract import read_group_rewards
from envgrad.environments.isolation import use
from envgrad.environments.plain_start import state_text
from envgrad.environments.policy import use_policy
from envgrad.environments.pool import InstancePool
from envgrad.environments.sources import hash63
from envgrad.environments.start import StartMode, decide_start
from envgrad.errors import EnvironmentContractError, EnvironmentFailure, EpisodeFailure, RewardTimeout
from envgrad.rollout.asking import PartRecord, SessionPolicy
from envgrad.rollout.context import EpisodeContext, value_or_failure
from envgrad.rollout.episode import play, session_of
from envgrad.rollout.finite import check_played, end_if_asked, sibling_name
from envgrad.rollout.loop import gather_or_cancel
from envgrad.rollout.opening import EpisodeStart
from envgrad.rollout.scoring import RewardBatch, RewardLog, add_component, score_group
from envgrad.rollout.starting import Starter, find_mismatch, start_states
from envgrad.sampling.sampler import Session
from envgrad.types import Episode, FailedEpisode, Group, Task

TOOL_TIMEOUT = "tool_timeout"
"""the kind of a call that was stopped, or left behind, because it took too long; the episode may go on"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPolicy:
    """How groups are played: size, retries, and what a difference of starts means."""

    num_generations: int
    max_episode_retries: int = 2
    group_consistency: str = "auto"
    end_on_nonfinite: bool = False
    """whether a reward or log-prob that is not finite ends the run, instead of being a failure of its episode"""
    max_groups: int | None = None
    """groups of this size in flight; the runner's bound if None"""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """environments whose groups have a size of their own"""

    def of(self, environment: str) -> GroupPolicy:
        """This policy for groups of ``environment``."""
        size = self.sizes.get(environment, self.num_generations)
        return self if size == self.num_generations else replace(self, num_generations=size)


@dataclass(slots=True)
class _Sibling:
    """One sibling's way to its episode: a start, or the failure of it."""

    number: int
    begin: EpisodeStart | None = None
    episode: Episode | None = None
    failure: EpisodeFailure | None = None
    attempts: int = 0
    session: Session | None = None
    parts: PartRecord = field(default_factory=PartRecord)
    """what the policy's other parts said in this attempt"""


@dataclass(slots=True)
class GroupRun:
    """Plays one group. ``run`` is called once."""

    context: EpisodeContext
    pool: InstancePool
    policy: GroupPolicy
    task: Task
    siblings: list[_Sibling] = field(init=False)
    starter: Starter = field(init=False)
    mismatch: str | None = field(init=False, default=None)
    start: str | None = field(init=False, default=None)
    metrics: Mapping[str, tuple[float, ...]] = field(init=False, default_factory=dict)
    faults: Counter[str] = field(init=False, default_factory=Counter)

    def __post_init__(self) -> None:
        self.siblings = [_Sibling(number) for number in range(self.policy.num_generations)]
        self.starter = Starter(self.context, self.pool, self.task)

    async def run(self) -> Group:
        """Start all siblings, compare their starts, play them concurrently, score them together."""
        # Sessions begin before their resets: a sampler that waits for all open sessions then waits for slow resets too.
        for sibling in self.siblings:
            self._begin_session(sibling)
        try:
            if await self._prepare():
                await gather_or_cancel([self._play(sibling) for sibling in self.siblings])
                with self.context.activity.during("reward", len(self.siblings)):
                    await self._group_reward()
                    await self._score_with_sources()
        finally:
            for sibling in self.siblings:
                self._end_session(sibling)
            await self._release_all()
        failures = [
            FailedEpisode(
                task=self.task,
                sibling=sibling.number,
                attempts=sibling.attempts,
                kind=sibling.failure.kind,
                error=sibling.failure,
            )
            for sibling in self.siblings
            if sibling.failure is not None and sibling.episode is None
        ]
        episodes = tuple(sibling.episode for sibling in self.siblings if sibling.episode is not None)
        return Group(
            task=self.task,
            episodes=episodes,
            failures=tuple(failures),
            start_mismatch=self.mismatch,
            metrics=self.metrics,
            faults={kind: count for kind, count in self.faults.items() if count},
            start=self.start,
        )

    def _begin_session(self, sibling: _Sibling) -> None:
        """Open the session of the sibling's next attempt before the last one's is closed."""
        last, sibling.session = sibling.session, session_of(self.task, sibling.number, sibling.attempts)
        self.context.sampler.begin(sibling.session)
        if last is not None:
            self.context.sampler.end(last)

    def _end_session(self, sibling: _Sibling) -> None:
        if sibling.session is not None:
            self.context.sampler.end(sibling.session)
            sibling.session = None

    # -- starting

    async def _prepare(self) -> bool:
        """Start all siblings and compare their starts; whether the group can be played."""
        try:
            await self._start_all()
            if self.policy.group_consistency != "off" and not self.context.spec.stateless:
                with self.context.activity.during("reset", len(self.siblings)):
                    await self._compare()
        except EpisodeFailure as failure:  # of what they have in common: it is every sibling's
            self.faults[failure.kind] += failure is not self.siblings[0].failure  # else it was counted
            for sibling in self.siblings:
                sibling.failure, sibling.attempts = failure, 1
                if sibling.begin is not None:
                    sibling.begin.usable = False
            return False
        return True

    async def _start_all(self) -> None:
        first, starter = self.siblings[0], self.starter
        await self._start_fresh(first)
        if decide_start(self.context.spec, self.task) in (StartMode.FORK, StartMode.COPY):
            # The others are copies of it, so they cannot start without it.
            for _ in range(self.policy.max_episode_retries):
                if first.begin is None:
                    await self._start_fresh(first)
            if first.begin is None and first.failure is not None:
                raise first.failure
        if first.begin is None:
            # Its retries are made when it is played; the others start for themselves.
            await gather_or_cancel([self._start_fresh(sibling) for sibling in self.siblings[1:]])
            return
        starter.opening = first.begin.opening
        mode = decide_start(self.context.spec, self.task, first.begin.instance)
        if not mode.resets_each:
            self.start = state_text(first.begin.instance)
        if not mode.resets_each and self.policy.num_generations > 1:
            await self._fork_all(first)
        else:
            await gather_or_cancel([self._start_fresh(sibling) for sibling in self.siblings[1:]])

    async def _start_fresh(self, sibling: _Sibling) -> None:
        """Reset an instance of the pool for ``sibling``; a failure is kept on it."""
        sibling.parts = PartRecord()  # what was asked in a start that failed is not played
        try:
            with self.context.activity.during("reset"), self._policy(sibling, "reset"):
                sibling.begin, sibling.failure = await self.starter.fresh(), None
        except EpisodeFailure as failure:
            self.faults[failure.kind] += 1
            sibling.failure = failure

    async def _fork_all(self, first: _Sibling) -> None:
        """Fork one reset instance for every other sibling, and one more that stays pristine for retries."""
        for left in reversed(range(self.policy.max_episode_retries + 1)):
            if first.begin is None:  # its fork failed: it may be dead
                await self._start_fresh(first)
                self.start = None if first.begin is None else state_text(first.begin.instance)
            if first.begin is not None and await self._fork_pristine(first, first.begin):
                break
            if not left:
                raise first.failure or AssertionError("a start that neither succeeded nor failed")
            await self._release(first, usable=False)
        for sibling in self.siblings[1:]:
            await self._start_forked(sibling)
            if sibling.begin is None and first.begin is not None:  # what it is forked from may be dead
                before, failure = self.starter.pristine, first.failure
                if await self._fork_pristine(first, first.begin):
                    if before is not None:
                        await self.pool.discard(before.instance)
                    await self._start_forked(sibling)
                first.failure = failure

    async def _fork_pristine(self, first: _Sibling, begin: EpisodeStart) -> bool:
        try:
            with self.context.activity.during("reset"):
                self.starter.pristine = await self.starter.fork(begin)
        except EpisodeFailure as failure:
            self.faults[failure.kind] += 1
            first.failure = failure
            return False
        return True

    async def _start_forked(self, sibling: _Sibling) -> None:
        if self.starter.pristine is None:
            raise AssertionError("a fork needs a pristine instance")
        try:
            with self.context.activity.during("reset"):
                sibling.begin, sibling.failure = await self.starter.fork(self.starter.pristine), None
        except EpisodeFailure as failure:
            self.faults[failure.kind] += 1
            sibling.failure = failure

    async def _start_again(self, sibling: _Sibling) -> None:
        sibling.parts = PartRecord()
        if self.starter.pristine is not None:
            await self._start_forked(sibling)
            return
        await self._start_fresh(sibling)
        if self.start is not None and sibling.begin is not None:  # a group of one, whose environment draws its tasks
            self.start = state_text(sibling.begin.instance)

    async def _start_untold(self, sibling: _Sibling, failure: EpisodeFailure, tries: int) -> None:
        """Start a sibling again whose state could not be told in so many tries, or give it up."""
        self.faults[failure.kind] += 1
        await self._release(sibling)
        if tries <= self.policy.max_episode_retries:
            await self._start_again(sibling)
        else:
            sibling.failure, sibling.attempts = failure, self.policy.max_episode_retries

    async def _compare(self) -> None:
        """Compare the starts; a sibling whose state cannot be told starts again, as often as it may be retried.

        Raises:
            EnvironmentContractError: they differ, and must not.
        """
        told: dict[int, object] = {}
        tries: Counter[int] = Counter()
        while True:
            begun = [(sibling, sibling.begin) for sibling in self.siblings if sibling.begin is not None]
            asked = [(sibling, begin) for sibling, begin in begun if sibling.number not in told]
            if len(begun) < 2 or not asked:
                break
            states = await start_states(self.context, [begin for _, begin in asked])
            untold = []
            for (sibling, begin), state in zip(asked, states, strict=True):
                if isinstance(state, Ok):
                    told[sibling.number] = state.value
                else:
                    begin.usable, tries[sibling.number] = False, tries[sibling.number] + 1
                    untold.append((sibling, state))
            for sibling, failure in untold:  # one after another, as one instance may be forked for all
                await self._start_untold(sibling, failure, tries[sibling.number])
        starts = {one.number: begin for one, begin in begun if one.number in told}
        self.mismatch = find_mismatch(self.context, list(starts.values()), [told[number] for number in starts])
        if self.mismatch is not None and self.policy.group_consistency == "require":
            raise EnvironmentContractError(
                f"siblings of one group of {self.context.spec.name} start differently: {self.mismatch}; let reset take "
                "`seed` or `group_id` and draw the task from it, or define fork() (group_consistency='require')"
            )

    # -- playing

    async def _play(self, sibling: _Sibling) -> None:
        """Play ``sibling``, retrying on fresh instances with the same task."""
        while True:
            sibling.attempts += 1
            if sibling.begin is not None:
                try:
                    with use(sibling.begin.stream), self._policy(sibling, "play"):
                        episode = await play(
                            self.context, sibling.begin, self.task, sibling.number, sibling.attempts - 1
                        )
                    sibling.episode = replace(episode, parts=sibling.parts.episodes(episode, self.context))
                    check_played(sibling.episode)
                    sibling.failure = None
                    return
                except EpisodeFailure as failure:
                    sibling.episode = None
                    self._count(failure, sibling_name(self.task, sibling.number))
                    sibling.failure = failure
                    sibling.begin.usable = False
                finally:
                    self.faults[TOOL_TIMEOUT] += sibling.begin.stopped_calls
            await self._release(sibling)
            if sibling.attempts > self.policy.max_episode_retries:
                self._end_session(sibling)
                return
            self._begin_session(sibling)
            await self._start_again(sibling)

    def _policy(self, sibling: _Sibling, phase: str) -> AbstractContextManager[None]:
        """Lets the environment ask the policy: in ``reset`` with the group's seed, later with the sibling's own."""
        if sibling.session is None:
            raise AssertionError("a sibling asks without a session")
        own = () if phase == "reset" else (sibling.number, sibling.attempts)
        seed = hash63(phase, self.task.seed, *own)
        policy = SessionPolicy(context=self.context, session=sibling.session, seed=seed, record=sibling.parts)
        return use_policy(policy, policy)

    async def _group_reward(self) -> None:
        """``group_reward`` scores the siblings together; its numbers are added to their own rewards."""
        spec = self.context.spec
        scored = [s for s in self.siblings if s.episode is not None and s.begin is not None and s.begin.usable]
        if not spec.has_group_reward or not scored:
            return
        where, timeout = f"{spec.name}.group_reward", self.context.limits.reward_timeout
        instances = [sibling.begin.instance for sibling in scored if sibling.begin is not None]
        group_reward: Callable[..., object] = type(instances[0]).group_reward  # type: ignore[attr-defined]
        with use(self.context.isolation.stream(hash63("group_reward", self.task.seed))):
            outcome = await call_user(where, group_reward, instances, workers=self.context.workers, timeout=timeout)
        try:
            value = value_or_failure(outcome, where, RewardTimeout, timeout)
            rewards = read_group_rewards(value, len(scored), where)
            for sibling, reward in zip(scored, rewards, strict=True):
                if sibling.episode is not None:
                    sibling.episode = _with_group_reward(sibling.episode, reward, unscorable=spec.has_get_reward)
                    check_played(sibling.episode)
        except EpisodeFailure as failure:
            self._lose(scored, failure, usable=False)

    async def _score_with_sources(self) -> None:
        """Reward functions and models, while the environments are still there."""
        context = self.context
        scored = [s for s in self.siblings if s.episode is not None and s.begin is not None and s.begin.usable]
        if not scored or not (context.reward_sources or context.reward_weights.by_name):
            return
        batch = RewardBatch(
            episodes=tuple(sibling.episode for sibling in scored if sibling.episode is not None),
            environments=None
            if context.spec.stateless
            else tuple(sibling.begin.instance for sibling in scored if sibling.begin is not None),
            log=RewardLog(),
            workers=context.workers,
            timeout=context.limits.reward_timeout,
        )
        try:
            result = await score_group(batch, context.reward_sources, context.reward_weights)
        except EpisodeFailure as failure:
            seen = batch.environments is not None and isinstance(failure, RewardTimeout | EnvironmentFailure)
            self._lose(scored, failure, usable=not seen)
            return
        self.metrics = result.metrics
        for sibling, episode in zip(scored, result.episodes, strict=True):
            sibling.episode = episode

    def _lose(self, scored: Sequence[_Sibling], failure: EpisodeFailure, *, usable: bool) -> None:
        """What scores the siblings together failed; are their instances neither at fault nor still read?"""
        self._count(failure, f"group {self.task.key}")
        for sibling in scored:
            sibling.episode, sibling.failure = None, failure
            if sibling.begin is not None and not usable:
                sibling.begin.usable = False

    def _count(self, failure: EpisodeFailure, where: str) -> None:
        """
        Raises:
            NonFiniteError: it is of a number that is not finite, which ends the run here.
        """
        self.faults[failure.kind] += 1
        end_if_asked(failure, ends=self.policy.end_on_nonfinite, where=where)

    # -- ending

    async def _release(self, sibling: _Sibling, *, usable: bool = True) -> None:
        if sibling.begin is None:
            return
        begin, sibling.begin = sibling.begin, None
        begin.usable = begin.usable and usable
        await self.starter.end(begin)

    async def _release_all(self) -> None:
        await asyncio.gather(*(self._release(sibling) for sibling in self.siblings))
        await self.starter.end_pristine()


def _with_group_reward(episode: Episode, reward: float | None, *, unscorable: bool) -> Episode:
    """``unscorable``: whether an episode without a reward of its own stays without one (``get_reward`` said None)."""
    total = None if reward is None or (unscorable and episode.reward is None) else reward + (episode.reward or 0.0)
    return replace(episode, reward=total, rewards=add_component(episode.rewards, "group", reward))
