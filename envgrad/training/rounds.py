"""Where the step stream's rounds come from: played while the trainer waits, or taken from what goes on beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from envgrad.algorithms.base import Algorithm
from envgrad.algorithms.credit import with_parts
from envgrad.environments.sources import State, read_count
from envgrad.environments.tasks import TaskStream
from envgrad.errors import ConfigurationError, TooManyFailures
from envgrad.rollout.group import GroupPolicy
from envgrad.rollout.runner import DynamicSampling, RolloutRunner, Round
from envgrad.training.buffer import Unconsumed
from envgrad.training.phases import Laps
from envgrad.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsState:
    """Where a source of rounds stands."""

    tasks: State
    """the stream's position; tasks in play are drawn again"""
    unconsumed: Unconsumed | None = None
    """groups that were played and given to no round"""
    draws: Mapping[int, State] = field(default_factory=dict)
    """what draws their tasks again, by position"""

    def drawn_again(self, positions: Collection[int] | None = None) -> State:
        """``tasks`` where those at ``positions`` (None: of all groups that wait) are drawn again, as if not played."""
        if positions is None:
            waiting = () if self.unconsumed is None else self.unconsumed.waiting
            positions = [one.group.task.position for one in waiting]
        if not positions:
            return self.tasks
        before = self.tasks.get("again", [])
        if not isinstance(before, list):
            raise ConfigurationError(f"the state's 'again' is {before!r}; it must be a list of states")
        again = [*before, *(self.draws[position] for position in positions)]
        return {**self.tasks, "again": sorted(again, key=lambda state: read_count(state, "position"))}


class RoundSource(Protocol):
    """Gives rounds of groups, of the weights of now or of few publishes ago."""

    def next(self, laps: Laps) -> Round:
        """Publish the weights of now, and give the next round; one without groups is the end.

        Raises:
            TooManyFailures: too many groups in a row were dropped.
        """
        ...

    def keep(self) -> None:
        """The last round is in hand now, all of it; until then ``state`` is the one before it."""
        ...

    def settled(self) -> contextlib.AbstractContextManager[None]:
        """Within it weights may change for something else than a round: where no episode may span versions, those in
        play have ended, and none starts."""
        ...

    def state(self) -> RoundsState:
        """From where a resumed run goes on: what was not given out yet, and a round that is not in hand."""
        ...

    def restore(self, state: RoundsState) -> None:
        """Go on from ``state``, before the first round.

        Raises:
            ConfigurationError: it is of other tasks.
        """
        ...

    @property
    def unused(self) -> int:
        """Tasks that were drawn and are in no round yet."""
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """What the last round's source tells of itself."""
        ...

    def close(self) -> None:
        """End what goes on. Safe to call twice."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """What a round is, whoever plays it."""

    tasks: TaskStream
    runner: RolloutRunner
    policy: GroupPolicy
    groups: int
    """groups of a whole round"""
    publish: Callable[[], int]
    """lets the sampler serve the weights of now; returns their version"""
    group_limit: int | None = None
    """tasks drawn in the whole run, where epochs bound it"""
    dynamic: DynamicSampling | None = None

    @property
    def draws_left(self) -> int | None:
        """Tasks that may still be drawn; None: no bound."""
        return None if self.group_limit is None else max(0, self.group_limit - self.tasks.position)


class InlineRounds:
    """Plays a round when it is asked for; the caller waits. Nothing is older than the weights of now."""

    def __init__(self, plan: RoundPlan) -> None:
        self._plan = plan
        self._before: State | None = None
        """the tasks' position before a round that is not in hand"""

    def next(self, laps: Laps) -> Round:
        """``RoundSource.next``."""
        plan = self._plan
        before = self._before = plan.tasks.state_dict()
        plan.publish()
        laps.lap("publish")
        try:
            played = self._play()
        except TooManyFailures:
            plan.tasks.load_state_dict(before)  # a checkpoint saved now, and resumed, plays this round anew
            raise
        plan.tasks.observe(played.scored)
        if played.groups:
            laps.split(played.activity.seconds, rest="idle")
        return played

    def _play(self) -> Round:
        plan, left = self._plan, self._plan.draws_left
        if left is None:
            return plan.runner.play(plan.tasks, plan.groups, plan.policy, dynamic=plan.dynamic)
        if not left:
            return Round(groups=())
        return plan.runner.play(plan.tasks, min(plan.groups, left), plan.policy, left, plan.dynamic)

    def keep(self) -> None:
        """``RoundSource.keep``."""
        self._before = None

    def settled(self) -> contextlib.AbstractContextManager[None]:
        """``RoundSource.settled``: nothing is in play between rounds."""
        return contextlib.nullcontext()

    def state(self) -> RoundsState:
        """``RoundSource.state``."""
        return RoundsState(tasks=self._plan.tasks.state_dict() if self._before is None else self._before)

    def restore(self, state: RoundsState) -> None:
        """``RoundSource.restore``; groups that an asynchronous run had finished are played anew."""
        self._plan.tasks.load_state_dict(state.drawn_again())

    @property
    def unused(self) -> int:
        """None is drawn ahead."""
        return 0

    @property
    def metrics(self) -> Mapping[str, float]:
        """None."""
        return {}

    def close(self) -> None:
        """Nothing goes on between rounds."""


def teaches(algorithm: Algorithm) -> Callable[[Group], bool]:
    """Whether ``algorithm`` gives an advantage to anything in a group: in GRPO, whether its rewards vary.

    Where the credit reads the reference's log-probs, or a teacher is asked later, the rewards decide.
    """

    def decide(group: Group) -> bool:
        if algorithm.credit_reads_reference or algorithm.teacher is not None:
            return len(set(group.scored_rewards)) > 1
        return any(any(sample.advantages) for sample in algorithm.credit(with_parts([group])))

    return decide
