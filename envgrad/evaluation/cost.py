"""What an evaluation took: tokens, seconds, and money where prices are known."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from envgrad.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices per million tokens, in any currency; None where unknown.

    Example:
        >>> Prices(per_million_in=0.5, per_million_out=2.0).of(tokens_in=1_000_000, tokens_out=500_000)
        1.5
        >>> Prices().of(tokens_in=1, tokens_out=1) is None
        True

    Raises:
        ConfigurationError: a negative price.
    """

    per_million_in: float | None = None
    per_million_out: float | None = None

    def __post_init__(self) -> None:
        for flag, value in (("price-in", self.per_million_in), ("price-out", self.per_million_out)):
            if value is not None and not 0 <= value < math.inf:
                raise ConfigurationError(f"--{flag} {value} must be at least 0: the price of a million tokens")

    def of(self, *, tokens_in: int, tokens_out: int) -> float | None:
        """The price of these tokens; a side without a price costs nothing, and without any price there is none."""
        if self.per_million_in is None and self.per_million_out is None:
            return None
        return (tokens_in * (self.per_million_in or 0.0) + tokens_out * (self.per_million_out or 0.0)) / 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What was read and written. An endpoint reads the whole chat again each turn, failed episodes' too; a model in
    this process reads each token of a finished episode once."""

    tokens_in: int
    tokens_out: int
    seconds: float
    estimated: bool = False
    """whether the server left tokens uncounted, so that ours are an estimate"""
    requests: int | None = None
    retries: int | None = None
    prices: Prices = field(default_factory=Prices)

    @property
    def price(self) -> float | None:
        return self.prices.of(tokens_in=self.tokens_in, tokens_out=self.tokens_out)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "tokens_in": self.tokens_in,
            "tokens_out": self.tokens_out,
            "tokens_estimated": self.estimated,
            "seconds": round(self.seconds, 3),
            "requests": self.requests,
            "retries": self.retries,
            "price": self.price,
        }
