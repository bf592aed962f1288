"""Pure losses over the trained tokens of a micro-batch, one value per token, and the weights that sum them up.

The loss of an optimizer step is ``sum_n w_n * l_n`` over all its trained tokens n. The weights ``w_n`` are decided
before the step is packed, with denominators over the whole step and all processes, so neither the loss nor its gradient
changes with the split into micro-batches.
"""

from envgrad.losses.corrections import CorrectionMode, entropy_threshold, importance_correction, off_policy_mask
from envgrad.losses.inputs import Distillation, LossInputs, LossOutputs, Metric, merge_metrics
from envgrad.losses.metrics import clip_metrics, extreme_metric, mean_metric, policy_metrics
from envgrad.losses.surrogates import (
    RatioLevel,
    cispo_surrogate,
    clipped_surrogate,
    importance_ratio,
    k3_kl,
    sapo_surrogate,
    vespo_gamma,
)
from envgrad.losses.weights import (
    LossType,
    entropy_bonus,
    is_trained,
    sample_means,
    sample_sums,
    sample_weights,
    step_totals,
    weighted_sum,
)

__all__ = [
    "CorrectionMode",
    "Distillation",
    "LossInputs",
    "LossOutputs",
    "LossType",
    "Metric",
    "RatioLevel",
    "cispo_surrogate",
    "clip_metrics",
    "clipped_surrogate",
    "entropy_bonus",
    "entropy_threshold",
    "extreme_metric",
    "importance_correction",
    "importance_ratio",
    "is_trained",
    "k3_kl",
    "mean_metric",
    "merge_metrics",
    "off_policy_mask",
    "policy_metrics",
    "sample_means",
    "sample_sums",
    "sample_weights",
    "sapo_surrogate",
    "step_totals",
    "vespo_gamma",
    "weighted_sum",
]
