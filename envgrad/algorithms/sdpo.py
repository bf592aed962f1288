"""SDPO: self-distillation policy optimization ("Reinforcement Learning via Self-Distillation", arXiv:2601.20802)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, TypeAlias, get_args

from torch import Tensor

from envgrad.algorithms.base import Algorithm, ReferenceLogprobs, TeacherPlan
from envgrad.algorithms.checks import at_least_zero, changed, one_of, within
from envgrad.algorithms.demonstrations import Reprompting
from envgrad.algorithms.grpo import GRPO
from envgrad.divergence import Divergence
from envgrad.errors import ConfigurationError
from envgrad.logprobs import EntropyMode
from envgrad.losses import (
    Distillation,
    LossInputs,
    LossOutputs,
    Metric,
    importance_ratio,
    is_trained,
    policy_metrics,
    weighted_sum,
)
from envgrad.packing import StepTotals
from envgrad.types import Group, TrainingSample

TeacherKind: TypeAlias = Literal["live", "ema", "base"]
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SDPO(Algorithm):
    """Self-distillation: the policy learns from itself, told how a sibling solved the task or what went wrong.

    The teacher q is the same model (its weights of now, a moving average, or the first ones) whose prompt also holds a
    demonstration c and feedback f. Over the tokens y that the student p sampled itself::

        d_t    = D(p(. | x, y_<t), q(. | x, c, f, y_<t))                       ``Divergence``
        rho_t  = min(p(y_t) / p_old(y_t), distillation_is_clip)                no gradient
        L_sdpo = 1/S sum_i 1/|y_i| sum_t rho_t d_t                             0 for samples without c and f
        loss   = (1 - w) L_policy + w L_sdpo                                   w: distillation_weight

    ``L_policy`` is GRPO's loss. S counts all samples of the step, |y_i| a sample's sampled tokens. A model that makes
    no use of what its prompt shows has q = p and learns nothing. Fields and defaults are trl's.

    Example:
        >>> SDPO().teacher.kind, SDPO(distillation_weight=0.0).teacher
        ('ema', None)
        >>> SDPO(policy=GRPO(beta=0.1))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        envgrad.errors.ConfigurationError: beta=0.1 cannot act: distillation_weight=1.0 leaves the policy's loss ...

    Raises:
        ConfigurationError: a value out of range, or an option that cannot act.
    """

    policy: GRPO = field(default_factory=GRPO)
    divergence: Divergence = field(default_factory=Divergence)
    reprompting: Reprompting = field(default_factory=Reprompting)
    distillation_weight: float = 1.0
    distillation_is_clip: float | None = 2.0
    teacher_model_kind: TeacherKind = "ema"
    teacher_update_rate: float = 0.05
    """``teacher <- (1 - rate) * teacher + rate * student``"""
    teacher_sync_steps: int = 1
    """optimizer steps between two updates of the moving average"""
    diagnostics_warning_interval: int = 10
    diagnostics_flat_tolerance: float = 1e-8

    def __post_init__(self) -> None:
        one_of("teacher_model_kind", self.teacher_model_kind, get_args(TeacherKind))
        within("distillation_weight", self.distillation_weight, 0, 1, "1 distils only, 0 is GRPO")
        if self.distillation_is_clip is not None and not self.distillation_is_clip > 0:
            raise ConfigurationError(
                f"distillation_is_clip={self.distillation_is_clip} must be above 0; None leaves the ratio out"
            )
        if not 0 < self.teacher_update_rate <= 1:
            raise ConfigurationError(
                f"teacher_update_rate={self.teacher_update_rate} must be in (0, 1]; 1 copies the student"
            )
        if self.teacher_sync_steps < 1:
            raise ConfigurationError(f"teacher_sync_steps={self.teacher_sync_steps} must be at least 1")
        at_least_zero("diagnostics_warning_interval", self.diagnostics_warning_interval, "0 never warns")
        at_least_zero("diagnostics_flat_tolerance", self.diagnostics_flat_tolerance, "1e-8 is usual")
        self._check_unused()

    def _check_unused(self) -> None:
        own = [name for name in changed(self, fields(self)) if name.startswith(("teacher_update", "teacher_sync"))]
        if own and self.teacher_model_kind != "ema":
            raise ConfigurationError(
                f"{own[0]} cannot act: only teacher_model_kind='ema' is updated, and it is "
                f"{self.teacher_model_kind!r}; drop it"
            )
        if self.distillation_weight == 1:
            acting = ("max_completion_length", "mask_truncated_completions")
            idle = [name for name in changed(self.policy, fields(GRPO)) if not name.startswith(acting)]
            if idle:
                raise ConfigurationError(
                    f"{idle[0]} cannot act: distillation_weight=1.0 leaves the policy's loss out; lower it, or drop "
                    "the option"
                )
        if self.distillation_weight == 0:
            idle = changed(self, fields(self)) + changed(self.divergence, fields(Divergence))
            idle += changed(self.reprompting, fields(Reprompting))
            idle = [name for name in idle if not name.startswith("distillation_weight")]
            if idle:
                raise ConfigurationError(
                    f"{idle[0]} cannot act: distillation_weight=0.0 has no teacher; raise it, or drop the option"
                )

    @property
    def teacher(self) -> TeacherPlan | None:
        if self.distillation_weight == 0:
            return None
        return TeacherPlan(
            kind=self.teacher_model_kind,
            update_rate=self.teacher_update_rate,
            sync_steps=self.teacher_sync_steps,
            divergence=self.divergence,
            reprompting=self.reprompting,
            warning_interval=self.diagnostics_warning_interval,
            flat_tolerance=self.diagnostics_flat_tolerance,
        )

    @property
    def needs_reference(self) -> bool:
        return self.policy.needs_reference

    @property
    def entropy(self) -> EntropyMode:
        return self.policy.entropy

    @property
    def skips_zero_advantages(self) -> bool:
        return self.policy.skips_zero_advantages

    @property
    def top_entropy_quantile(self) -> float:
        return self.policy.top_entropy_quantile

    def credit(self, groups: Sequence[Group], reference: ReferenceLogprobs | None = None) -> list[TrainingSample]:
        return self.policy.credit(groups, reference)

    def with_reward_weights(self, weights: Mapping[str, float]) -> SDPO:
        return replace(self, policy=self.policy.with_reward_weights(weights))

    def totals(self, samples: Sequence[TrainingSample]) -> StepTotals:
        return self.policy.totals(samples)

    def weights(self, samples: Sequence[TrainingSample], totals: StepTotals | None = None) -> list[float]:
        """The policy's weights; with distillation alone, a sample without a teacher weighs 0."""
        if self.distillation_weight < 1:
            return self.policy.weights(samples, totals)
        count = (totals if totals is not None else self.totals(samples)).num_samples
        masked = self.policy.mask_truncated_completions
        return [
            1.0 / (count * sample.num_trained_tokens)
            if sample.teacher_prompt is not None and is_trained(sample, masked)
            else 0.0
            for sample in samples
        ]

    def loss(self, inputs: LossInputs) -> LossOutputs:
        share = self.distillation_weight
        metrics: dict[str, Metric] = {}
        if share < 1:
            outputs = self.policy.loss(inputs)
            metrics.update(outputs.metrics)
            loss = (1 - share) * outputs.loss
            metrics["self_distillation/policy_loss"] = _total(outputs.loss)
        else:
            metrics.update(policy_metrics(importance_ratio(inputs, "token"), inputs))
            loss = weighted_sum(0.0 * inputs.logprobs, inputs)
        if share == 0 or inputs.distillation is None:
            return LossOutputs(loss=loss, metrics=metrics)
        distilled = self._distilled(inputs, inputs.distillation)
        metrics["self_distillation/distillation_loss"] = Metric(
            value=distilled.detach().sum(), count=distilled.new_tensor(len(distilled))
        )
        return LossOutputs(loss=loss + share * (inputs.distillation.weights * distilled).sum(), metrics=metrics)

    def _distilled(self, inputs: LossInputs, distillation: Distillation) -> Tensor:
        """``rho_t * d_t`` ``(M,)``."""
        losses = distillation.divergence
        if self.distillation_is_clip is not None:
            log_ratio = (inputs.logprobs - inputs.old_logprobs).detach().index_select(0, distillation.index)
            ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
            losses = losses * ratio.clamp(max=self.distillation_is_clip)
        if inputs.importance is not None:
            losses = losses * inputs.importance.index_select(0, distillation.index)
        return losses

    def after_step(self, metrics: Mapping[str, float]) -> None:
        self.policy.after_step(metrics)

    def state_dict(self) -> dict[str, float]:
        return self.policy.state_dict()

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.policy.load_state_dict(state)


def _total(value: Tensor) -> Metric:
    return Metric(value=value.detach(), count=value.new_ones(()), reduce="sum")
