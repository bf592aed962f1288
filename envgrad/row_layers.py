"""How packed rows go through a model's layers otherwise than plain ones, where it gives the model's own numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from envgrad.attention import use_envgrad_attention
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
    ids = random_ids(model, 8)
    positions = torch.arange(8, device=ids.device)[None]
    layout, wanted = PackedLayout.build([(2, (4, 2))]), torch.tensor([2, 5, 6], device=ids.device)
    before: str = model.config._attn_implementation

    def agrees(row: PackedLayout | Predicting, expected: Tensor) -> bool:
        try:
            found = last_hidden(ids, positions, row)
        except (TypeError, ValueError, NotImplementedError, RuntimeError):
            return False
        return found.shape == expected.shape and relative_difference(found, expected) <= rounding(expected)

    with probing(model):
        try:
            use_envgrad_attention(model)
            whole = last_hidden(ids, positions, layout)
            chosen = whole[:, wanted]
            chooses_rows = chooses_rows and install_last_layer(model) is not None
            if chooses_rows and not agrees(Predicting(layout, wanted), chosen):
                chooses_rows = False
                remove_last_layer(model)
            if install_fused_layers(model) and not (
                agrees(layout, whole) and (not chooses_rows or agrees(Predicting(layout, wanted), chosen))
            ):
                remove_fused_layers(model)
        except (TypeError, ValueError, NotImplementedError, RuntimeError):  # it takes no packed rows
            return False
        finally:
            if model.config._attn_implementation != before:
                model.set_attn_implementation(before)
    return chooses_rows


def remove_row_layers(model: PreTrainedModel) -> None:
    """Take them out again, where nobody has wrapped them since."""
    remove_fused_layers(model)
    remove_last_layer(model)
