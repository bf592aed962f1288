"""Statistics of paired timings: medians of ratios with their spread, and straight-line fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median and range of some measurements.

    Example:
        >>> Spread.of([3.0, 1.0, 2.0])
        Spread(median=2.0, low=1.0, high=3.0)
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """
        Raises:
            ValueError: there are none.
        """
        if not values:
            raise ValueError("a spread needs at least one measurement, got none")
        return cls(median=median(values), low=min(values), high=max(values))

    def text(self, digits: int = 2) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def paired_ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Theirs over ours, pair by pair: above 1, we are faster. Pairs were measured next to each other, so that what the
    machine does slowly cancels.

    Example:
        >>> paired_ratios([1.0, 2.0, 1.0], [4.0, 6.0, 2.0])
        Spread(median=3.0, low=2.0, high=4.0)
    """
    return Spread.of([b / a for a, b in zip(ours, theirs, strict=True)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """``y = offset + slope * x`` by least squares; ``explained`` is R^2."""

    offset: float
    slope: float
    explained: float


def fit_line(x: Sequence[float], y: Sequence[float]) -> Line:
    """The least-squares line through the points.

    Raises:
        ValueError: fewer than two different ``x``.

    Example:
        >>> fit_line([1, 2, 3], [3, 5, 7])
        Line(offset=1.0, slope=2.0, explained=1.0)
    """
    if len(set(x)) < 2:
        raise ValueError(f"a line needs two different x, got {list(x)}")
    mean_x, mean_y = fmean(x), fmean(y)
    square = sum((one - mean_x) ** 2 for one in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / square
    offset = mean_y - slope * mean_x
    total = sum((one - mean_y) ** 2 for one in y)
    rest = sum((b - offset - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    return Line(offset=offset, slope=slope, explained=1.0 - rest / total if total else 1.0)


def fit_power(x: Sequence[float], y: Sequence[float]) -> float:
    """The exponent ``p`` of ``y = c * x^p``: 1 grows linearly, 2 with the square.

    Example:
        >>> round(fit_power([1, 2, 4], [3, 12, 48]), 6)
        2.0
    """
    return fit_line([math.log(one) for one in x], [math.log(one) for one in y]).slope
