from __future__ import annotations

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envgrad.advantages import ScaleRewards, gdpo_advantages, grpo_advantages, rloo_advantages
from envgrad.errors import ConfigurationError

REWARD = st.one_of(
    st.none(), st.just(math.nan), st.floats(-1e3, 1e3, allow_nan=False).map(lambda value: round(value, 3))
)
GROUP = st.lists(REWARD, max_size=6)
GROUPS = st.lists(GROUP, max_size=4)
SCALES: list[ScaleRewards] = ["group", "batch", "none"]
SCALE = st.sampled_from(SCALES)


def is_scored(reward: float | None) -> bool:
    return reward is not None and not math.isnan(reward)


def test_group_scale_by_hand() -> None:
    # mean 1, squared deviations 1 0 1 -> variance 2/2 = 1
    assert grpo_advantages([[0.0, 1.0, 2.0]], "group", eps=0.0) == [[-1.0, 0.0, 1.0]]
    # the default eps is 1e-4: 1 / (1 + 1e-4)
    assert grpo_advantages([[0.0, 1.0, 2.0]])[0][2] == pytest.approx(1 / 1.0001, abs=1e-12)


def test_batch_scale_by_hand() -> None:
    # all rewards 0 2 0 4: mean 1.5, squared deviations 2.25 0.25 2.25 6.25 = 11, variance 11/3
    std = math.sqrt(11 / 3)
    assert grpo_advantages([[0.0, 2.0], [0.0, 4.0]], "batch", eps=0.0) == [
        pytest.approx([-1 / std, 1 / std]),
        pytest.approx([-2 / std, 2 / std]),
    ]


def test_none_scale_by_hand() -> None:
    assert grpo_advantages([[1.0, 0.0, 0.0, 1.0], [5.0, 8.0]], "none") == [[0.5, -0.5, -0.5, 0.5], [-1.5, 1.5]]


def test_unscorable_sibling_is_in_no_mean_and_no_deviation() -> None:
    # of 1, 0, 1: mean 2/3, variance (1/9 + 4/9 + 1/9) / 2 = 1/3; as a reward of 0 it would shift both
    std = math.sqrt(1 / 3)
    expected = [pytest.approx([1 / 3 / std, 0.0, -2 / 3 / std, 1 / 3 / std])]
    assert grpo_advantages([[1.0, None, 0.0, 1.0]], "group", eps=0.0) == expected
    assert grpo_advantages([[1.0, math.nan, 0.0, 1.0]], "batch", eps=0.0) == expected


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("group", [[], [None], [None, None], [3.0], [3.0, None], [0.1] * 7, [0.7] * 3 + [None]])
def test_nothing_to_compare_is_exactly_zero(group: list[float | None], scale: ScaleRewards) -> None:
    others = [0.0, 1.0]
    for advantages in (
        grpo_advantages([group, others], scale, eps=0.0)[0],
        grpo_advantages([group], scale, eps=0.0)[0],
        rloo_advantages([group, others])[0],
        rloo_advantages([group], normalize=True, eps=0.0)[0],
    ):
        assert advantages == [0.0] * len(group)


def test_rloo_by_hand() -> None:
    # 4 - (1 + 1) / 2 = 3; 1 - (4 + 1) / 2 = -1.5
    assert rloo_advantages([[4.0, 1.0, 1.0], [None, 2.0, 6.0]]) == [[3.0, -1.5, -1.5], [0.0, -4.0, 4.0]]


def test_rloo_normalised_by_hand() -> None:
    # advantages 3 -1.5 -1.5 -4 4 (the lone sibling of the last group takes no part): mean 0,
    # squares 9 + 2.25 + 2.25 + 16 + 16 = 45.5, variance 45.5 / 4
    std = math.sqrt(45.5 / 4)
    assert rloo_advantages([[4.0, 1.0, 1.0], [None, 2.0, 6.0], [9.0]], normalize=True, eps=0.0) == [
        pytest.approx([3 / std, -1.5 / std, -1.5 / std]),
        pytest.approx([0.0, -4 / std, 4 / std]),
        [0.0],
    ]


