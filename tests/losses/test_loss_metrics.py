from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from envgrad.losses import (
    Metric,
    clip_metrics,
    extreme_metric,
    importance_ratio,
    mean_metric,
    merge_metrics,
    policy_metrics,
)
from helpers.losses import inputs

LOG2 = math.log(2.0)


def test_clip_metrics() -> None:
    given_inputs = inputs([0.5, 0.5, 1.5, 1.0], [-1.0, 1.0, 1.0, -1.0], [0, 0, 1, 1])
    given_inputs = replace(given_inputs, weights=torch.tensor([1.0, 1.0, 1.0, 2.0]))
    ratio = importance_ratio(given_inputs, "token")
    found = merge_metrics([clip_metrics(ratio, given_inputs, epsilon=0.2, epsilon_high=0.28, level="token")])
    assert found == pytest.approx(
        {
            "clip_ratio/low_mean": 0.25,
            "clip_ratio/high_mean": 0.25,
            "clip_ratio/region_mean": 0.5,
            "clip_ratio/low_min": 0.0,
            "clip_ratio/high_max": 0.5,
        }
    )


def test_sequence_level_means_count_sequences() -> None:
    given_inputs = inputs([1.0] * 4, [1.0] * 4, [0, 0, 0, 1])
    values = torch.tensor([1.0, 1.0, 1.0, 0.0])
    assert merge_metrics([{"x": mean_metric(values, given_inputs)}]) == {"x": 0.75}
    assert merge_metrics([{"x": mean_metric(values, given_inputs, "sequence")}]) == {"x": 0.5}


def test_policy_metrics_skip_tokens_without_weight() -> None:
    given_inputs = inputs([1.0, 2.0, 9.0], [1.0] * 3)
    given_inputs = replace(
        given_inputs, weights=torch.tensor([1.0, 1.0, 0.0]), entropy=torch.tensor([1.0, 2.0, 100.0]),
        sampler_logprobs=torch.tensor([-1.5, -1.0, 50.0]),
    )  # fmt: skip
    found = merge_metrics([policy_metrics(importance_ratio(given_inputs, "token"), given_inputs)])
    assert found == pytest.approx({"ratio/max": 2.0, "sampler_mismatch": (0.5 + LOG2) / 2, "entropy": 1.5})


def test_merging_weighs_by_count_and_drops_what_nobody_counted() -> None:
    def part(mean: float, count: float, top: float) -> dict[str, Metric]:
        one = torch.tensor(count)
        return {
            "mean": Metric(value=torch.tensor(mean * count), count=one),
            "top": Metric(value=torch.tensor(top), count=one, reduce="max"),
            "bottom": Metric(value=torch.tensor(top), count=one, reduce="min"),
        }

    parts = [part(1.0, 1.0, 5.0), part(3.0, 3.0, 2.0), part(math.nan, 0.0, math.inf)]
    assert merge_metrics(parts) == {"mean": 2.5, "top": 5.0, "bottom": 2.0}
    assert merge_metrics(parts[2:]) == {}
    unweighted = replace(inputs([1.0], [1.0]), weights=torch.zeros(1))
    assert extreme_metric(torch.ones(1), unweighted, "max").count == 0
