from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envgrad.errors import ConfigurationError
from envgrad.evaluation.estimates import clustered_mean, pass_at_k, pass_ks, t_quantile


@given(st.data())
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_success(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 8))
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    samples = [True] * c + [False] * (n - c)
    subsets = list(itertools.combinations(range(n), k))
    share = sum(any(samples[i] for i in subset) for subset in subsets) / len(subsets)
    assert pass_at_k(n, c, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_of_many_samples_does_not_overflow() -> None:
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5)
    assert pass_at_k(100_000, 0, 100_000) == 0.0
    assert pass_at_k(100_000, 60_000, 50_000) == 1.0


@pytest.mark.parametrize(("n", "c", "k"), [(4, 0, 0), (4, 0, 5), (4, 5, 1), (4, -1, 1), (0, 0, 1)])
def test_pass_at_k_refuses_what_has_no_value(n: int, c: int, k: int) -> None:
    with pytest.raises(ConfigurationError):
        pass_at_k(n, c, k)


@pytest.mark.parametrize(("n", "expected"), [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (16, (1, 2, 4, 8, 16))])
def test_ks_are_powers_of_two_and_n(n: int, expected: tuple[int, ...]) -> None:
    assert pass_ks(n) == expected


# Two-sided 95% and 99% points of Student's t from the usual printed tables.
@pytest.mark.parametrize(
    ("degrees", "p975", "p995"),
    [(1, 12.706, 63.657), (2, 4.303, 9.925), (3, 3.182, 5.841), (9, 2.262, 3.250), (30, 2.042, 2.750),
     (120, 1.980, 2.617), (10**6, 1.960, 2.576)],
)  # fmt: skip
def test_t_quantiles_are_those_of_the_tables(degrees: int, p975: float, p995: float) -> None:
    assert t_quantile(0.975, degrees) == pytest.approx(p975, abs=6e-4)
    assert t_quantile(0.995, degrees) == pytest.approx(p995, abs=6e-4)


def test_t_quantiles_go_on_smoothly_where_the_method_changes() -> None:
    step = t_quantile(0.975, 199) - t_quantile(0.975, 200)
    assert t_quantile(0.975, 200) - t_quantile(0.975, 201) == pytest.approx(step, rel=0.02)
    assert t_quantile(0.5, 7) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(("probability", "degrees"), [(0.4, 3), (1.0, 3), (0.9, 0)])
def test_t_quantiles_that_do_not_exist(probability: float, degrees: int) -> None:
    with pytest.raises(ConfigurationError, match="t_quantile"):
        t_quantile(probability, degrees)


def test_with_equal_samples_the_error_is_that_of_the_task_means() -> None:
    # Task means 0.5, 1, 0: standard deviation 0.5, over the square root of 3; t of 2 degrees of freedom is 4.3027.
    estimate = clustered_mean([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    assert estimate.mean == 0.5
    assert estimate.standard_error == pytest.approx(0.5 / math.sqrt(3))
    assert estimate.ci95 == pytest.approx(4.302653 * 0.5 / math.sqrt(3), rel=1e-6)


def test_with_unequal_samples_each_sample_counts_once() -> None:
    # Mean 3/4; residual sums -0.75 and 0.75: sqrt(2 / 1 * (0.5625 + 0.5625)) / 4.
    estimate = clustered_mean([[0.0], [1.0, 1.0, 1.0]])
    assert estimate.mean == 0.75
    assert estimate.standard_error == pytest.approx(1.5 / 4)


def test_copies_of_a_sample_make_nothing_surer() -> None:
    rewards = [0.0, 0.3, 1.0, 0.7]
    one = clustered_mean([[reward] for reward in rewards])
    many = clustered_mean([[reward] * 50 for reward in rewards])
    assert many.ci95 == pytest.approx(one.ci95)


def test_one_task_has_no_interval() -> None:
    estimate = clustered_mean([[0.0, 1.0]])
    assert estimate.mean == 0.5
    assert math.isnan(estimate.ci95) and math.isnan(estimate.standard_error)


@pytest.mark.parametrize("clusters", [[], [[]], [[1.0], []]])
def test_nothing_has_no_mean(clusters: list[list[float]]) -> None:
    with pytest.raises(ConfigurationError, match="at least one"):
        clustered_mean(clusters)


@settings(max_examples=50)
@given(st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=4), min_size=2, max_size=6), st.floats(-3, 3))
def test_shifting_rewards_moves_the_mean_and_nothing_else(clusters: list[list[float]], by: float) -> None:
    before, after = clustered_mean(clusters), clustered_mean([[x + by for x in samples] for samples in clusters])
    assert after.mean == pytest.approx(before.mean + by, abs=1e-9)
    assert after.standard_error == pytest.approx(before.standard_error, abs=1e-9)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Tasks of very different difficulty, 8 samples each: about 95 of 100 intervals hold the true mean of 1/2."""
    draw = random.Random(0)
    held = naive = 0
    rounds = 600
    for _ in range(rounds):
        difficulties = [draw.choice((0.05, 0.95)) for _ in range(20)]
        clusters = [[float(draw.random() < chance) for _ in range(8)] for chance in difficulties]
        estimate = clustered_mean(clusters)
        held += abs(estimate.mean - 0.5) <= estimate.ci95
        alone = clustered_mean([[value] for samples in clusters for value in samples])
        naive += abs(alone.mean - 0.5) <= alone.ci95
    assert 0.92 <= held / rounds <= 0.98
    assert naive / rounds < 0.75  # counting samples as if they were independent claims far too much
