"""GRPO (Shao et al., "DeepSeekMath", arXiv:2402.03300) and the losses that grew out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, get_args

from torch import Tensor

from envgrad.advantages import gdpo_advantages, grpo_advantages, turn_advantages
from envgrad.algorithms.base import Algorithm, ReferenceLogprobs
from envgrad.algorithms.checks import (
    CREDIT,
    LOSS,
    above_zero,
    at_least_zero,
    lower_clip,
    one_of,
    unused,
    within,
)
from envgrad.algorithms.credit import (
    component_rewards,
    group_rewards,
    is_scored,
    training_sample,
    training_samples,
    turn_rewards,
    turn_samples,
)
from envgrad.algorithms.entropy_control import EntropyController
from envgrad.errors import ConfigurationError
from envgrad.logprobs import EntropyMode
from envgrad.losses import (
    LossInputs,
    LossOutputs,
    LossType,
    Metric,
    RatioLevel,
    cispo_surrogate,
    clip_metrics,
    clipped_surrogate,
    entropy_bonus,
    importance_ratio,
    k3_kl,
    mean_metric,
    off_policy_mask,
    policy_metrics,
    sample_weights,
    sapo_surrogate,
    step_totals,
    vespo_gamma,
    weighted_sum,
)
from envgrad.packing import StepTotals
from envgrad.types import Group, TrainingSample

__all__ = ["GRPO", "training_sample"]

CISPO_EPSILON_HIGH = 5.0
CLIPPED = ("grpo", "bnpo", "dapo", "dr_grpo", "luspo")
"""loss types whose surrogate is PPO's clipped one; they differ in their weights"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPO(Algorithm):
    """Group-relative policy optimization. Fields and defaults are trl's, except ``epsilon_high`` for ``cispo``.

    ::

        A      = (reward - mean of its group) / (std of its group + 1e-4)    the same on each sampled token
        r      = exp(logp - old logp)                                        per token, or per sequence (GSPO)
        l      = -min(r * A, clip(r, 1 - epsilon, 1 + epsilon_high) * A)     cispo, sapo, vespo: ``losses``
        l      = m * l + beta * KL(policy || reference)                      m: masks and sampler correction
        loss   = sum over tokens of w * l  -  entropy_coef * mean entropy    w by ``loss_type``

    Assumes that siblings answer one task. A group of equal rewards has advantage 0 and teaches nothing.
    ``multi_objective_aggregation="normalize_then_sum"`` is GDPO: each reward component is normalised in its group.
    ``credit_level="turn"`` gives each turn an advantage of its own (``advantages.turn_advantages``, which says how the
    baseline is biased). ``loss_type="luspo"`` is meant for ``importance_sampling_level="sequence"``.

    Example:
        >>> GRPO(loss_type="dr_grpo", scale_rewards="none", max_completion_length=256).entropy
        'metric'
        >>> GRPO(epsilon=1.5)
        Traceback (most recent call last):
        envgrad.errors.ConfigurationError: epsilon=1.5 must be in [0, 1): it is the lower clip 1 - epsilon; 0.2 is usual
    """

    loss_type: LossType = "dapo"
    scale_rewards: Literal["group", "batch", "none"] = field(default="group", metadata=CREDIT)
    baseline: Literal["group", "batch"] = field(default="group", metadata=CREDIT)
    """``batch`` compares with all episodes instead of the siblings: for groups that do not share a task"""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = field(
        default="sum_then_normalize", metadata=CREDIT
    )
    credit_level: Literal["episode", "turn"] = field(default="episode", metadata=CREDIT)
    turn_discount: float = field(default=1.0, metadata=CREDIT)
    """what a turn's return counts of the next turn's"""
    reward_weights: Mapping[str, float] | None = field(default=None, metadata=CREDIT)
    """of reward components, where credit reads them or turn rewards; ``Episode.reward`` is weighted already"""
    epsilon: float = field(default=0.2, metadata=LOSS)
    epsilon_high: float | None = field(default=None, metadata=LOSS)
    """None: ``epsilon``; for ``cispo`` the bound itself, None: 5"""
    delta: float | None = field(default=None, metadata=LOSS)
    sapo_temperature_pos: float = field(default=1.0, metadata=LOSS)
    sapo_temperature_neg: float = field(default=1.05, metadata=LOSS)
    vespo_k_pos: float = field(default=2.0, metadata=LOSS)
    vespo_lambda_pos: float = field(default=3.0, metadata=LOSS)
    vespo_k_neg: float = field(default=3.0, metadata=LOSS)
    vespo_lambda_neg: float = field(default=2.0, metadata=LOSS)
    importance_sampling_level: RatioLevel = field(default="token", metadata=LOSS)
    off_policy_mask_threshold: float | None = field(default=None, metadata=LOSS)
    """mean log-prob drift above which sequences with A < 0 are dropped; None drops none"""
    beta: float = 0.0
    use_bias_correction_kl: bool = field(default=True, metadata=LOSS)
    """multiply the KL by the ratio, so that its gradient is that of the reverse KL (arXiv:2512.02556)"""
    top_entropy_quantile: float = 1.0
    """share of tokens, those of the highest entropy, whose surrogate counts (arXiv:2506.01939); KL and denominators
    stay over all tokens, the entropy bonus is over the share"""
    entropy_coef: float = field(default=0.0, metadata=LOSS)
    use_adaptive_entropy: bool = field(default=False, metadata=LOSS)
    """move ``entropy_coef`` towards ``entropy_target``: see ``EntropyController``"""
    entropy_coef_min: float = field(default=0.0, metadata=LOSS)
    entropy_coef_max: float = field(default=1.0, metadata=LOSS)
    entropy_coef_delta: float = field(default=0.005, metadata=LOSS)
    entropy_target: float = field(default=0.2, metadata=LOSS)
    mask_truncated_completions: bool = False
    max_completion_length: int | None = None
    """``dr_grpo``'s divisor"""
    controller: EntropyController | None = field(init=False, default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_credit(self)
        _check_loss(self)
        _check_surrogate(self)
        if self.use_adaptive_entropy:
            controller = EntropyController(
                coefficient=self.entropy_coef, target=self.entropy_target, delta=self.entropy_coef_delta,
                least=self.entropy_coef_min, most=self.entropy_coef_max,
            )  # fmt: skip
            object.__setattr__(self, "controller", controller)

    @property
    def upper(self) -> float:
        """``epsilon_high`` with its default filled in."""
        if self.epsilon_high is not None:
            return self.epsilon_high
        return CISPO_EPSILON_HIGH if self.loss_type == "cispo" else self.epsilon

    @property
    def compares_siblings(self) -> bool:
        return self.baseline == "group"

    @property
    def needs_reference(self) -> bool:
        return self.beta > 0

    @property
    def has_entropy_bonus(self) -> bool:
        return bool(self.entropy_coef) or self.use_adaptive_entropy

    @property
    def entropy(self) -> EntropyMode:
        return "grad" if self.has_entropy_bonus else "metric"

    @property
    def skips_zero_advantages(self) -> bool:
        return not self.beta and not self.has_entropy_bonus

    def credit(self, groups: Sequence[Group], reference: ReferenceLogprobs | None = None) -> list[TrainingSample]:
        weights = self.reward_weights or {}
        if self.credit_level == "turn":
            by_turn = turn_advantages(turn_rewards(groups, weights), self.turn_discount, self.scale_rewards)
            return [
                sample
                for group, of_group in zip(groups, by_turn, strict=True)
                for episode, advantages in zip(group.episodes, of_group, strict=True)
                if is_scored(episode) and episode.turns
                for sample in turn_samples(episode, advantages)
            ]
        if self.multi_objective_aggregation == "normalize_then_sum":
            by_episode = gdpo_advantages(*component_rewards(groups, weights))
        else:
            by_episode = grpo_advantages(group_rewards(groups), self.scale_rewards, baseline=self.baseline)
        return [
            sample
            for group, of_group in zip(groups, by_episode, strict=True)
            for episode, advantage in zip(group.episodes, of_group, strict=True)
            if is_scored(episode)
            for sample in training_samples(episode, advantage)
        ]

    def with_reward_weights(self, weights: Mapping[str, float]) -> GRPO:
        reads = self.credit_level == "turn" or self.multi_objective_aggregation == "normalize_then_sum"
        return replace(self, reward_weights=dict(weights)) if reads and weights else self

    def totals(self, samples: Sequence[TrainingSample]) -> StepTotals:
        return step_totals(samples, self.mask_truncated_completions)

    def weights(self, samples: Sequence[TrainingSample], totals: StepTotals | None = None) -> list[float]:
        return sample_weights(
            samples, self.loss_type, totals=totals, max_completion_length=self.max_completion_length,
            mask_truncated_completions=self.mask_truncated_completions,
        )  # fmt: skip

    def loss(self, inputs: LossInputs) -> LossOutputs:
        ratio = importance_ratio(inputs, self.importance_sampling_level)
        metrics = policy_metrics(ratio, inputs)
        losses = self._surrogate(ratio, inputs, metrics)
        if self.off_policy_mask_threshold is not None:
            kept = off_policy_mask(inputs, self.off_policy_mask_threshold)
            metrics["off_policy_mask_ratio"] = mean_metric(1 - kept, inputs, "sequence")
            losses = losses * kept
        if inputs.selected is not None:
            losses = losses * inputs.selected
        if self.beta:
            if inputs.ref_logprobs is None:
                raise AssertionError(f"beta={self.beta} needs ref_logprobs in the micro-batch")
            kl = k3_kl(inputs.logprobs, inputs.ref_logprobs)
            kl = kl * ratio if self.use_bias_correction_kl else kl
            losses = losses + self.beta * kl
            metrics["kl"] = mean_metric(kl, inputs)
        loss = weighted_sum(losses, inputs)
        if self.has_entropy_bonus:
            loss = self._with_bonus(loss, inputs, metrics)
        return LossOutputs(loss=loss, metrics=metrics)

    def _surrogate(self, ratio: Tensor, inputs: LossInputs, metrics: dict[str, Metric]) -> Tensor:
        """``(N,)`` losses with the sampler's correction; metrics of clipping are added to ``metrics``."""
        level, advantages = self.importance_sampling_level, inputs.advantages
        if self.loss_type == "vespo":
            phi = vespo_gamma(
                inputs, k_pos=self.vespo_k_pos, lambda_pos=self.vespo_lambda_pos, k_neg=self.vespo_k_neg,
                lambda_neg=self.vespo_lambda_neg,
            )  # fmt: skip
            metrics["vespo/phi_seq_mean"] = mean_metric(phi, inputs, "sequence")
            return -phi * advantages * inputs.logprobs  # phi has the correction in it
        if self.loss_type == "cispo":
            losses = cispo_surrogate(ratio, advantages, inputs.logprobs, epsilon_high=self.upper)
            metrics["cispo_clip_ratio"] = mean_metric(((ratio > self.upper) & (advantages > 0)).float(), inputs, level)
        elif self.loss_type == "sapo":
            losses = sapo_surrogate(
                ratio, advantages, temperature_pos=self.sapo_temperature_pos, temperature_neg=self.sapo_temperature_neg
            )
        else:
            losses = clipped_surrogate(
                ratio, advantages, epsilon=self.epsilon, epsilon_high=self.upper, delta=self.delta
            )
            metrics.update(clip_metrics(ratio, inputs, epsilon=self.epsilon, epsilon_high=self.upper, level=level))
        return losses if inputs.importance is None else losses * inputs.importance

    def _with_bonus(self, loss: Tensor, inputs: LossInputs, metrics: dict[str, Metric]) -> Tensor:
        counted = (inputs.weights > 0).any().float()
        coefficient = self.entropy_coef if self.controller is None else self.controller.coefficient
        applied = self.entropy_coef if self.controller is None else self.controller.applied
        metrics["policy_loss"] = Metric(value=loss.detach(), count=counted, reduce="sum")
        metrics["entropy_coef"] = Metric(value=counted * coefficient, count=counted)
        if inputs.selected is not None and inputs.entropy is not None:
            acted_on = inputs.selected * (inputs.weights > 0)
            total = (inputs.entropy.detach() * acted_on).sum()
            metrics["entropy/selected"] = Metric(value=total, count=acted_on.sum())
        return loss + entropy_bonus(inputs, applied)

    def after_step(self, metrics: Mapping[str, float]) -> None:
        entropy = metrics.get("entropy/selected", metrics.get("entropy"))
        if self.controller is not None and entropy is not None:
            self.controller.update(entropy)

    def state_dict(self) -> dict[str, float]:
        return {} if self.controller is None else self.controller.state_dict()

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        if self.controller is not None:
            self.controller.load_state_dict(state)


def _check_credit(grpo: GRPO) -> None:
    one_of("scale_rewards", grpo.scale_rewards, ("group", "batch", "none"))
    one_of(
        "multi_objective_aggregation", grpo.multi_objective_aggregation, ("sum_then_normalize", "normalize_then_sum")
    )
    one_of("credit", grpo.credit_level, ("episode", "turn"))
    within("turn_discount", grpo.turn_discount, 0, 1, "1 counts later turns fully")
    by_component = grpo.multi_objective_aggregation == "normalize_then_sum"
    by_turn = grpo.credit_level == "turn"
    if by_component and by_turn:
        raise ConfigurationError(
            "credit='turn' and multi_objective_aggregation='normalize_then_sum' contradict each other: components are "
            "of whole episodes; choose one"
        )
    if by_component and grpo.scale_rewards != "group":
        raise ConfigurationError(
            f"scale_rewards={grpo.scale_rewards!r} cannot act beside multi_objective_aggregation='normalize_then_sum', "
            "which divides each component by its deviation in the group, and the sums by theirs in the batch; leave it "
            "at 'group'"
        )
    one_of("baseline", grpo.baseline, ("group", "batch"))
    if grpo.baseline == "batch":
        if by_turn or by_component:
            beside = "credit='turn'" if by_turn else "multi_objective_aggregation='normalize_then_sum'"
            raise ConfigurationError(f"baseline='batch' cannot act beside {beside}, which compares siblings")
        if grpo.scale_rewards == "group":
            raise ConfigurationError(
                "scale_rewards='group' cannot act beside baseline='batch': a group's deviation says nothing of the "
                "batch's mean; set scale_rewards to 'batch' or 'none'"
            )
    if not by_turn:
        unused(grpo, fields(grpo), "turn_discount", "credit='episode' has no turns")
    if grpo.reward_weights and not (by_component or by_turn):
        raise ConfigurationError(
            f"reward_weights={dict(grpo.reward_weights)} cannot act: credit reads Episode.reward, which the rollout "
            "has weighted; give reward_weights to the configuration"
        )


def _check_loss(grpo: GRPO) -> None:
    one_of("loss_type", grpo.loss_type, get_args(LossType))
    one_of("importance_sampling_level", grpo.importance_sampling_level, get_args(RatioLevel))
    at_least_zero("beta", grpo.beta, "0 trains without a reference model")
    within("top_entropy_quantile", grpo.top_entropy_quantile, 0, 1, "1 trains all tokens, 0.2 is the paper's")
    if grpo.off_policy_mask_threshold is not None:
        above_zero("off_policy_mask_threshold", grpo.off_policy_mask_threshold, "None masks nothing")
    if not grpo.use_adaptive_entropy:
        unused(grpo, fields(grpo), "entropy_coef_", "use_adaptive_entropy is off")
        unused(grpo, fields(grpo), "entropy_target", "use_adaptive_entropy is off")
    if grpo.loss_type == "dr_grpo" and (grpo.max_completion_length or 0) < 1:
        raise ConfigurationError(
            f"max_completion_length={grpo.max_completion_length} must be at least 1 for loss_type='dr_grpo', "
            "which divides by it; set it to the longest answer allowed"
        )


def _check_surrogate(grpo: GRPO) -> None:
    loss_type = grpo.loss_type
    if loss_type in ("sapo", "vespo"):
        unused(grpo, fields(grpo), "epsilon", f"loss_type={loss_type!r} clips nothing")
    lower_clip(grpo.epsilon)
    if loss_type == "cispo" and grpo.upper < 1:
        raise ConfigurationError(
            f"epsilon_high={grpo.epsilon_high} must be at least 1 for loss_type='cispo': it bounds the ratio "
            "itself, and would shrink even an unchanged policy's; leave it None for 5.0"
        )
    at_least_zero("epsilon_high", grpo.upper, "0.28 is DAPO's")
    if grpo.delta is not None and loss_type not in CLIPPED:
        raise ConfigurationError(f"delta={grpo.delta} has no place in loss_type={loss_type!r}; leave it None")
    if grpo.delta is not None and grpo.delta <= 1 + grpo.upper:
        raise ConfigurationError(
            f"delta={grpo.delta} must be above 1 + epsilon_high = {1 + grpo.upper}, or it clips inside that range"
        )
    if loss_type == "sapo":
        for name in ("sapo_temperature_pos", "sapo_temperature_neg"):
            above_zero(name, getattr(grpo, name), "the gate is a sigmoid of temperature * (ratio - 1)")
    else:
        unused(grpo, fields(grpo), "sapo_", f"loss_type={loss_type!r} has no soft gate")
    if loss_type == "vespo":
        for name in ("vespo_k_pos", "vespo_k_neg"):
            at_least_zero(name, getattr(grpo, name), "it is the power of the sequence's ratio")
        for name in ("vespo_lambda_pos", "vespo_lambda_neg"):
            above_zero(name, getattr(grpo, name), "it is the decay of the sequence's ratio")
        unused(grpo, fields(grpo), "importance_sampling_level", "loss_type='vespo' weighs whole sequences by itself")
    else:
        unused(grpo, fields(grpo), "vespo_", f"loss_type={loss_type!r} has no gamma weights")
