"""Reward sources beside the environment: reward functions and reward models, as the rollout sees them.

Scored group by group, while the siblings' environments are still there. Consumes a group's episodes, produces one
reward (or None) per episode and source; ``envgrad.rewards`` makes the sources.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from envgrad.environments.boundary import WorkerPool
from envgrad.errors import ConfigurationError
from envgrad.rollout.finite import check_scored, total_or_infinite
from envgrad.rollout.loop import gather_or_cancel
from envgrad.types import Episode


@dataclass(slots=True)
class RewardLog:
    """What reward functions logged while one group was scored."""

    metrics: dict[str, list[float]] = field(default_factory=dict)
    extras: dict[str, list[Any]] = field(default_factory=dict)
    """column -> one value per episode"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardBatch:
    """One group's finished episodes in sibling order (failed siblings are not among them)."""

    episodes: tuple[Episode, ...]
    environments: tuple[object, ...] | None
    """the episodes' live instances, in the same order; None where no environment was given"""
    log: RewardLog
    workers: WorkerPool
    """runs sync functions; see ``environments.boundary.call_user``"""
    timeout: float | None
    """seconds that one source may take: ``reward_timeout``"""


class RewardSource(Protocol):
    """Scores a group's episodes."""

    @property
    def name(self) -> str:
        """The component's name: ``rewards/<name>/mean``."""
        ...

    async def score(self, batch: RewardBatch) -> list[float | None]:
        """One finite reward per episode; None where the source does not apply.

        Raises:
            RewardFailure: it raised; RewardTimeout: it took longer than ``batch.timeout``.
            ConfigurationError: it returned a wrong number of rewards, or something that is no reward; ends the run.
        """
        ...


@dataclass(frozen=True, slots=True)
class RewardWeights:
    """The weight of each reward component by name; 1 where none is given.

    Example:
        >>> RewardWeights({"style": 0.5}).total({"Game": 1.0, "style": 2.0, "format": None})
        2.0
        >>> RewardWeights().total({"format": None}) is None
        True
    """

    by_name: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, weight in self.by_name.items():
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
                raise ConfigurationError(f"the reward weight of {name!r} is {weight!r}; it must be a finite number")

    def of(self, name: str) -> float:
        return self.by_name.get(name, 1.0)

    def total(self, rewards: Mapping[str, float | None]) -> float | None:
        """The weighted sum of the components that apply; None if none does."""
        parts = [self.of(name) * value for name, value in rewards.items() if value is not None]
        return total_or_infinite(parts) if parts else None


def check_count(rewards: Sequence[object], episodes: Sequence[Episode], name: str) -> None:
    """
    Raises:
        ConfigurationError: not one reward per episode; names the function and both counts.
    """
    if len(rewards) != len(episodes):
        raise ConfigurationError(
            f"reward function {name!r} returned {len(rewards)} rewards for {len(episodes)} completions; it must return "
            "a list with one number (or None) for each"
        )


def add_component(rewards: Mapping[str, float | None], name: str, value: float | None) -> dict[str, float | None]:
    """``rewards`` with one component more; one that has the name already is added to, never replaced.

    Example:
        >>> add_component({"turns": 1.0}, "turns", 0.5), add_component({"turns": 1.0}, "style", None)
        ({'turns': 1.5}, {'turns': 1.0, 'style': None})
    """
    there = rewards.get(name)
    both = there if value is None else value if there is None else there + value
    return {**rewards, name: both}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A group's episodes with all their rewards, and what was logged on the way."""

    episodes: tuple[Episode, ...]
    metrics: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


async def score_group(batch: RewardBatch, sources: Sequence[RewardSource], weights: RewardWeights) -> Scored:
    """Add each source's component to the episodes and make ``reward`` the weighted sum of all components.

    An episode that its environment cannot score stays unscorable, whatever the sources say. One to which no source
    applies, and whose environment paid nothing, is unscorable too.

    Raises:
        RewardFailure, RewardTimeout: a source failed, or a sum is not finite; the group has no reward.
        ConfigurationError: a source returned what is no list of rewards, or has the name of an environment's
            component; ends the run.
    """
    if not batch.episodes or not (sources or weights.by_name):
        return Scored(episodes=batch.episodes)
    began = time.perf_counter()
    columns = await gather_or_cancel([source.score(batch) for source in sources])
    seconds = time.perf_counter() - began
    scored = []
    for index, episode in enumerate(batch.episodes):
        rewards: Mapping[str, float | None] = episode.rewards
        for source in sources:
            if source.name in rewards:
                raise ConfigurationError(
                    f"{episode.task.environment} names a component of its reward {source.name!r}, as a reward function "
                    "is called, so their rewards could not be told apart; rename one of them"
                )
        for source, column in zip(sources, columns, strict=True):
            rewards = add_component(rewards, source.name, column[index])
        total = episode.reward
        if total is not None and rewards:
            total = weights.total(rewards)
        extras = {name: values[index] for name, values in batch.log.extras.items()}
        scored.append(
            replace(
                episode,
                reward=total,
                rewards=rewards,
                extras={**episode.extras, **extras},
                seconds={**episode.seconds, "reward": episode.seconds.get("reward", 0.0) + seconds},
            )
        )
    check_scored(scored)
    return Scored(episodes=tuple(scored), metrics={name: tuple(values) for name, values in batch.log.metrics.items()})
