from __future__ import annotations

import logging
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from envgrad.environments.boundary import Ok, Raised, TimedOut
from envgrad.errors import ConfigurationError, EnvironmentFailure, RewardFailure, RewardTimeout
from envgrad.rewards.results import read_rewards, value_of
from envgrad.rollout.finite import episode_name
from envgrad.rollout.scoring import RewardWeights
from helpers.rewards import answered

SIX = [answered("x")] * 6
TWO = SIX[:2]


@pytest.mark.parametrize(
    "value",
    [
        [1, 0.5],
        (True, 0.5),
        [np.float32(1), np.float64(0.5)],
        np.array([1, 0.5]),
        torch.tensor([1, 0.5], requires_grad=True),
        torch.tensor([1, 0.5], dtype=torch.bfloat16),
        [torch.tensor(1), torch.tensor(0.5)],
    ],
)
def test_numbers_of_any_kind(value):
    rewards = read_rewards(value, TWO, "f")
    assert rewards == [1.0, 0.5] and all(type(reward) is float for reward in rewards)


@pytest.mark.parametrize("value", [[None, 1.0], [float("nan"), 1], np.array([np.nan, 1]), torch.tensor([math.nan, 1])])
def test_none_and_nan_do_not_apply(value):
    assert read_rewards(value, TWO, "f") == [None, 1.0]


@pytest.mark.parametrize(
    ("value", "count"), [([1.0], 1), ([1.0] * 5, 5), ([], 0), (np.ones(7), 7), (np.ones((1, 6)), 1)]
)
def test_a_wrong_length_is_never_broadcast(value, count):
    with pytest.raises(ConfigurationError, match=f"'style' returned {count} rewards for 6 completions"):
        read_rewards(value, SIX, "style")


@pytest.mark.parametrize("value", [1.0, None, "111111", np.float64(1), torch.tensor(1.0), {0: 1.0}, iter([1.0] * 6)])
def test_what_is_no_list_names_the_function_and_the_count(value):
    with pytest.raises(ConfigurationError, match=r"'style' returned .* for 6 completions.*list of 6 numbers"):
        read_rewards(value, SIX, "style")


@pytest.mark.parametrize("item", ["1", [1.0], (1.0,), np.ones(1), 1j, {}])
def test_an_item_that_is_no_number_is_named(item):
    with pytest.raises(ConfigurationError, match=r"'style' returned .* for completion 1"):
        read_rewards([1.0, item], TWO, "style")


def test_a_column_of_an_array_is_no_list_of_numbers():
    with pytest.raises(ConfigurationError, match="completion 0"):
        read_rewards(torch.ones(2, 1), TWO, "style")


@pytest.mark.parametrize("item", [math.inf, -math.inf, 10**400, np.float32("inf")])
def test_an_infinite_reward_is_a_failure(item):
    with pytest.raises(RewardFailure, match=r"'style' returned .* for completion 1"):
        read_rewards([1.0, item], TWO, "style")


def test_an_infinite_reward_names_its_episode():
    with pytest.raises(RewardFailure, match=f"for completion 1, {episode_name(TWO[1])}"):
        read_rewards([1.0, math.inf], TWO, "style")


def test_nan_is_told_once_for_each_function(caplog):
    with caplog.at_level(logging.WARNING):
        assert read_rewards([math.nan, None, 1.0, math.nan, 0.0, 0.0], SIX, "told_once") == [
            None,
            None,
            1.0,
            None,
            0.0,
            0.0,
        ]
        read_rewards([math.nan, 1.0], TWO, "told_once")
        read_rewards([None, 1.0], TWO, "never_told")
    (told,) = [record.getMessage() for record in caplog.records if "told" in record.getMessage()]
    assert told.startswith("reward function 'told_once' returned NaN for 2 of 6 completions")


def test_outcomes():
    assert value_of(Ok(3, 0.0), "w", None) == 3
    with pytest.raises(RewardTimeout, match=r"w took longer than 2 s \(reward_timeout\)"):
        value_of(TimedOut(2.1, killable=False), "w", 2)
    cause = ZeroDivisionError("x")
    with pytest.raises(RewardFailure, match="w raised ZeroDivisionError: x") as caught:
        value_of(Raised(cause, 0.0), "w", None)
    assert caught.value.__cause__ is cause
    with pytest.raises(RewardFailure, match="EnvironmentFailure"):
        value_of(Raised(EnvironmentFailure("e"), 0.0), "w", None)
    with pytest.raises(ConfigurationError, match="mine"):
        value_of(Raised(ConfigurationError("mine"), 0.0), "w", None)


values = st.one_of(st.none(), st.floats(-1e6, 1e6))
NAMES = ["a", "b", "c"]


@given(st.dictionaries(st.sampled_from(NAMES), values), st.dictionaries(st.sampled_from(NAMES), st.floats(-1e3, 1e3)))
def test_totals_leave_out_what_does_not_apply(rewards, weights):
    total = RewardWeights(weights).total(rewards)
    applying = {name: value for name, value in rewards.items() if value is not None}
    assert (total is None) == (not applying)
    if total is not None:
        assert total == pytest.approx(sum(weights.get(name, 1.0) * value for name, value in applying.items()), abs=1e-3)
        assert RewardWeights(weights).total(applying) == total


@given(st.lists(st.one_of(values, st.just(math.nan), st.booleans(), st.integers(-9, 9)), max_size=8))
def test_rewards_keep_their_places(items):
    read = read_rewards(items, [SIX[0]] * len(items), "f")
    for item, reward in zip(items, read, strict=True):
        assert reward is None if item is None or math.isnan(item) else reward == float(item)
