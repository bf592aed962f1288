"""What is played and trained in a step: groups, turns, tokens and waits, as numbers or as distributions.

Draws are by place: the same task, sibling and turn always draw the same, in a simulation and in a measured run.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from statistics import NormalDist
from typing import Any

from envgrad.errors import ConfigurationError

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A log-normal quantity with this mean and coefficient of variation; without one it is a constant.

    Example:
        >>> Draw(mean=2.0).at("latency", 0, 0)
        2.0
        >>> wide = Draw(mean=2.0, cv=0.5)
        >>> wide.at("latency", 3, 1) == wide.at("latency", 3, 1) != wide.at("latency", 3, 2)
        True

    Raises:
        ConfigurationError: a negative mean or variation.
    """

    mean: float
    cv: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.mean < math.inf and 0 <= self.cv < math.inf):
            raise ConfigurationError(f"a mean of {self.mean} with variation {self.cv}: both must be at least 0")

    def at(self, *place: object) -> float:
        """The value drawn at ``place``."""
        if not self.cv or not self.mean:
            return self.mean
        variance = math.log1p(self.cv**2)
        digest = hashlib.blake2b("/".join(map(str, place)).encode(), digest_size=6).digest()
        draw = _NORMAL.inv_cdf((int.from_bytes(digest, "big") + 0.5) / 2**48)
        return self.mean * math.exp(math.sqrt(variance) * draw - variance / 2)

    def count_at(self, *place: object) -> int:
        """``at`` as a whole number, at least 1."""
        return max(1, round(self.at(*place)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One optimizer step, and how it is scheduled.

    Example: two groups of four episodes, each of three answers with two results between them.
        >>> load = Workload(groups=2, siblings=4, turns=Draw(mean=3), prompt_tokens=100, turn_tokens=Draw(mean=50),
        ...     result_tokens=20)
        >>> load.episodes, load.row_tokens, load.turn_plan(0, 0)
        (8, 290, (50, 50, 50))

    Raises:
        ConfigurationError: a count below 1, or a negative number of tokens or seconds.
    """

    groups: int
    siblings: int
    turns: Draw
    prompt_tokens: int
    turn_tokens: Draw
    """sampled in each answer"""
    result_tokens: int = 0
    """between two answers: the environment's result and what the template writes around it"""
    latency: Draw = field(default_factory=lambda: Draw(mean=0.0))
    """seconds that the environment takes after each answer"""
    reset_latency: Draw = field(default_factory=lambda: Draw(mean=0.0))
    concurrency: int | None = None
    """episodes that may be in play at once; None: as many as there are"""
    asynchronous: bool = False
    max_staleness: int = 1

    def __post_init__(self) -> None:
        for name, least in (("groups", 1), ("siblings", 1), ("prompt_tokens", 1), ("result_tokens", 0)):
            if getattr(self, name) < least:
                raise ConfigurationError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.turns.mean < 1 or self.turn_tokens.mean < 1:
            raise ConfigurationError(
                f"turns={self.turns.mean} and turn_tokens={self.turn_tokens.mean} must be at least 1"
            )
        if self.asynchronous and self.max_staleness < 1:
            raise ConfigurationError("an asynchronous step needs max_staleness of at least 1: with 0 nothing overlaps")
        if self.concurrency is not None and self.concurrency < self.siblings:
            raise ConfigurationError(
                f"concurrency={self.concurrency} must hold a whole group: at least siblings={self.siblings}"
            )

    @property
    def episodes(self) -> int:
        return self.groups * self.siblings

    @property
    def rounds_in_flight(self) -> int:
        """Rounds whose groups are in play or wait to be trained."""
        return self.max_staleness + 1 if self.asynchronous else 1

    @property
    def in_flight(self) -> int:
        """Episodes in play at once, at most: whole groups."""
        wanted = self.rounds_in_flight * self.groups
        if self.concurrency is not None:
            wanted = min(wanted, self.concurrency // self.siblings)
        return wanted * self.siblings

    @property
    def row_tokens(self) -> float:
        """A whole episode's mean row."""
        return self.prompt_tokens + self.turns.mean * self.turn_tokens.mean + (self.turns.mean - 1) * self.result_tokens

    @property
    def sampled_tokens(self) -> float:
        """Of a step."""
        return self.episodes * self.turns.mean * self.turn_tokens.mean

    @property
    def varies(self) -> bool:
        """Whether episodes differ."""
        return any(one.cv for one in (self.turns, self.turn_tokens, self.latency, self.reset_latency))

    def turn_plan(self, position: int, sibling: int) -> tuple[int, ...]:
        """The tokens of each answer of one episode."""
        turns = self.turns.count_at("turns", position, sibling)
        return tuple(self.turn_tokens.count_at("tokens", position, sibling, turn) for turn in range(turns))

    def row_length(self, plan: tuple[int, ...]) -> int:
        """The row of an episode with these answers."""
        return self.prompt_tokens + sum(plan) + (len(plan) - 1) * self.result_tokens

    def plans(self, round_number: int = 0) -> Iterator[list[tuple[int, ...]]]:
        """Of each group of a round, its episodes' answers."""
        for position in range(round_number * self.groups, (round_number + 1) * self.groups):
            yield [self.turn_plan(position, sibling) for sibling in range(self.siblings)]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Workload:
        """
        Example:
            >>> load = Workload(groups=2, siblings=4, turns=Draw(mean=3), prompt_tokens=9, turn_tokens=Draw(mean=5))
            >>> Workload.from_dict(load.as_dict()) == load
            True
        """
        drawn = {name: Draw(**data[name]) for name in ("turns", "turn_tokens", "latency", "reset_latency")}
        return cls(**{**data, **drawn})
