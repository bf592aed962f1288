"""GRPO (Shao et al., "DeepSeekMath", arXiv:2402.03300) and the losses that grew out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from typing import Literal, get_args

from envgrad.advantages import grpo_advantages
from envgrad.algorithms.base import ReferenceLogprobs
from envgrad.errors import ConfigurationError
from envgrad.logprobs import EntropyMode
from envgrad.losses import (
    LossInputs,
    LossOutputs,
    LossType,
    RatioLevel,
    cispo_surrogate,
    clip_metrics,
    clipped_surrogate,
    entropy_bonus,
    importance_ratio,
    k3_kl,
    mean_metric,
    policy_metrics,
    sample_weights,
    step_totals,
    weighted_sum,
)
from envgrad.packing import StepTotals
from envgrad.types import Episode, Group, TrainingSample

CISPO_EPSILON_HIGH = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPO:
    """Group-relative policy optimization. Fields and defaults are trl's, except ``epsilon_high`` for ``cispo``.

    ::

        A      = (reward - mean of its group) / (std of its group + 1e-4)    the same on each sampled token
        r      = exp(logp - old logp)                                        per token, or per sequence (GSPO)
        l      = -min(r * A, clip(r, 1 - epsilon, 1 + epsilon_high) * A) + beta * KL(policy || reference)
        loss   = sum over tokens of w * l  -  entropy_coef * mean entropy    w by ``loss_type``

    Assumes that siblings answer one task. A group of equal rewards has advantage 0 and teaches nothing.

    Example:
        >>> GRPO(loss_type="dr_grpo", scale_rewards="none", max_completion_length=256).entropy
        'metric'
        >>> GRPO(epsilon=1.5)
        Traceback (most recent call last):
        envgrad.errors.ConfigurationError: epsilon=1.5 must be in [0, 1): it is the lower clip 1 - epsilon; 0.2 is usual
    """

    loss_type: LossType = "dapo"
    scale_rewards: Literal["group", "batch", "none"] = "group"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    """None: ``epsilon``; for ``cispo`` the bound itself, None: 5"""
    delta: float | None = None
    importance_sampling_level: RatioLevel = "token"
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    """multiply the KL by the ratio, so that its gradient is that of the reverse KL (arXiv:2512.02556)"""
    entropy_coef: float = 0.0
    mask_truncated_completions: bool = False
    max_completion_length: int | None = None
    """``dr_grpo``'s divisor"""

    def __post_init__(self) -> None:
        _one_of("loss_type", self.loss_type, get_args(LossType))
        _one_of("scale_rewards", self.scale_rewards, ("group", "batch", "none"))
        _one_of("importance_sampling_level", self.importance_sampling_level, get_args(RatioLevel))
        if not 0 <= self.epsilon < 1:
            raise ConfigurationError(
                f"epsilon={self.epsilon} must be in [0, 1): it is the lower clip 1 - epsilon; 0.2 is usual"
            )
        if self.loss_type == "cispo" and self.upper < 1:
            raise ConfigurationError(
                f"epsilon_high={self.epsilon_high} must be at least 1 for loss_type='cispo': it bounds the ratio "
                "itself, and would shrink even an unchanged policy's; leave it None for 5.0"
            )
        if self.upper < 0:
            raise ConfigurationError(f"epsilon_high={self.epsilon_high} must be at least 0; 0.28 is DAPO's")
        if self.delta is not None and self.loss_type == "cispo":
            raise ConfigurationError(f"delta={self.delta} has no place in loss_type='cispo'; leave it None")
        if self.delta is not None and self.delta <= 1 + self.upper:
            raise ConfigurationError(
                f"delta={self.delta} must be above 1 + epsilon_high = {1 + self.upper}, or it clips inside that range"
            )
        if self.beta < 0:
            raise ConfigurationError(f"beta={self.beta} must be at least 0; 0 trains without a reference model")
        if self.loss_type == "dr_grpo" and (self.max_completion_length or 0) < 1:
            raise ConfigurationError(
                f"max_completion_length={self.max_completion_length} must be at least 1 for loss_type='dr_grpo', "
                "which divides by it; set it to the longest answer allowed"
            )

    @property
    def upper(self) -> float:
        """``epsilon_high`` with its default filled in."""
        if self.epsilon_high is not None:
            return self.epsilon_high
        return CISPO_EPSILON_HIGH if self.loss_type == "cispo" else self.epsilon

    @property
    def needs_reference(self) -> bool:
        return self.beta > 0

    @property
    def entropy(self) -> EntropyMode:
        return "grad" if self.entropy_coef else "metric"

    @property
    def skips_zero_advantages(self) -> bool:
        return not self.beta and not self.entropy_coef

    @property
    def credit_reads_reference(self) -> bool:
        return False

    def credit(self, groups: Sequence[Group], reference: ReferenceLogprobs | None = None) -> list[TrainingSample]:
        rewards = [[episode.reward for episode in group.episodes] for group in groups]
        advantages = grpo_advantages(rewards, self.scale_rewards)
        return [
            training_sample(episode, advantage)
            for group, of_group in zip(groups, advantages, strict=True)
            for episode, advantage in zip(group.episodes, of_group, strict=True)
            if episode.reward is not None and not isnan(episode.reward)
        ]

    def totals(self, samples: Sequence[TrainingSample]) -> StepTotals:
        return step_totals(samples, self.mask_truncated_completions)

    def weights(self, samples: Sequence[TrainingSample], totals: StepTotals | None = None) -> list[float]:
        return sample_weights(
            samples, self.loss_type, totals=totals, max_completion_length=self.max_completion_length,
            mask_truncated_completions=self.mask_truncated_completions,
        )  # fmt: skip

    def loss(self, inputs: LossInputs) -> LossOutputs:
        level = self.importance_sampling_level
        ratio = importance_ratio(inputs, level)
        metrics = policy_metrics(ratio, inputs)
        if self.loss_type == "cispo":
            losses = cispo_surrogate(ratio, inputs.advantages, inputs.logprobs, epsilon_high=self.upper)
            clipped = ((ratio > self.upper) & (inputs.advantages > 0)).float()
            metrics["cispo_clip_ratio"] = mean_metric(clipped, inputs, level)
        else:
            losses = clipped_surrogate(
                ratio, inputs.advantages, epsilon=self.epsilon, epsilon_high=self.upper, delta=self.delta
            )
            metrics |= clip_metrics(ratio, inputs, epsilon=self.epsilon, epsilon_high=self.upper, level=level)
        if inputs.importance is not None:
            losses = losses * inputs.importance
        if self.beta:
            if inputs.ref_logprobs is None:
                raise AssertionError(f"beta={self.beta} needs ref_logprobs in the micro-batch")
            kl = k3_kl(inputs.logprobs, inputs.ref_logprobs)
            kl = kl * ratio if self.use_bias_correction_kl else kl
            losses = losses + self.beta * kl
            metrics["kl"] = mean_metric(kl, inputs)
        loss = weighted_sum(losses, inputs)
        if self.entropy_coef:
            loss = loss + entropy_bonus(inputs, self.entropy_coef)
        return LossOutputs(loss=loss, metrics=metrics)


def training_sample(episode: Episode, advantage: float) -> TrainingSample:
    """``episode`` with ``advantage`` on each of its sampled tokens."""
    return TrainingSample(
        token_ids=episode.token_ids,
        mask=episode.mask,
        logprobs=episode.logprobs,
        versions=episode.versions,
        advantages=tuple(advantage if trained else 0.0 for trained in episode.mask),
        prompt_length=episode.prompt_length,
        group=episode.task.key,
        truncated=episode.truncated,
        episode=episode,
    )


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigurationError(f"{name}={value!r} must be one of {', '.join(allowed)}")
