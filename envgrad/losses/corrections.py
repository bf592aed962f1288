"""Weights and masks on the surrogate where tokens are off-policy, and where only some tokens are to learn."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from envgrad.errors import ConfigurationError
from envgrad.losses.inputs import LossInputs
from envgrad.losses.weights import sample_means, sample_sums

CorrectionMode: TypeAlias = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


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
        log_weight = sample_sums(log_weight, sample_index, num_samples)[sample_index]
    weight = log_weight.exp()
    if clip_min is None and clip_max is None:
        return weight
    bounded = weight.clamp(min=clip_min, max=clip_max)
    return bounded if mode.endswith("truncate") else torch.where(bounded == weight, weight, 0.0)


def off_policy_mask(inputs: LossInputs, threshold: float) -> Tensor:
    """DeepSeek-V3.2's off-policy sequence mask (arXiv:2512.02556, equation 9) ``(N,)``: 1 keeps a token, 0 drops it.

    Dropped are tokens with A < 0 of sequences whose mean of ``sampler's logp - policy's logp`` is above ``threshold``:
    bad answers that the policy has moved away from already teach little and can unsettle it. The mean is measured from
    the log-probs that the tokens were sampled with, so it sees updates and an inexact sampler alike; tokens without a
    sampler log-prob (NaN) count as 0.
    """
    drift = torch.nan_to_num(inputs.sampler_logprobs - inputs.logprobs.detach(), nan=0.0)
    mean = sample_means(drift, inputs.sample_index, inputs.num_samples)[inputs.sample_index]
    return ((inputs.advantages >= 0) | (mean <= threshold)).float()


def entropy_threshold(entropies: Tensor, share: float) -> float:
    """The smallest entropy within the top ``share`` of ``entropies`` ``(n,)``: the quantile ``1 - share``, from above.

    "Beyond the 80/20 Rule" (arXiv:2506.01939) trains only the tokens at which the policy is most undecided, with
    ``share`` 0.2. At 0 the highest alone is left.

    Example:
        >>> entropy_threshold(torch.tensor([0.1, 0.5, 0.9, 0.3, 0.7]), 0.25)  # keeps 0.7 and 0.9
        0.699999988079071
    """
    below = math.ceil(round((1 - share) * (entropies.numel() - 1), 9))
    return float(entropies.kthvalue(below + 1).values)
