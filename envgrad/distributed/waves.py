"""Who plays which group: the groups that are played together ("a wave") as a queue that all ranks share.

::

    drawn tasks (the same on every rank)   0   1   2   3   4   5
    tickets                                r0  r1  r0  r1  r1  r1      r0's second group is slow: r1 takes what is left
    then one exchange: all groups, or one rank's error; every rank goes on with the same wave, in task order

Replacements of dropped groups are the next wave, drawn alike by all ranks. So no task is drawn twice or lost, and the
position of the tasks is the same everywhere, and in a checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from envgrad.distributed.ranks import FAILED, Ranks
from envgrad.distributed.wire import Answer, Failed, Played, Reported, Stopped, Word, from_bytes, to_bytes
from envgrad.errors import NonFiniteError, RankFailed, RankStopped, SamplerDied, StoppedTogether, TooManyFailures
from envgrad.rollout.activity import ActivityReport
from envgrad.rollout.group import GroupPolicy
from envgrad.rollout.loop import gather_or_cancel
from envgrad.rollout.runner import RolloutRunner
from envgrad.types import Group, Task

POLL_SECONDS = 0.2
"""how often a rank that plays looks whether another has failed or was stopped"""
_STOP = "stop"
SAVING = (TooManyFailures, SamplerDied, NonFiniteError)
"""errors of rollouts that leave a checkpoint behind"""


@dataclass(slots=True, kw_only=True)
class SharedWaves:
    """``rollout.runner.Waves`` for several ranks. All methods but ``report`` run on the rollouts' loop.

    Args:
        ranks: Who takes part.
        static: Ticket ``i`` is rank ``i mod size``'s, so that who plays what does not depend on the clock; else a rank
            that is done takes the next one.
        leads: The first rank plays all: there is one sampler, or one producer.
        arrived: The signal that came to this process, if one did.
    """

    ranks: Ranks
    static: bool
    leads: bool = False
    arrived: Callable[[], int | None] = lambda: None
    failed: bool = False
    """whether rollouts ended with an error that all ranks know of"""
    _waves: int = 0

    async def play(self, runner: RolloutRunner, drawn: Sequence[Task], policy: GroupPolicy) -> list[Group]:
        """``Waves.play``: the groups of ``drawn``, in its order, whoever played them.

        Raises:
            RankFailed: another rank has failed, or is gone.
            StoppedTogether: a signal came to some rank.
            Exception: what ended this rank's rollouts; the others know of it.
        """
        self._waves += 1
        name = f"wave{self._waves}"
        known = self.static or self.leads
        mine = self._play_known(runner, drawn, policy) if known else self._play_next(name, runner, drawn, policy)
        answer, error = await self._until_done_or_stopped(asyncio.ensure_future(mine), name)
        try:
            data = to_bytes(answer)
        except RankFailed as unsendable:
            error, data = unsendable, to_bytes(Failed(text=f"{unsendable}", saves=False))
        told = await self.ranks.exchange_async(data, lambda: self._pass_on(name))
        heard = [from_bytes(one, drawn) for one in told]
        if not known and not self.ranks.rank:
            self.ranks.forget(name)
        return self._agree(heard, error, drawn, runner)

    # -- this rank's part

    async def _play_known(self, runner: RolloutRunner, drawn: Sequence[Task], policy: GroupPolicy) -> dict[int, Group]:
        places = range(self.ranks.rank, len(drawn), self.ranks.size)
        if self.leads:
            places = range(0 if self.ranks.rank else len(drawn))
        if not places:
            return {}
        groups = await runner.play_here([drawn[place] for place in places], policy)
        return dict(zip(places, groups, strict=True))

    async def _play_next(
        self, name: str, runner: RolloutRunner, drawn: Sequence[Task], policy: GroupPolicy
    ) -> dict[int, Group]:
        found: dict[int, Group] = {}

        async def play_on() -> None:
            while (place := self.ranks.claim(name)) < len(drawn):
                found[place] = await runner.play_group(drawn[place], policy)

        # No more than a fair share at once: what is left is for whoever is quick.
        at_once = min(policy.max_groups or runner.max_groups, -(-len(drawn) // self.ranks.size))
        await gather_or_cancel([play_on() for _ in range(at_once)])
        return found

    async def _until_done_or_stopped(
        self, playing: asyncio.Future[dict[int, Group]], name: str
    ) -> tuple[Answer, BaseException | None]:
        """This rank's answer, and its error."""
        stop = f"{name}/{_STOP}"
        try:
            while not playing.done():
                await asyncio.wait({playing}, timeout=POLL_SECONDS)
                number = self.arrived()
                if number is not None or any(self.ranks.heard(word) is not None for word in (stop, FAILED)):
                    break
        finally:
            playing.cancel()  # nothing happens where it is done
            await asyncio.gather(playing, return_exceptions=True)
        error = None if playing.cancelled() else playing.exception()
        if error is not None:
            self.ranks.say(stop, "")
            text = f"{type(error).__name__}: {error}"
            return Failed(text=text, saves=isinstance(error, SAVING)), error
        self._pass_on(name)
        number = self.arrived()
        if number is not None:
            return Stopped(signal=number), None
        if not playing.cancelled():
            return Played(groups=playing.result()), None
        said = self.ranks.heard(stop)  # by a rank that may have told of its groups before its signal came
        return (Stopped(signal=int(said)) if said else Played(groups={})), None

    def _pass_on(self, name: str) -> None:
        """A signal to this process stops the others, also where this one has played its part and waits for theirs."""
        number = self.arrived()
        stop = f"{name}/{_STOP}"
        if number is not None and self.ranks.heard(stop) is None:
            self.ranks.say(stop, str(int(number)))

    # -- all ranks

    def _agree(
        self,
        heard: Sequence[Word],
        error: BaseException | None,
        drawn: Sequence[Task],
        runner: RolloutRunner,
    ) -> list[Group]:
        failed = [(rank, one) for rank, one in enumerate(heard) if isinstance(one, Failed)]
        if failed:
            rank, first = failed[0]
            # All save, or none: a checkpoint is made by all ranks.
            self.failed, saves = True, all(one.saves for _, one in failed)
            kind = RankStopped if saves else RankFailed
            if error is not None and isinstance(error, SAVING) == saves:
                raise error
            raise kind(f"rank {rank} failed: {first.text}") from error
        for one in heard:
            if isinstance(one, Stopped):
                raise StoppedTogether(one.signal)
        groups: dict[int, Group] = {}
        for rank, one in enumerate(heard):
            if isinstance(one, Played):
                for place, group in one.groups.items():
                    if place in groups:
                        raise AssertionError(f"group {place} of a wave was played twice")
                    groups[place] = group
                    if rank != self.ranks.rank:
                        runner.take_in(group)
        return [groups[place] for place in range(len(drawn))]

    def report(self, own: ActivityReport) -> ActivityReport:
        """``Waves.report``: this rank's phases, with tokens and episodes' seconds of all ranks."""
        heard = [from_bytes(one) for one in self.ranks.exchange(to_bytes(Reported(report=own)))]
        reports = [one.report for one in heard if isinstance(one, Reported)]
        return ActivityReport(
            seconds=own.seconds,
            episode_seconds={kind: sum(one.episode_seconds[kind] for one in reports) for kind in own.episode_seconds},
            forwarded_tokens=sum(one.forwarded_tokens for one in reports),
        )
