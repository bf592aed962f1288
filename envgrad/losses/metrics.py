"""Metrics of a micro-batch that merge over micro-batches and processes."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from envgrad.losses.inputs import LossInputs, Metric
from envgrad.losses.surrogates import RatioLevel
from envgrad.losses.weights import sample_means


def mean_metric(values: Tensor, inputs: LossInputs, level: RatioLevel = "token") -> Metric:
    """The mean of ``values`` ``(N,)`` over tokens that weigh something, or over samples of their means over tokens."""
    counted = (inputs.weights > 0).float()
    if level == "token":
        return Metric(value=(values.detach().float() * counted).sum(), count=counted.sum())
    present = sample_means(counted, inputs.sample_index, inputs.num_samples)
    means = sample_means(values.detach().float() * counted, inputs.sample_index, inputs.num_samples)
    return Metric(value=means.sum(), count=present.sum())


def extreme_metric(values: Tensor, inputs: LossInputs, reduce: Literal["max", "min"]) -> Metric:
    """The largest or smallest of ``values`` ``(N,)`` over tokens that weigh something."""
    counted = inputs.weights > 0
    fill = float("-inf") if reduce == "max" else float("inf")
    kept = torch.where(counted, values.detach().float(), fill)
    return Metric(value=kept.max() if reduce == "max" else kept.min(), count=counted.sum(), reduce=reduce)


def clip_metrics(
    ratio: Tensor, inputs: LossInputs, *, epsilon: float, epsilon_high: float, level: RatioLevel
) -> dict[str, Metric]:
    """trl's ``clip_ratio/*``: the share of tokens (at sequence level: of sequences) whose gradient is clipped.

    ``low_min`` and ``high_max`` are the extremes over samples.
    """
    low = ((ratio < 1 - epsilon) & (inputs.advantages < 0)).float()
    high = ((ratio > 1 + epsilon_high) & (inputs.advantages > 0)).float()
    of_sample = inputs.sample_index
    low_means = sample_means(low, of_sample, inputs.num_samples)[of_sample]
    high_means = sample_means(high, of_sample, inputs.num_samples)[of_sample]
    return {
        "clip_ratio/low_mean": mean_metric(low, inputs, level),
        "clip_ratio/high_mean": mean_metric(high, inputs, level),
        "clip_ratio/region_mean": mean_metric(low + high, inputs, level),
        "clip_ratio/low_min": extreme_metric(low_means, inputs, "min"),
        "clip_ratio/high_max": extreme_metric(high_means, inputs, "max"),
    }


def policy_metrics(ratio: Tensor, inputs: LossInputs) -> dict[str, Metric]:
    """Metrics of every loss: ``ratio/max``, ``sampler_mismatch`` (mean ``|logp - sampler's|``) and ``entropy``."""
    metrics = {
        "ratio/max": extreme_metric(ratio, inputs, "max"),
        "sampler_mismatch": mean_metric((inputs.logprobs - inputs.sampler_logprobs).abs(), inputs),
    }
    if inputs.entropy is not None:
        metrics["entropy"] = mean_metric(inputs.entropy, inputs)
    return metrics
