from __future__ import annotations

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envgrad.advantages import (
    ScaleRewards,
    gdpo_advantages,
    grpo_advantages,
    rloo_advantages,
    turn_advantages,
    turn_returns,
)
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


def test_batch_baseline_by_hand() -> None:
    # all scored rewards 1 1 0 2 1 (one sibling unscorable): mean 1, squared deviations 0 0 1 1 0, variance 2/4
    groups = [[1.0, 1.0], [0.0, 2.0, None], [1.0]]
    std = math.sqrt(0.5)
    assert grpo_advantages(groups, "none", baseline="batch") == [[0.0, 0.0], [-1.0, 1.0, 0.0], [0.0]]
    assert grpo_advantages(groups, "batch", eps=0.0, baseline="batch") == [
        [0.0, 0.0], pytest.approx([-1 / std, 1 / std, 0.0]), [0.0],
    ]  # fmt: skip
    # leave one out of 3 3 0: 3 - 1.5, 3 - 1.5, 0 - 3; a group of equal rewards teaches beside others
    assert rloo_advantages([[3.0, 3.0], [0.0, None]], baseline="batch") == [[1.5, 1.5], [-3.0, 0.0]]
    # normalised over 1.5 1.5 -3: mean 0, variance (2.25 + 2.25 + 9) / 2
    assert rloo_advantages([[3.0, 3.0], [0.0]], True, 0.0, "batch") == [
        pytest.approx([1.5 / math.sqrt(6.75)] * 2), pytest.approx([-3 / math.sqrt(6.75)]),
    ]  # fmt: skip
    for empty in ([], [[]], [[1.0]], [[None]], [[2.0], [2.0]]):
        assert rloo_advantages(empty, baseline="batch") == [[0.0] * len(group) for group in empty]


@given(GROUPS)
def test_a_batch_baseline_sums_to_zero_over_the_batch_and_ignores_how_it_is_grouped(groups: list[list[float]]) -> None:
    flat = [reward for group in groups for reward in group]
    for advantages in (
        grpo_advantages(groups, "none", baseline="batch"), rloo_advantages(groups, baseline="batch"),
    ):  # fmt: skip
        assert [len(group) for group in advantages] == [len(group) for group in groups]
        assert math.fsum(value for group in advantages for value in group) == pytest.approx(0.0, abs=1e-6)
    assert [v for g in rloo_advantages(groups, baseline="batch") for v in g] == rloo_advantages([flat])[0]


def test_a_batch_baseline_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="set scale_rewards to 'batch' or 'none'"):
        grpo_advantages([[1.0, 0.0]], "group", baseline="batch")
    with pytest.raises(ConfigurationError, match="baseline='world' is not known"):
        rloo_advantages([[1.0, 0.0]], baseline="world")  # type: ignore[arg-type]


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


# Turns


def test_turn_returns_by_hand() -> None:
    assert turn_returns([1.0, 0.0, 4.0]) == [5.0, 4.0, 4.0]
    assert turn_returns([1.0, 0.0, 4.0], 0.5) == [2.0, 2.0, 4.0]
    assert turn_returns([1.0, 0.0, 4.0], 0.0) == [1.0, 0.0, 4.0]
    assert turn_returns([]) == []


def test_turn_advantages_by_hand() -> None:
    # returns at discount 1/2: (2, 2, 4), (0, 0) and (4); turn 0: mean 2 of 2, 0, 4; turn 1: mean 1 of 2 and 0;
    # turn 2 has nobody to compare with
    group = [[1.0, 0.0, 4.0], [0.0, 0.0], [4.0]]
    assert turn_advantages([group], 0.5, "none") == [[[0.0, 1.0, 0.0], [-2.0, -1.0], [2.0]]]
    # deviations: 2 at turn 0 (squares 0, 4, 4 over 2), sqrt(2) at turn 1
    found = turn_advantages([group], 0.5, "group", eps=0.0)[0]
    assert found[0] == pytest.approx([0.0, 1 / math.sqrt(2), 0.0])
    assert found[1] == pytest.approx([-1.0, -1 / math.sqrt(2)]) and found[2] == pytest.approx([1.0])
    # of all returns 2 2 4 0 0 4: mean 2, squares 0 0 4 4 4 4, variance 16 / 5
    batch = turn_advantages([group], 0.5, "batch", eps=0.0)[0]
    assert batch[1] == pytest.approx([-2 / math.sqrt(3.2), -1 / math.sqrt(3.2)])


