"""Surrogates of the policy gradient, one loss per trained token, and the KL to the reference."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from envgrad.losses.inputs import LossInputs
from envgrad.losses.weights import sample_means, sample_sums

RatioLevel: TypeAlias = Literal["token", "sequence"]


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


def sapo_surrogate(ratio: Tensor, advantages: Tensor, *, temperature_pos: float, temperature_neg: float) -> Tensor:
    """SAPO's loss per token (arXiv:2511.20347): ``-A * sigmoid(t * (r - 1)) * 4 / t``.

    The temperature ``t`` is ``temperature_pos`` where A > 0, else ``temperature_neg``. A soft gate instead of a clip:
    at r = 1 the gradient is that of ``-r * A``, and it fades smoothly on both sides, faster for a larger ``t``.

    Example:
        >>> one = torch.ones(2)
        >>> sapo_surrogate(one, torch.tensor([1.0, -1.0]), temperature_pos=1.0, temperature_neg=2.0)
        tensor([-2.,  1.])
    """
    temperature = torch.where(advantages > 0, temperature_pos, temperature_neg)
    return -advantages * torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature


def vespo_gamma(inputs: LossInputs, *, k_pos: float, lambda_pos: float, k_neg: float, lambda_neg: float) -> Tensor:
    """VESPO's weights ``(N,)`` without gradient (arXiv:2602.10693): ``phi(w) = w^k * exp(lambda * (1 - w))``.

    ``w`` is the whole sequence's importance weight: the product over its tokens of ``exp(logp - old)``, and of the
    correction old / sampler where there is one. ``k`` and ``lambda`` are those of the sign of A (0 counts as
    positive). ``phi(1) = 1``; ``k`` dampens sequences that became unlikely, ``lambda`` those that became likely.
    Computed in logarithms, with each token's within 20 and the sequence's within [log 1e-8, 20].

    Example:
        >>> one = torch.ones(2)
        >>> inputs = LossInputs(logprobs=-one, old_logprobs=-one - math.log(2.0), sampler_logprobs=-one, advantages=one,
        ...     weights=one, sample_index=torch.tensor([0, 0]), num_samples=1, total_tokens=2.0)
        >>> vespo_gamma(inputs, k_pos=0.5, lambda_pos=0.1, k_neg=1.0, lambda_neg=1.0)   # 2 * exp(-0.3)
        tensor([1.4816, 1.4816])
    """
    least = math.log(1e-8)
    log_ratio = (inputs.logprobs.detach() - inputs.old_logprobs).clamp(-20.0, 20.0)
    if inputs.importance is not None:
        log_ratio = log_ratio + inputs.importance.log().clamp(least, 20.0)
    log_w = sample_sums(log_ratio, inputs.sample_index, inputs.num_samples)[inputs.sample_index].clamp(least, 20.0)
    positive = inputs.advantages >= 0
    k = torch.where(positive, k_pos, k_neg)
    decay = torch.where(positive, lambda_pos, lambda_neg)
    return (decay + k * log_w - decay * log_w.exp()).exp()


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
