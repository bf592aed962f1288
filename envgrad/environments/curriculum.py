"""A mixture whose shares follow the learning signal: groups whose siblings earn different rewards.

::

    shares --draw--> Task ... Group --observe--> signal of its environment --> shares of the next draws

A group in which all siblings earn the same teaches nothing to an algorithm that compares siblings; the more their
rewards vary, the more there is to compare. For rewards of 0 and 1 the variance is ``p (1 - p)``, the "learnability" of
a task that is solved with probability ``p`` (Rutherford et al., "No Regrets", arXiv:2408.15099): it is largest for
tasks that are solved half of the time, and 0 for those that are always or never solved.

It acts between environments. Inside a finite environment each epoch stays a permutation of its tasks: skipping tasks
would break the promise that an epoch visits each of them once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import pvariance
from typing import TYPE_CHECKING

from envgrad.environments.sources import (
    Draw,
    EnvironmentTasks,
    State,
    check_same,
    exact_weight,
    read_integer,
    read_mapping,
    read_number,
)
from envgrad.errors import ConfigurationError
from envgrad.types import Group

if TYPE_CHECKING:
    from envgrad.environments.spec import EnvironmentSpec

MILLION = 1_000_000
"""Shares are whole millionths, so that what is owed to each environment is exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumOptions:
    """How shares follow the signal.

    Raises:
        ConfigurationError: a value out of range.
    """

    min_share: float = 0.05
    """the least share of each environment, above 0: one that teaches nothing now may do so later"""
    decay: float = 0.9
    """weight of what was known before each new group; 0.9 remembers about ten groups"""

    def __post_init__(self) -> None:
        if not 0.0 < self.min_share < 1.0:
            raise ConfigurationError(
                f"curriculum_min_share={self.min_share!r} must be above 0 and below 1: an environment that is never "
                "drawn can never show that it has become worth drawing"
            )
        if not 0.0 <= self.decay < 1.0:
            raise ConfigurationError(f"curriculum_decay={self.decay!r} must be at least 0 and below 1; 0.9 is usual")


@dataclass(slots=True)
class Signal:
    """A running estimate of one environment's reward variance inside groups, between 0 and 1.

    A group's variance is divided by the largest that rewards in the range seen so far could have, a quarter of the
    range squared; so environments that pay 0 to 1 and 0 to 100 can be compared. It starts at 1: every environment is
    tried before it is judged.

    Example:
        >>> signal = Signal()
        >>> signal.observe([0.0, 1.0], decay=0.5); signal.value         # half of them solved it: the most there is
        1.0
        >>> signal.observe([1.0, 1.0], decay=0.5); signal.value         # nothing to compare
        0.5
    """

    value: float = 1.0
    low: float | None = None
    high: float | None = None
    """the least and the greatest reward seen; None before the first group"""

    def observe(self, rewards: Sequence[float], decay: float) -> None:
        """Take in one group's scored rewards; fewer than two say nothing."""
        if len(rewards) < 2:
            return
        self.low = min(rewards) if self.low is None else min(self.low, *rewards)
        self.high = max(rewards) if self.high is None else max(self.high, *rewards)
        low, half = self.low / 2, self.high / 2 - self.low / 2
        # Halved, and scaled before it is squared: rewards may be as large as floats go.
        found = 4 * pvariance([(reward / 2 - low) / half for reward in rewards]) if half > 0 else 0.0
        self.value = decay * self.value + (1 - decay) * min(1.0, found)