def test_gdpo_by_hand() -> None:
    # two siblings: each component normalises to +-1/sqrt(2) whatever its spread.
    # group 0: 2 * (a, -a) + 1 * (-a, a) = (a, -a); group 1: 2 * (a, -a) + (a, -a) = (3a, -3a), with a = 1/sqrt(2)
    # all sums: mean 0, squares 2 * 0.5 + 2 * 4.5 = 10, variance 10/3
    a, std = math.sqrt(0.5), math.sqrt(10 / 3)
    groups = [[[1.0, 0.0], [0.0, 100.0]], [[1.0, 0.0], [7.0, 6.0]]]
    assert gdpo_advantages(groups, [2.0, 1.0], eps=0.0) == [
        pytest.approx([a / std, -a / std]),
        pytest.approx([3 * a / std, -3 * a / std]),
    ]


def test_gdpo_missing_components() -> None:
    # component 1 applies to nobody else than sibling 0: it adds 0; sibling 2 has no component at all
    groups = [[[1.0, 0.0, None], [5.0, None, None]]]
    a = math.sqrt(0.5)
    assert gdpo_advantages(groups, [1.0, 1.0], eps=0.0) == [pytest.approx([a, -a, 0.0])]
    assert gdpo_advantages([*groups, [[3.0], [4.0]]], [1.0, 1.0], eps=0.0)[1] == [0.0]


@given(groups=GROUPS, scale=SCALE)
def test_advantages_of_a_group_sum_to_zero_and_rise_with_the_reward(
    groups: list[list[float | None]], scale: ScaleRewards
) -> None:
    for result in (grpo_advantages(groups, scale), rloo_advantages(groups)):
        for group, advantages in zip(groups, result, strict=True):
            assert len(advantages) == len(group)
            assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-6)
            pairs = [(r, a) for r, a in zip(group, advantages, strict=True) if r is not None and not math.isnan(r)]
            if len(pairs) > 1:
                ranked = sorted(pairs)
                assert all(x[1] <= y[1] + 1e-9 for x, y in itertools.pairwise(ranked))
            assert all(a == 0.0 for r, a in zip(group, advantages, strict=True) if not is_scored(r))


@given(groups=GROUPS, scale=SCALE, data=st.data())
def test_permuting_siblings_permutes_advantages(
    groups: list[list[float | None]], scale: ScaleRewards, data: st.DataObject
) -> None:
    orders = [data.draw(st.permutations(range(len(group)))) for group in groups]
    shuffled = [[group[i] for i in order] for group, order in zip(groups, orders, strict=True)]
    for function in (lambda g: grpo_advantages(g, scale), rloo_advantages, lambda g: rloo_advantages(g, True)):
        for order, before, after in zip(orders, function(groups), function(shuffled), strict=True):
            assert after == pytest.approx([before[i] for i in order], abs=1e-9)


@given(groups=st.lists(GROUP, min_size=1, max_size=4), scale=SCALE, data=st.data())
def test_adding_an_unscorable_sibling_changes_nobody(
    groups: list[list[float | None]], scale: ScaleRewards, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(groups[0])))
    longer = [[*groups[0][:at], data.draw(st.sampled_from([None, math.nan])), *groups[0][at:]], *groups[1:]]
    for function in (lambda g: grpo_advantages(g, scale), rloo_advantages, lambda g: rloo_advantages(g, True)):
        result = function(longer)
        assert result[0].pop(at) == 0.0
        assert result == function(groups)


@given(group=st.lists(st.floats(-100, 100).map(lambda value: round(value, 2)), min_size=2, max_size=8))
def test_against_independent_formulas(group: list[float]) -> None:
    mean, std = statistics.fmean(group), statistics.stdev(group)
    if std > 0.001:
        expected = [(r - mean) / (std + 1e-4) for r in group]
        assert grpo_advantages([group])[0] == pytest.approx(expected, abs=1e-9)
    scale = len(group) / (len(group) - 1)
    assert rloo_advantages([group])[0] == pytest.approx([scale * (r - mean) for r in group], abs=1e-9)


def test_errors_name_the_value_and_the_fix() -> None:
    with pytest.raises(ConfigurationError, match=r"scale_rewards='std'.*'group', 'batch', 'none'"):
        grpo_advantages([[1.0]], "std")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"eps=-1"):
        rloo_advantages([[1.0]], eps=-1)
    with pytest.raises(ConfigurationError, match=r"sibling 1 in group 1 is inf"):
        grpo_advantages([[0.0], [0.0, math.inf]])
    with pytest.raises(ConfigurationError, match=r"group 0 has 1 reward components, but there are 2 weights"):
        gdpo_advantages([[[1.0, 2.0]]], [1.0, 1.0])
    with pytest.raises(ConfigurationError, match=r"group 0 has components with \[1, 2\] rewards"):
        gdpo_advantages([[[1.0, 2.0], [1.0]]], [1.0, 1.0])