def test_turn_advantages_leave_unscorable_siblings_out() -> None:
    assert turn_advantages([[[1.0], None, [0.0], []]], scale_rewards="none") == [[[0.5], [], [-0.5], []]]
    assert turn_advantages([[None, [3.0, 1.0]], []]) == [[[], [0.0, 0.0]], []]


@given(groups=GROUPS, scale=SCALE)
def test_with_one_turn_each_it_is_the_group_advantage(groups: list[list[float | None]], scale: ScaleRewards) -> None:
    turns = [[[reward] if reward is not None else None for reward in group] for group in groups]
    found = turn_advantages(turns, 0.9, scale)
    expected = grpo_advantages(groups, scale)
    for group, wanted in zip(found, expected, strict=True):
        assert [of_sibling[0] if of_sibling else 0.0 for of_sibling in group] == pytest.approx(wanted)


TURNS = st.lists(
    st.one_of(st.none(), st.lists(st.floats(-10, 10).map(lambda value: round(value, 2)), max_size=4)), max_size=5
)


@given(group=TURNS, discount=st.sampled_from([0.0, 0.5, 1.0]), scale=SCALE, data=st.data())
def test_turn_advantages_sum_to_zero_at_each_turn_and_follow_their_sibling(
    group: list[list[float] | None], discount: float, scale: ScaleRewards, data: st.DataObject
) -> None:
    found = turn_advantages([group], discount, scale)[0]
    assert [len(of_sibling) for of_sibling in found] == [len(turns or []) for turns in group]
    for at in range(max((len(turns) for turns in found), default=0)):
        column = [of_sibling[at] for of_sibling in found if at < len(of_sibling)]
        assert math.fsum(column) == pytest.approx(0.0, abs=1e-6)
    order = data.draw(st.permutations(range(len(group))))
    for place, turns in zip(order, turn_advantages([[group[i] for i in order]], discount, scale)[0], strict=True):
        assert turns == pytest.approx(found[place], abs=1e-9)


@given(
    rewards=st.lists(st.floats(-5, 5).map(lambda value: round(value, 2)), min_size=2, max_size=5),
    length=st.integers(1, 4),
)
def test_a_reward_at_the_end_of_equally_many_turns_credits_every_turn_alike(rewards: list[float], length: int) -> None:
    turns = [[0.0] * (length - 1) + [reward] for reward in rewards]
    for found, expected in zip(turn_advantages([turns])[0], grpo_advantages([rewards])[0], strict=True):
        assert found == pytest.approx([expected] * length)


def test_the_same_parts_in_another_order_are_equal_rewards() -> None:
    assert 0.1 + (0.2 + 0.3) != 0.3 + (0.2 + 0.1)
    assert grpo_advantages([[0.1 + (0.2 + 0.3), 0.3 + (0.2 + 0.1)]], eps=0.0) == [[0.0, 0.0]]
    assert rloo_advantages([[0.1 + (0.2 + 0.3), 0.3 + (0.2 + 0.1)]], normalize=True, eps=0.0) == [[0.0, 0.0]]


def test_turn_errors() -> None:
    with pytest.raises(ConfigurationError, match=r"discount=1.5 must be in \[0, 1\]"):
        turn_advantages([[[1.0]]], 1.5)
    with pytest.raises(ConfigurationError, match=r"is inf"):
        turn_advantages([[[math.inf], [1.0]]])
