"""Pure estimates from repeated samples of several tasks.

Samples of one task are not independent: a hard task is hard for all of them. So tasks, not samples, are what an
interval counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

from envgrad.errors import ConfigurationError

_EXACT_UP_TO = 200
"""degrees of freedom for which Student's t is summed term by term; beyond, its expansion is as good"""


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that at least one of ``k`` samples succeeds, from ``n`` samples of which ``c`` succeeded.

    Unbiased: the share of the k-subsets of the samples that hold a success, ``1 - C(n - c, k) / C(n, k)`` (Chen et al.
    2021, https://arxiv.org/abs/2107.03374, eq. 1).

    Example:
        >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
        (0.25, 0.5, 1.0)

    Raises:
        ConfigurationError: ``k`` is not in ``1..n``, or ``c`` is not in ``0..n``.
    """
    if not 1 <= k <= n:
        raise ConfigurationError(f"pass@{k} from {n} samples: k must be at least 1 and at most the number of samples")
    if not 0 <= c <= n:
        raise ConfigurationError(f"{c} successes among {n} samples: the number of successes must be in 0..{n}")
    if n - c < k:
        return 1.0
    # C(n - c, k) / C(n, k), factor by factor: no factorial overflows.
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def pass_ks(n: int) -> tuple[int, ...]:
    """The ``k`` that are shown for ``n`` samples a task: powers of two, and ``n``.

    Example:
        >>> pass_ks(6), pass_ks(8), pass_ks(0)
        ((1, 2, 4, 6), (1, 2, 4, 8), ())
    """
    if n < 1:
        return ()
    return (*(1 << power for power in range((n - 1).bit_length())), n)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over samples, and how sure it is.

    Example:
        >>> estimate = clustered_mean([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
        >>> round(estimate.mean, 3), round(estimate.standard_error, 3), round(estimate.ci95, 3)
        (0.5, 0.289, 1.242)
    """

    mean: float
    standard_error: float
    """nan from fewer than two clusters"""
    ci95: float
    """half the width of the 95% confidence interval; nan from fewer than two clusters"""
    clusters: int


def clustered_mean(clusters: Sequence[Sequence[float]]) -> Estimate:
    """The mean over all samples, with a 95% confidence interval that counts clusters (tasks), not samples.

    With K clusters of n_j samples and residual sums ``e_j = sum_i (x_ij - mean)``, the standard error is
    ``sqrt(K / (K - 1) * sum_j e_j^2) / sum_j n_j``: the cluster-robust one (Miller 2024,
    https://arxiv.org/abs/2411.00640, on clustered errors; here with the small-sample factor). For clusters of one size
    it is the standard error of the K cluster means. The interval is ``mean +- t * standard_error``, with Student's t of
    K - 1 degrees of freedom; where all clusters have one mean its width is 0, which says no more than that.

    Raises:
        ConfigurationError: there is no sample, or an empty cluster.
    """
    if not clusters or not all(clusters):
        raise ConfigurationError("a mean over tasks needs at least one task, and at least one sample of each")
    count, total = len(clusters), sum(len(samples) for samples in clusters)
    mean = math.fsum(value for samples in clusters for value in samples) / total
    if count < 2:
        return Estimate(mean=mean, standard_error=math.nan, ci95=math.nan, clusters=count)
    squares = math.fsum(math.fsum(value - mean for value in samples) ** 2 for samples in clusters)
    error = math.sqrt(count / (count - 1) * squares) / total
    return Estimate(mean=mean, standard_error=error, ci95=t_quantile(0.975, count - 1) * error, clusters=count)


@cache
def t_quantile(probability: float, degrees: int) -> float:
    """The quantile of Student's t distribution, to nine digits.

    Up to 200 degrees of freedom by bisection of the distribution function, a finite sum (Abramowitz and Stegun 1964,
    26.7.3 and 26.7.4); beyond by the expansion around the normal quantile (26.7.5).

    Example:
        >>> [round(t_quantile(0.975, degrees), 4) for degrees in (1, 2, 10, 199, 1000)]
        [12.7062, 4.3027, 2.2281, 1.972, 1.9623]

    Raises:
        ConfigurationError: ``probability`` is not in [0.5, 1), or ``degrees`` is below 1.
    """
    if not 0.5 <= probability < 1 or degrees < 1:
        raise ConfigurationError(
            f"t_quantile({probability}, {degrees}): the probability must be in [0.5, 1), the degrees at least 1"
        )
    if degrees > _EXACT_UP_TO:
        return _t_expansion(NormalDist().inv_cdf(probability), degrees)
    # t = sqrt(degrees) * tan(angle): the angle is bounded, whatever the tail.
    low, high = 0.0, math.pi / 2
    for _ in range(100):
        angle = (low + high) / 2
        low, high = (angle, high) if _t_inside(angle, degrees) < 2 * probability - 1 else (low, angle)
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _t_inside(angle: float, degrees: int) -> float:
    """``P(|T| < sqrt(degrees) * tan(angle))``."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    terms = [term] if degrees > 1 else []
    for power in range(2 + odd, degrees - 1, 2):
        term *= cosine * cosine * (power - 1) / power
        terms.append(term)
    inside = sine * math.fsum(terms)
    return 2 / math.pi * (angle + inside) if odd else inside


def _t_expansion(x: float, degrees: int) -> float:
    terms = (
        x,
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return math.fsum(term / degrees**power for power, term in enumerate(terms))
