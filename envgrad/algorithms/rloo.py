"""RLOO: REINFORCE with a leave-one-out baseline (Ahmadian et al., "Back to Basics", arXiv:2402.14740)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import Literal

from torch import Tensor

from envgrad.advantages import rloo_advantages
from envgrad.algorithms.base import Algorithm, ReferenceLogprobs
from envgrad.algorithms.checks import CREDIT, LOSS, at_least_zero, lower_clip, one_of
from envgrad.algorithms.credit import group_rewards, is_scored, training_samples
from envgrad.errors import ConfigurationError
from envgrad.losses import (
    LossInputs,
    LossOutputs,
    clip_metrics,
    clipped_surrogate,
    is_trained,
    mean_metric,
    policy_metrics,
    sample_means,
    sample_sums,
    step_totals,
)
from envgrad.packing import StepTotals
from envgrad.types import Episode, Group, TrainingSample

KL_ROUNDING = 1e-5
"""per token: what two ways to compute one log-prob may differ by"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RLOO(Algorithm):
    """Leave-one-out REINFORCE with the whole answer as one action. Fields and defaults are trl's.

    ::

        kl_i   = sum over the sampled tokens of  sampler's logp - reference's logp
        R_i    = clip(reward_i, reward_clip_range) - beta * kl_i             the KL is taken off after clipping
        A_i    = R_i - mean of the siblings' R                               (equation 8); normalised over the batch
                                                                             with ``normalize_advantages``
        r_i    = exp(sum over the tokens of  logp - old logp)                of the whole sequence
        loss   = mean over the step's sequences of  -min(r * A, clip(r, 1 - epsilon, 1 + epsilon_high) * A)

    At r = 1 the gradient is ``-A_i`` times that of the sequence's log-prob: REINFORCE. The baseline does not depend on
    the episode itself, so the gradient is unbiased. Assumes that siblings answer one task.

    A ``kl_i`` within rounding (1e-5 per token) counts as 0, so that equal rewards teach exactly nothing while policy
    and reference are one. A masked truncated episode still counts in the baseline, with its KL, and in the mean.

    Example:
        >>> RLOO(reward_clip_range=(1.0, -1.0))
        Traceback (most recent call last):
        envgrad.errors.ConfigurationError: reward_clip_range=(1.0, -1.0) must be (low, high) with low < high
    """

    beta: float = field(default=0.05, metadata=CREDIT)
    epsilon: float = field(default=0.2, metadata=LOSS)
    epsilon_high: float | None = field(default=None, metadata=LOSS)
    normalize_advantages: bool = field(default=False, metadata=CREDIT)
    reward_clip_range: tuple[float, float] | None = field(default=None, metadata=CREDIT)
    baseline: Literal["group", "batch"] = field(default="group", metadata=CREDIT)
    """``batch`` leaves one out of all episodes instead of the siblings: for groups that do not share a task"""
    mask_truncated_completions: bool = False

    def __post_init__(self) -> None:
        lower_clip(self.epsilon)
        at_least_zero("epsilon_high", self.upper, "0.28 is DAPO's")
        at_least_zero("beta", self.beta, "0 trains without a reference model")
        one_of("baseline", self.baseline, ("group", "batch"))
        if self.reward_clip_range is not None:
            bounds = tuple(self.reward_clip_range)
            if len(bounds) != 2 or not bounds[0] < bounds[1]:
                raise ConfigurationError(
                    f"reward_clip_range={self.reward_clip_range} must be (low, high) with low < high"
                )

    @property
    def upper(self) -> float:
        """``epsilon_high`` with its default filled in."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def compares_siblings(self) -> bool:
        return self.baseline == "group"

    @property
    def credit_reads_reference(self) -> bool:
        return self.beta > 0

    @property
    def skips_zero_advantages(self) -> bool:
        return True

    def credit(self, groups: Sequence[Group], reference: ReferenceLogprobs | None = None) -> list[TrainingSample]:
        if self.beta and reference is None:
            raise AssertionError(f"beta={self.beta} needs the reference's log-probs for credit")
        known: ReferenceLogprobs = reference if self.beta and reference is not None else {}
        rewards = [
            [
                None if reward is None else self._penalised(episode, reward, known)
                for episode, reward in zip(group.episodes, of_group, strict=True)
            ]
            for group, of_group in zip(groups, group_rewards(groups), strict=True)
        ]
        advantages = rloo_advantages(rewards, self.normalize_advantages, baseline=self.baseline)
        return [
            sample
            for group, of_group in zip(groups, advantages, strict=True)
            for episode, advantage in zip(group.episodes, of_group, strict=True)
            if is_scored(episode)
            for sample in training_samples(episode, advantage, ref_logprobs=known.get(episode.key))
        ]

    def _penalised(self, episode: Episode, reward: float, known: ReferenceLogprobs) -> float:
        if self.reward_clip_range is not None:
            low, high = self.reward_clip_range
            reward = min(max(reward, low), high)
        of_reference = known.get(episode.key)
        if of_reference is None:
            return reward
        return reward - self.beta * sequence_kl(episode, of_reference)

    def totals(self, samples: Sequence[TrainingSample]) -> StepTotals:
        return step_totals(samples, self.mask_truncated_completions)

    def weights(self, samples: Sequence[TrainingSample], totals: StepTotals | None = None) -> list[float]:
        if totals is None:
            totals = self.totals(samples)
        return [
            1.0 / totals.num_samples if is_trained(sample, self.mask_truncated_completions) else 0.0
            for sample in samples
        ]

    def loss(self, inputs: LossInputs) -> LossOutputs:
        def means(values: Tensor) -> Tensor:
            return sample_means(values, inputs.sample_index, inputs.num_samples)

        log_ratio = sample_sums(inputs.logprobs - inputs.old_logprobs, inputs.sample_index, inputs.num_samples)
        # Far above any clip; e^89 would be infinite, and infinity times a clipped token's zero gradient is NaN.
        ratio = log_ratio.clamp(max=20.0).exp()
        losses = clipped_surrogate(ratio, means(inputs.advantages), epsilon=self.epsilon, epsilon_high=self.upper)
        if inputs.importance is not None:
            losses = losses * means(inputs.importance)
        of_tokens = ratio[inputs.sample_index]
        metrics = policy_metrics(of_tokens, inputs) | clip_metrics(
            of_tokens, inputs, epsilon=self.epsilon, epsilon_high=self.upper, level="sequence"
        )
        if inputs.ref_logprobs is not None:
            metrics["kl"] = mean_metric(inputs.sampler_logprobs - inputs.ref_logprobs, inputs)
        return LossOutputs(loss=(losses * means(inputs.weights)).sum(), metrics=metrics)


def sequence_kl(episode: Episode, reference: Sequence[float]) -> float:
    """One sample's estimate of the KL to the reference, in nats: the sum of ``log p - log p_ref`` over sampled tokens.

    Unbiased, and negative for some samples. Within rounding of 0 it is 0.

    Args:
        episode: Its log-probs are the sampler's.
        reference: The reference's log-probs of the sampled tokens, in order, row after row.
    """
    own = [logprob for row in episode.rows for logprob, trained in zip(row.logprobs, row.mask, strict=True) if trained]
    kl = fsum(own) - fsum(reference)
    return kl if abs(kl) > KL_ROUNDING * len(own) else 0.0
