"""Pure losses over the trained tokens of a micro-batch, one value per token, and the weights that sum them up.

The loss of an optimizer step is ``sum_n w_n * l_n`` over all its trained tokens n. The weights ``w_n`` are decided
before the step is packed, with denominators over the whole step and all processes, so neither the loss nor its gradient
changes with the split into micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from envgrad.errors import ConfigurationError
from envgrad.logprobs import PolicyOutputs
from envgrad.packing import MicroBatch, StepTotals
from envgrad.types import TrainingSample

LossType: TypeAlias = Literal["grpo", "bnpo", "dapo", "dr_grpo", "cispo"]
RatioLevel: TypeAlias = Literal["token", "sequence"]
CorrectionMode: TypeAlias = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """What a loss sees of a micro-batch: N trained tokens of ``num_samples`` samples. All tensors are ``(N,)``."""

    logprobs: Tensor
    """of the policy, with gradient"""
    old_logprobs: Tensor
    sampler_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    sample_index: Tensor
    num_samples: int
    total_tokens: float
    """trained tokens in the whole step"""
    ref_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    importance: Tensor | None = None
    """weight on the surrogate, where old and sampler's log-probs differ"""

    @classmethod
    def of(cls, micro_batch: MicroBatch, outputs: PolicyOutputs) -> LossInputs:
        return cls(
            logprobs=outputs.logprobs,
            entropy=outputs.entropy,
            old_logprobs=micro_batch.old_logprobs,
            sampler_logprobs=micro_batch.sampler_logprobs,
            advantages=micro_batch.advantages,
            weights=micro_batch.weights,
            sample_index=micro_batch.sample_index,
            num_samples=micro_batch.num_samples,
            total_tokens=micro_batch.total_tokens,
            ref_logprobs=micro_batch.ref_logprobs,
            importance=micro_batch.importance,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A part of a metric: parts of many micro-batches and processes merge into one value without averaging averages."""

    value: Tensor
    """scalar: a sum for ``mean``, else the extremum"""
    count: Tensor
    """scalar: how many tokens (or sequences) ``value`` covers; a part with count 0 does not exist"""
    reduce: Literal["mean", "max", "min"] = "mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutputs:
    """A micro-batch's share of the step's loss (a scalar with gradient) and of its metrics."""

    loss: Tensor
    metrics: Mapping[str, Metric]


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, float]:
    """Merge the metrics of micro-batches (and processes); names without any counted token are left out.

    Example:
        >>> one, three = torch.tensor(1.0), torch.tensor(3.0)
        >>> merge_metrics([{"kl": Metric(value=one, count=one)}, {"kl": Metric(value=one, count=three)}])
        {'kl': 0.5}
    """
    by_name: dict[str, list[tuple[float, float, str]]] = {}
    for part in parts:
        for name, metric in part.items():
            if count := float(metric.count):
                by_name.setdefault(name, []).append((float(metric.value), count, metric.reduce))
    merged: dict[str, float] = {}
    for name, found in by_name.items():
        values = [value for value, _, _ in found]
        reduce = found[0][2]
        if reduce == "mean":
            merged[name] = sum(values) / sum(count for _, count, _ in found)
        else:
            merged[name] = max(values) if reduce == "max" else min(values)
    return merged


def is_trained(sample: TrainingSample, mask_truncated_completions: bool) -> bool:
    """Whether any token of ``sample`` enters the loss."""
    return any(sample.mask) and not (mask_truncated_completions and sample.truncated)


def step_totals(samples: Sequence[TrainingSample], mask_truncated_completions: bool = False) -> StepTotals:
    """This process's counts. As in trl, a masked truncated sample leaves the token count but not the sample count."""
    tokens = sum(sample.num_trained_tokens for sample in samples if is_trained(sample, mask_truncated_completions))
    return StepTotals(num_samples=len(samples), num_tokens=tokens)


def sample_weights(
    samples: Sequence[TrainingSample],
    loss_type: LossType,
    *,
    totals: StepTotals | None = None,
    max_completion_length: int | None = None,
    mask_truncated_completions: bool = False,
) -> list[float]:
    """The loss weight of each sample's trained tokens, given ``totals`` (S samples, M trained tokens in the step).

    ========  ==========================  ==========================================================================
    grpo      1 / (S * tokens of sample)  mean over samples of means over tokens (arXiv:2402.03300): long answers
                                          count less per token
    bnpo      1 / M                       mean over all tokens of the step
    dapo      1 / M                       the same (arXiv:2503.14476)
    cispo     1 / M                       the same (arXiv:2506.13585)
    dr_grpo   1 / (S * max length)        a constant, no length in it (arXiv:2503.20783)
    ========  ==========================  ==========================================================================

    In trl, ``bnpo`` divides by the tokens of each micro-batch and averages these means, so it depends on the split;
    ``dapo`` divides by those of the whole step. With denominators over the whole step both are one.

    With ``mask_truncated_completions`` a truncated sample weighs 0 and leaves M but not S. If all are masked, all
    weights are 0, never 0/0.

    Raises:
        ConfigurationError: an unknown ``loss_type``, or ``dr_grpo`` without ``max_completion_length``.

    Example:
        >>> rows = [TrainingSample(token_ids=(1,) * n, mask=(0,) + (1,) * (n - 1), logprobs=(0.0,) * n,
        ...     versions=(0,) * n, advantages=(0.0,) * n, prompt_length=1, group="g") for n in (2, 5)]
        >>> sample_weights(rows, "grpo"), sample_weights(rows, "dapo")
        ([0.5, 0.125], [0.2, 0.2])
    """
    if totals is None:
        totals = step_totals(samples, mask_truncated_completions)
    weights = []
    for sample in samples:
        if not is_trained(sample, mask_truncated_completions):
            weights.append(0.0)
        elif loss_type == "grpo":
            weights.append(1.0 / (totals.num_samples * sample.num_trained_tokens))
        elif loss_type == "dr_grpo":
            if max_completion_length is None:
                raise ConfigurationError("loss_type='dr_grpo' divides by max_completion_length, which is None; set it")
            weights.append(1.0 / (totals.num_samples * max_completion_length))
        elif loss_type in ("bnpo", "dapo", "cispo"):
            weights.append(1.0 / totals.num_tokens)
        else:
            raise ConfigurationError(f"loss_type={loss_type!r} must be one of {get_args(LossType)}")
    return weights


def sample_means(values: Tensor, sample_index: Tensor, num_samples: int) -> Tensor:
    """Means ``(num_samples,)`` of ``values`` ``(N,)`` over each sample's tokens; 0 for a sample without tokens.

    Example:
        >>> sample_means(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 0, 1]), 2)
        tensor([2., 5.])
    """
    sums = values.new_zeros(num_samples).index_add(0, sample_index, values)
    counts = torch.bincount(sample_index, minlength=num_samples).clamp(min=1)
    return sums / counts


def importance_ratio(inputs: LossInputs, level: RatioLevel) -> Tensor:
    """Policy over old policy, ``(N,)``.

    ``token``: ``exp(logp - old)`` of each token. ``sequence`` (GSPO, arXiv:2507.18071, eq. 7): ``exp`` of the mean of
    ``logp - old`` over the sample's tokens, one value for all of them, differentiated through the mean. With one token
    in a sample both are the same.
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    if level == "sequence":
        log_ratio = sample_means(log_ratio, inputs.sample_index, inputs.num_samples)[inputs.sample_index]
    return log_ratio.exp()


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, *, epsilon: float, epsilon_high: float, delta: float | None = None
) -> Tensor:
    """PPO's clipped loss per token (arXiv:1707.06347; asymmetric: DAPO, arXiv:2503.14476).

    ``-min(r * A, clip(r, 1 - epsilon, 1 + epsilon_high) * A)``; with ``delta`` the first ``r`` is at most ``delta``
    (two-sided clipping, arXiv:2505.07291), which bounds the loss where A < 0. At r = 1 the loss is ``-A``, its gradient
    ``-A * grad logp``.

    Example:
        >>> ratio, advantages = torch.tensor([1.5, 0.5, 5.0]), torch.tensor([1.0, -1.0, -1.0])
        >>> clipped_surrogate(ratio, advantages, epsilon=0.2, epsilon_high=0.28, delta=3.0)
        tensor([-1.2800,  0.8000,  3.0000])
    """
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    return -torch.minimum(bounded * advantages, clipped * advantages)


def cispo_surrogate(ratio: Tensor, advantages: Tensor, logprobs: Tensor, *, epsilon_high: float) -> Tensor:
    """CISPO's loss per token (MiniMax-M1, arXiv:2506.13585): ``-stop_gradient(min(r, epsilon_high)) * A * logp``.

    REINFORCE with a truncated importance weight: no token loses its gradient. ``epsilon_high`` is the bound itself, not
    a distance from 1 (ScaleRL, arXiv:2510.13786, recommends 5).

    Example:
        >>> one = torch.ones(2)
        >>> cispo_surrogate(torch.tensor([2.0, 9.0]), one, -one, epsilon_high=5.0)
        tensor([2., 5.])
    """
    return -ratio.clamp(max=epsilon_high).detach() * advantages * logprobs


def k3_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """KL(policy || reference) per token by Schulman's k3 estimator: ``exp(d) - d - 1`` with ``d = ref - logp``.

    Never negative, and 0 where both agree (Schulman, "Approximating KL divergence", 2020). Its gradient is that of the
    reverse KL only if multiplied by the differentiable importance ratio (DeepSeek-V3.2, arXiv:2512.02556).

    Example:
        >>> k3_kl(torch.tensor([0.0, -1.0]), torch.tensor([0.0, 0.0]))
        tensor([0.0000, 0.7183])
    """
    difference = ref_logprobs - logprobs
    return difference.exp() - difference - 1


def importance_correction(
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    sample_index: Tensor,
    num_samples: int,
    *,
    mode: CorrectionMode,
    clip_min: float | None = None,
    clip_max: float | None = None,
) -> Tensor:
    """Weights old / sampler ``(N,)`` for a sampler whose log-probs are inexact, by trl's modes of these names.

    Per token, or per sequence (the product over the sample's tokens); outside ``[clip_min, clip_max]`` they are
    truncated to it, or masked to 0. Tokens without a sampler log-prob (NaN) count as exact.

    Raises:
        ConfigurationError: an unknown mode, or ``clip_min`` not below ``clip_max``.

    Example:
        >>> old, sampler = torch.tensor([0.0, 0.0]), torch.tensor([0.0, -2.0])
        >>> importance_correction(old, sampler, torch.tensor([0, 0]), 1, mode="token_truncate", clip_max=3.0)
        tensor([1., 3.])
    """
    if mode not in get_args(CorrectionMode):
        raise ConfigurationError(f"mode={mode!r} must be one of {get_args(CorrectionMode)}")
    if clip_min is not None and clip_max is not None and clip_min >= clip_max:
        raise ConfigurationError(f"clip_min={clip_min} must be below clip_max={clip_max}")
    log_weight = torch.nan_to_num(old_logprobs - sampler_logprobs, nan=0.0)
    if mode.startswith("sequence"):
        log_weight = log_weight.new_zeros(num_samples).index_add(0, sample_index, log_weight)[sample_index]
    weight = log_weight.exp()
    if clip_min is None and clip_max is None:
        return weight
    bounded = weight.clamp(min=clip_min, max=clip_max)
    return bounded if mode.endswith("truncate") else torch.where(bounded == weight, weight, 0.0)


def weighted_sum(losses: Tensor, inputs: LossInputs) -> Tensor:
    """``sum_n w_n * l_n``: a scalar, 0 (and finite) where all weights are 0."""
    return (inputs.weights * losses).sum()


def entropy_bonus(inputs: LossInputs, coefficient: float) -> Tensor:
    """``-coefficient`` times the mean entropy over the whole step's trained tokens (this micro-batch's share of it).

    The mean does not depend on the loss type.
    """
    if inputs.entropy is None:
        raise AssertionError("an entropy bonus needs entropies: ask policy_logprobs for entropy='grad'")
    return -coefficient * inputs.entropy.sum() / max(inputs.total_tokens, 1.0)


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
