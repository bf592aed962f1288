"""Small forwards that tell whether a way of our own through a model gives the numbers of the model's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def random_ids(model: PreTrainedModel, count: int) -> Tensor:
    """``(1, count)`` from a generator of its own, so that nobody's random stream moves."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, int(vocabulary), (1, count), generator=generator).to(model.device)


def rounding(x: Tensor) -> float:
    return 1e-5 if x.dtype == torch.float32 else 5e-2


def relative_difference(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).abs().max() / b.float().abs().max().clamp(min=1e-12))


@contextmanager
def probing(model: nn.Module) -> Iterator[None]:
    """No gradients, dropout off; every module's mode is put back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
