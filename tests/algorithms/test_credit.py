from __future__ import annotations

import math

import pytest

from envgrad.algorithms.credit import component_rewards, group_rewards, training_sample, turn_rewards, turn_samples
from helpers.episodes import episode, group_of


def test_components_are_the_union_of_names_and_none_where_absent() -> None:
    groups = [
        group_of(episode(0, 0, 3.0, rewards={"Game": 1.0, "style": 2.0}), episode(0, 1, 1.0, rewards={"Game": 1.0})),
        group_of(episode(1, 0, 5.0, rewards={"length": 5.0, "style": None})),
    ]
    rewards, weights = component_rewards(groups, {"style": 0.5})
    assert rewards == [[[1.0, 1.0], [2.0, None], [None, None]], [[None], [None], [5.0]]]
    assert weights == [1.0, 0.5, 1.0]


def test_an_unscorable_episode_has_no_component_and_an_unpaid_one_earned_no_turns() -> None:
    group = group_of(
        episode(0, 0, None, rewards={"style": 2.0}),
        episode(0, 1, math.nan, rewards={"style": 2.0}),
        episode(0, 2, 1.0, rewards={"turns": 1.0}),
        episode(0, 3, 0.0),
    )
    assert component_rewards([group], {})[0] == [[[None, None, None, None], [None, None, 1.0, 0.0]]]
    assert group_rewards([group]) == [[None, None, 1.0, 0.0]]


def test_turn_rewards_sum_to_the_episodes_and_the_rest_counts_at_the_end() -> None:
    group = group_of(
        episode(0, 0, 1.75, turns=(0.25, None, 0.5)),  # get_reward gave 1.0
        episode(0, 1, 0.75, turns=(0.25, 0.5)),
        episode(0, 2, None, turns=(0.25,)),
        episode(0, 3, 2.0, turns=()),
    )
    assert turn_rewards([group], {}) == [[[0.25, 0.0, 1.5], [0.25, 0.5], None, None]]
    # turns weigh 2: the first sibling's other rewards were 1.75 - 2 * 0.75
    assert turn_rewards([group], {"turns": 2.0})[0][0] == [0.5, 0.0, 1.25]


def test_the_rounding_of_a_sum_is_no_reward() -> None:
    paid = (0.1, 0.2, 0.3)
    assert sum(paid) != math.fsum(paid)
    assert turn_rewards([group_of(episode(0, 0, sum(paid), turns=paid))], {}) == [[list(paid)]]


def test_samples_carry_credit_on_sampled_tokens_only() -> None:
    played = episode(0, 0, 1.0, turns=(None, None))
    assert training_sample(played, 2.0).advantages == (0, 0, 0, 0, 2, 2, 0, 2, 2, 0)
    (by_turn,) = turn_samples(played, [3.0, -1.0])
    assert by_turn.advantages == (0, 0, 0, 0, 3, 3, 0, -1, -1, 0)
    sample = training_sample(played, 2.0, ref_logprobs=(-1.0, -2.0, -3.0, -4.0))
    assert sample.ref_logprobs == (0, 0, 0, 0, -1, -2, 0, -3, -4, 0)
    with pytest.raises(ValueError, match="shorter"):
        turn_samples(played, [3.0])
