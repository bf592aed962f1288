"""How packed rows go through a model's layers otherwise than plain ones, where it gives the model's own numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from envgrad.attention import use_envgrad_attention
from envgrad.environments.boundary import Ok, guard
from envgrad.fused_layers import install_fused_layers, remove_fused_layers
from envgrad.last_layer import Predicting, install_last_layer, remove_last_layer
from envgrad.layout import PackedLayout
from envgrad.probing import probing, random_ids, relative_difference, rounding

LastHidden: TypeAlias = Callable[[Tensor, Tensor, PackedLayout | Predicting], Tensor]
"""``(1, T)`` ids and positions, and a layout -> ``(1, T, D)`` last hidden states"""


def install_row_layers(model: PreTrainedModel, last_hidden: LastHidden, *, chooses_rows: bool) -> bool:
    """Install ``last_layer`` (if ``chooses_rows``) and ``fused_layers``, each compared on a random row.

    Args:
        model: A causal language model.
        last_hidden: Of this model's decoder.
        chooses_rows: Whether nothing but last hidden states is read, so that some may be left out.

    Returns:
        Whether the last layer can be computed for the predicting tokens only.
    """
    remove_row_layers(model)
    ids = random_ids(model, 8)
    positions = torch.arange(8, device=ids.device)[None]
    layout, wanted = PackedLayout.build([(2, (4, 2))]), torch.tensor([2, 5, 6], device=ids.device)
    before: str = model.config._attn_implementation
    with probing(model):
        try:
            use_envgrad_attention(model)
            probe = _Probe(last_hidden, ids, positions, layout, wanted)
            whole = probe.of(layout)
            if whole is None:  # it takes no packed rows
                return False
            chooses_rows = chooses_rows and install_last_layer(model) is not None
            if chooses_rows and not probe.agrees(whole, chooses=True):
                chooses_rows = False
                remove_last_layer(model)
            fused = install_fused_layers(model)
            if not (probe.agrees(whole, chooses=chooses_rows) and all(one.has_run for one in fused)):
                remove_fused_layers(model)
        finally:
            if model.config._attn_implementation != before:
                model.set_attn_implementation(before)
    return chooses_rows


@dataclass(frozen=True, slots=True)
class _Probe:
    """A small random row, and what a model's layers make of it."""

    last_hidden: LastHidden
    ids: Tensor
    positions: Tensor
    layout: PackedLayout
    wanted: Tensor
    """tokens whose outputs are read, where some are chosen"""

    def of(self, row: PackedLayout | Predicting) -> Tensor | None:
        """None where the model cannot compute it; a model is anybody's code."""
        found = guard(self.last_hidden, self.ids, self.positions, row)
        return found.value if isinstance(found, Ok) and isinstance(found.value, Tensor) else None

    def agrees(self, whole: Tensor, *, chooses: bool) -> bool:
        """Whether it is ``whole`` again, and as much of it as is read."""
        expected: list[tuple[PackedLayout | Predicting, Tensor]] = [(self.layout, whole)]
        if chooses:
            expected.append((Predicting(self.layout, self.wanted), whole[:, self.wanted]))
        return all(_same(self.of(row), one) for row, one in expected)


def _same(found: Tensor | None, expected: Tensor) -> bool:
    if found is None or found.shape != expected.shape:
        return False
    return relative_difference(found, expected) <= rounding(expected)


def remove_row_layers(model: PreTrainedModel) -> None:
    """Take them out again, where nobody has wrapped them since."""
    remove_fused_layers(model)
    remove_last_layer(model)
