"""Where the step stream's rounds come from: played while the trainer waits, or taken from what goes on beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from envgrad.algorithms.base import Algorithm
from envgrad.environments.sources import State
from envgrad.environments.tasks import TaskStream
from envgrad.errors import TooManyFailures
from envgrad.rollout.group import GroupPolicy
from envgrad.rollout.runner import DynamicSampling, RolloutRunner, Round
from envgrad.training.phases import Laps
from envgrad.types import Group


class RoundSource(Protocol):
    """Gives rounds of groups, of the weights of now or of few publishes ago."""

    def next(self, laps: Laps) -> Round:
        """Publish the weights of now, and give the next round; one without groups is the end.

        Raises:
            TooManyFailures: too many groups in a row were dropped.
        """
        ...

    def state_dict(self) -> State:
        """The tasks' position, from which a resumed run draws what was not given out yet."""
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

    def next(self, laps: Laps) -> Round:
        """``RoundSource.next``."""
        plan = self._plan
        plan.publish()
        laps.lap("publish")
        before = plan.tasks.state_dict()
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

    def state_dict(self) -> State:
        """``RoundSource.state_dict``."""
        return self._plan.tasks.state_dict()

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
        return any(any(sample.advantages) for sample in algorithm.credit([group]))

    return decide
