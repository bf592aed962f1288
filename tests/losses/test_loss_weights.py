from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch

from envgrad.errors import ConfigurationError
from envgrad.losses import (
    LossType,
    entropy_bonus,
    sample_means,
    sample_weights,
    step_totals,
    weighted_sum,
)
from envgrad.packing import StepTotals
from helpers.losses import inputs, row


@pytest.mark.parametrize(
    ("loss_type", "expected", "expected_masked"),
    [
        ("grpo", [1 / 6, 1 / 18, 1 / 12], [1 / 6, 1 / 18, 0]),  # 1 / (3 * 2), 1 / (3 * 6), 1 / (3 * 4)
        ("bnpo", [1 / 12] * 3, [1 / 8, 1 / 8, 0]),
        ("dapo", [1 / 12] * 3, [1 / 8, 1 / 8, 0]),
        ("cispo", [1 / 12] * 3, [1 / 8, 1 / 8, 0]),
        ("vespo", [1 / 12] * 3, [1 / 8, 1 / 8, 0]),
        ("sapo", [1 / 6, 1 / 18, 1 / 12], [1 / 6, 1 / 18, 0]),
        ("luspo", [1 / 3] * 3, [1 / 3, 1 / 3, 0]),  # one over the samples: a sum over tokens
        ("dr_grpo", [1 / 30] * 3, [1 / 30, 1 / 30, 0]),  # 1 / (3 * 10)
    ],
)
def test_sample_weights(loss_type: LossType, expected: list[float], expected_masked: list[float]) -> None:
    rows = [row(2), row(6, untrained=3), row(4, truncated=True)]
    assert sample_weights(rows, loss_type, max_completion_length=10) == pytest.approx(expected)
    masked = sample_weights(rows, loss_type, max_completion_length=10, mask_truncated_completions=True)
    assert masked == pytest.approx(expected_masked)


@pytest.mark.parametrize("loss_type", get_args(LossType))
def test_nothing_to_train_weighs_nothing(loss_type: LossType) -> None:
    rows = [row(3, truncated=True), row(0)]
    weights = sample_weights(rows, loss_type, max_completion_length=10, mask_truncated_completions=True)
    assert weights == [0.0, 0.0]
    assert sample_weights([], loss_type, max_completion_length=10) == []


def test_totals_of_the_whole_step_are_the_denominators() -> None:
    assert step_totals([row(2), row(4, truncated=True)]) == StepTotals(num_samples=2, num_tokens=6)
    assert step_totals([row(2), row(4, truncated=True)], True) == StepTotals(num_samples=2, num_tokens=2)
    totals = StepTotals(num_samples=8, num_tokens=100)
    assert sample_weights([row(2)], "grpo", totals=totals) == [1 / 16]
    assert sample_weights([row(2)], "dapo", totals=totals) == [1 / 100]


def test_weight_errors() -> None:
    with pytest.raises(ConfigurationError, match="max_completion_length, which is None"):
        sample_weights([row(1)], "dr_grpo")
    with pytest.raises(ConfigurationError, match="loss_type='ppo' must be one of"):
        sample_weights([row(1)], "ppo")  # type: ignore[arg-type]


def test_sums() -> None:
    given_inputs = replace(inputs([1.0, 1.0, 1.0], [0.0] * 3), weights=torch.tensor([0.5, 0.0, 2.0]))
    assert weighted_sum(torch.tensor([1.0, 7.0, 3.0]), given_inputs).item() == 6.5
    assert sample_means(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([0, 2, 2]), 3).tolist() == [1.0, 0.0, 4.0]
    entropy = torch.tensor([1.0, 2.0, 3.0])
    bonus = entropy_bonus(replace(given_inputs, entropy=entropy, total_tokens=12.0), 0.1)
    assert bonus.item() == pytest.approx(-0.1 * 6 / 12)
    assert entropy_bonus(replace(given_inputs, entropy=entropy, total_tokens=math.inf), 0.1).item() == 0
    with pytest.raises(AssertionError, match="entropy='grad'"):
        entropy_bonus(given_inputs, 0.1)


def test_an_entropy_bonus_of_some_tokens_is_their_mean_over_the_step() -> None:
    entropy = torch.tensor([1.0, 2.0, 6.0])
    given_inputs = replace(
        inputs([1.0] * 3, [0.0] * 3), entropy=entropy, selected=torch.tensor([1.0, 0.0, 1.0]), total_selected=14.0
    )
    assert entropy_bonus(given_inputs, 0.1).item() == pytest.approx(-0.1 * 7 / 14)
    nothing = replace(given_inputs, selected=torch.zeros(3), total_selected=0.0)
    assert entropy_bonus(nothing, 0.1).item() == 0.0
