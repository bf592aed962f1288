"""Loss weights of a step's samples, decided before it is packed, and the sums that they make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from envgrad.errors import ConfigurationError
from envgrad.losses.inputs import LossInputs
from envgrad.packing import StepTotals
from envgrad.types import TrainingSample

LossType: TypeAlias = Literal["grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"]


def is_trained(sample: TrainingSample, mask_truncated_completions: bool) -> bool:
    """Whether any token of ``sample`` enters the loss."""
    return any(sample.mask) and not (mask_truncated_completions and sample.truncated)


def step_totals(samples: Sequence[TrainingSample], mask_truncated_completions: bool = False) -> StepTotals:
    """This process's counts. As in trl, a masked truncated sample leaves the token count but not the sample count.

    An episode with several rows is one sample.
    """
    tokens = sum(sample.num_trained_tokens for sample in samples if is_trained(sample, mask_truncated_completions))
    return StepTotals(num_samples=sum(not sample.row for sample in samples), num_tokens=tokens)


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
    vespo     1 / M                       the same (arXiv:2602.10693)
    sapo      1 / (S * tokens of sample)  as grpo (arXiv:2511.20347)
    luspo     1 / S                       a sum over the sample's tokens: long answers count more (arXiv:2602.05261)
    dr_grpo   1 / (S * max length)        a constant, no length in it (arXiv:2503.20783)
    ========  ==========================  ==========================================================================

    In trl, ``bnpo`` divides by the tokens of each micro-batch and averages these means, so it depends on the split;
    ``dapo`` divides by those of the whole step. With denominators over the whole step both are one.

    An episode with several rows (an agent's) counts once in S, and its tokens in all rows are "tokens of sample": its
    rows weigh together what one row would.

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
        elif loss_type in ("grpo", "sapo"):
            weights.append(1.0 / (totals.num_samples * sample.num_episode_tokens))
        elif loss_type == "dr_grpo":
            if max_completion_length is None:
                raise ConfigurationError("loss_type='dr_grpo' divides by max_completion_length, which is None; set it")
            weights.append(1.0 / (totals.num_samples * max_completion_length))
        elif loss_type in ("bnpo", "dapo", "cispo", "vespo"):
            weights.append(1.0 / totals.num_tokens)
        elif loss_type == "luspo":
            weights.append(1.0 / totals.num_samples)
        else:
            raise ConfigurationError(f"loss_type={loss_type!r} must be one of {get_args(LossType)}")
    return weights


def sample_sums(values: Tensor, sample_index: Tensor, num_samples: int) -> Tensor:
    """Sums ``(num_samples,)`` of ``values`` ``(N,)`` over each sample's tokens.

    Example:
        >>> sample_sums(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 0, 1]), 2)
        tensor([4., 5.])
    """
    return values.new_zeros(num_samples).index_add(0, sample_index, values)


def sample_means(values: Tensor, sample_index: Tensor, num_samples: int) -> Tensor:
    """Means ``(num_samples,)`` of ``values`` ``(N,)`` over each sample's tokens; 0 for a sample without tokens.

    Example:
        >>> sample_means(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 0, 1]), 2)
        tensor([2., 5.])
    """
    counts = torch.bincount(sample_index, minlength=num_samples).clamp(min=1)
    return sample_sums(values, sample_index, num_samples) / counts


def weighted_sum(losses: Tensor, inputs: LossInputs) -> Tensor:
    """``sum_n w_n * l_n``: a scalar, 0 (and finite) where all weights are 0."""
    return (inputs.weights * losses).sum()


def entropy_bonus(inputs: LossInputs, coefficient: float) -> Tensor:
    """``-coefficient`` times the mean entropy over the whole step's trained tokens (this micro-batch's share of it).

    Where only some tokens are ``selected``, the mean is over those. It does not depend on the loss type.
    """
    if inputs.entropy is None:
        raise AssertionError("an entropy bonus needs entropies: ask policy_logprobs for entropy='grad'")
    if inputs.selected is None:
        return -coefficient * inputs.entropy.sum() / max(inputs.total_tokens, 1.0)
    return -coefficient * (inputs.entropy * inputs.selected).sum() / max(inputs.total_selected, 1.0)
