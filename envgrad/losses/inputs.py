"""What a loss sees of a micro-batch, and what it gives back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from envgrad.logprobs import PolicyOutputs
from envgrad.packing import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation:
    """The divergence from a teacher: M of the micro-batch's N tokens. All tensors are ``(M,)``."""

    divergence: Tensor
    """with gradient (``divergence.Divergence``)"""
    index: Tensor
    """int64, ascending: which of the N tokens each is"""
    weights: Tensor
    """``1 / (samples in the whole step * trained tokens of the sample)``: a mean over samples of means over tokens, in
    which samples without a teacher count as 0"""

    @classmethod
    def of(cls, micro_batch: MicroBatch, outputs: PolicyOutputs) -> Distillation | None:
        if micro_batch.teacher is None or outputs.divergence is None:
            return None
        index = micro_batch.teacher.index
        sizes = torch.bincount(micro_batch.sample_index, minlength=micro_batch.num_samples)[micro_batch.sample_index]
        weights = 1.0 / (micro_batch.total_samples * sizes.index_select(0, index).float())
        return cls(divergence=outputs.divergence, index=index, weights=weights)


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
    selected: Tensor | None = None
    """1 for tokens whose surrogate counts, 0 for the others; None: all count"""
    total_selected: float = 0.0
    """selected tokens in the whole step; read only beside ``selected``"""
    distillation: Distillation | None = None
    """the divergence from a teacher, where samples have one"""

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
            selected=micro_batch.selected,
            total_selected=micro_batch.total_selected,
            distillation=Distillation.of(micro_batch, outputs),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A part of a metric: parts of many micro-batches and processes merge into one value without averaging averages."""

    value: Tensor
    """scalar: a sum for ``mean`` and ``sum``, else the extremum"""
    count: Tensor
    """scalar: how many tokens (or sequences) ``value`` covers; a part with count 0 does not exist"""
    reduce: Literal["mean", "sum", "max", "min"] = "mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutputs:
    """A micro-batch's share of the step's loss (a scalar with gradient) and of its metrics."""

    loss: Tensor
    metrics: Mapping[str, Metric]


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, float]:
    """Merge the metrics of micro-batches (and processes); names without any counted token are left out.

    Example:
        >>> import torch
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
        elif reduce == "sum":
            merged[name] = sum(values)
        else:
            merged[name] = max(values) if reduce == "max" else min(values)
    return merged
