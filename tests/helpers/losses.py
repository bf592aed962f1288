"""Micro-batches and samples made by hand."""

from __future__ import annotations

import torch

from envgrad.losses import LossInputs
from envgrad.types import TrainingSample


def row(trained: int, *, truncated: bool = False, untrained: int = 1) -> TrainingSample:
    size = 2 + trained + untrained
    mask = (0, 0) + (1,) * trained + (0,) * untrained
    return TrainingSample(
        token_ids=(1,) * size, mask=mask, logprobs=(0.0,) * size, versions=(0,) * size, advantages=(0.0,) * size,
        prompt_length=2, group="g", truncated=truncated,
    )  # fmt: skip


def inputs(ratios: list[float], advantages: list[float], sample_index: list[int] | None = None) -> LossInputs:
    """Weights 1; old log-probs -1, the policy's such that its ratio to them is ``ratios``."""
    size = len(ratios)
    old = -torch.ones(size)
    return LossInputs(
        logprobs=(old + torch.tensor(ratios).log()).requires_grad_(), old_logprobs=old, sampler_logprobs=old,
        advantages=torch.tensor(advantages), weights=torch.ones(size),
        sample_index=torch.tensor(sample_index or [0] * size), num_samples=1 + max(sample_index or [0]),
        total_tokens=size,
    )  # fmt: skip