class Curriculum:
    """Shares of several environments, moved towards those with signal.

    An environment's share is in proportion to ``weight * signal``, and at least ``min_share``. With equal signals (at
    the beginning, or where nothing teaches) the shares are the weights. Shares are whole millionths.

    Raises:
        ConfigurationError: the least shares add up to more than 1.

    Example:
        >>> curriculum = Curriculum({"easy": Fraction(1, 2), "fair": Fraction(1, 2)}, CurriculumOptions(decay=0.0))
        >>> curriculum.shares
        {'easy': 0.5, 'fair': 0.5}
        >>> curriculum.signals["easy"].observe([1.0, 1.0], decay=0.0)
        >>> curriculum.update(); curriculum.shares
        {'easy': 0.05, 'fair': 0.95}
    """

    def __init__(self, weights: Mapping[str, Fraction], options: CurriculumOptions) -> None:
        self.options = options
        self.signals = {name: Signal() for name in weights}
        self.millionths: dict[str, int] = {}
        self._weights = dict(weights)
        self._least = math.ceil(Fraction(repr(options.min_share)) * MILLION)
        if self._least * len(weights) > MILLION:
            raise ConfigurationError(
                f"curriculum_min_share={options.min_share!r} for {len(weights)} environments is more than there is to "
                f"share; it must be at most {1 / len(weights):.6g}"
            )
        self.update()

    @property
    def shares(self) -> dict[str, float]:
        """The shares of now; they add up to 1."""
        return {name: share / MILLION for name, share in self.millionths.items()}

    def observe(self, groups: Sequence[Group]) -> None:
        """Take in what was played, in the order given, and set the shares anew."""
        for group in groups:
            self.signals[group.task.environment].observe(group.scored_rewards, self.options.decay)
        self.update()

    def update(self) -> None:
        """Set the shares by the signals of now."""
        pull = {name: self._weights[name] * Fraction(signal.value) for name, signal in self.signals.items()}
        if not any(pull.values()):
            pull = self._weights
        exact = _at_least(pull, self._least)
        whole = {name: math.floor(share) for name, share in exact.items()}
        # What rounding down left over goes to the largest remainders.
        missing = MILLION - sum(whole.values())
        for name in sorted(exact, key=lambda name: whole[name] - exact[name])[:missing]:
            whole[name] += 1
        self.millionths = whole

    def state_dict(self) -> State:
        return {
            name: {"value": signal.value, "low": signal.low, "high": signal.high}
            for name, signal in self.signals.items()
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        for name, signal in self.signals.items():
            own = read_mapping(state, name)
            signal.value = read_number(own, "value")
            signal.low = None if own.get("low") is None else read_number(own, "low")
            signal.high = None if own.get("high") is None else read_number(own, "high")
        self.update()


def _at_least(pull: Mapping[str, Fraction], least: int) -> dict[str, Fraction]:
    """``MILLION`` shared out in proportion to ``pull``, where nobody gets less than ``least``."""
    lifted: set[str] = set()
    while True:
        rest = MILLION - least * len(lifted)
        total = sum(part for name, part in pull.items() if name not in lifted)
        shares = {name: Fraction(least) if name in lifted else rest * part / total for name, part in pull.items()}
        below = {name for name, share in shares.items() if share < least}
        if not below:
            return shares
        lifted |= below


class CurriculumTasks:
    """Tasks of several environments whose shares a curriculum moves.

    Every draw adds each environment's share of now to what it is owed, and goes to the one that is owed most (ties by
    order), which pays 1. However the shares move, after any number of draws

        ``-1  <  owed - drawn  <=  H_k - 1,    H_k = 1 + 1/2 + ... + 1/k``    for k environments,

    where ``owed`` is the sum of its shares at each draw. (The most that the ``j`` most owed are owed on average grows
    is at most ``1 / (j + 1)`` above that of the ``j + 1`` most owed, and all together are owed 0.) So over a stretch of
    ``n`` draws with fixed shares the count is within ``H_k`` of ``n * share``, and an environment is drawn more than
    ``n * min_share - H_k`` times in any ``n`` draws in a row.

    There is no pass over the mixture, since how many draws it would take is not known: ``max_steps`` ends the run.

    Example:
        >>> from envgrad.environments.contract import inspect_environment
        >>> class Echo:
        ...     def reset(self): return "Say something."
        >>> specs = [inspect_environment(name, Echo)[0] for name in "ab"]
        >>> tasks = CurriculumTasks(specs, [3.0, 1.0], CurriculumOptions(min_share=0.01), seed=0, split="train")
        >>> "".join(tasks.draw().environment for _ in range(8))
        'aabaaaba'
    """

    def __init__(
        self,
        specs: Sequence[EnvironmentSpec],
        weights: Sequence[float],
        options: CurriculumOptions,
        *,
        seed: int,
        split: str,
        shuffle: bool = True,
    ) -> None:
        exact = {spec.name: exact_weight(spec.name, weight) for spec, weight in zip(specs, weights, strict=True)}
        total = sum(exact.values())
        self._weights = {name: weight / total for name, weight in exact.items()}
        self.curriculum = Curriculum(self._weights, options)
        self._members = {
            spec.name: EnvironmentTasks(spec, seed=seed, split=split, shuffle=shuffle) for spec in specs
        }  # fmt: skip
        self._owed = dict.fromkeys(self._members, 0)
        """in millionths of a draw, less what was drawn; adds up to 0"""

    @property
    def epoch_length(self) -> None:
        """Unknown: it depends on how the shares will move."""
        return None

    @property
    def passes(self) -> float:
        return 0.0

    def draw(self) -> Draw:
        for name, share in self.curriculum.millionths.items():
            self._owed[name] += share
        chosen = max(self._owed, key=lambda name: self._owed[name])
        self._owed[chosen] -= MILLION
        return self._members[chosen].draw()

    def state_dict(self) -> State:
        options = self.curriculum.options
        return {
            "weights": {name: str(weight) for name, weight in self._weights.items()},
            "options": {"min_share": options.min_share, "decay": options.decay},
            "environments": {name: member.state_dict() for name, member in self._members.items()},
            "owed": dict(self._owed),
            "signals": self.curriculum.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        own = self.state_dict()
        check_same(state, "weights", own["weights"], "the environments and their weights")
        check_same(state, "options", own["options"], "curriculum_min_share and curriculum_decay")
        environments, owed = read_mapping(state, "environments"), read_mapping(state, "owed")
        for name, member in self._members.items():
            member.load_state_dict(read_mapping(environments, name))
            self._owed[name] = read_integer(owed, name)
        self.curriculum.load_state_dict(read_mapping(state, "signals"))
