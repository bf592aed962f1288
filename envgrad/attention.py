"""One attention function, registered with transformers, that reads its layout from the call.

``model(input_ids, position_ids=..., attention_mask=no_mask(), attention_layout=layout)`` hands ``layout`` through to
every layer, which then attends as the layout says: packed training rows (``layout.PackedLayout``) or ragged decoding
rows over kept keys and values (``sampling.kv_cache``). Without a layout, transformers' own SDPA runs, so a model that
carries this implementation behaves as any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

IMPLEMENTATION = "envgrad"

NOT_EXPRESSED = ("softcap", "s_aux", "position_bias", "head_mask")
"""arguments that change what attention computes; small random activations may not show it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """What a layer asks for besides queries, keys and values."""

    layer: int
    scaling: float | None
    dropout: float
    window: int | None
    """sliding window in tokens (query attends to itself and ``window - 1`` before it); None for all"""


class AttentionLayout(Protocol):
    """How the tokens of one flat row (batch size 1) attend to each other.

    Shapes: query ``(1, Hq, T, D)``, key and value ``(1, Hkv, T, D)``, result ``(1, T, Hq, Dv)``.
    """

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor: ...


def no_mask(device: torch.device | str) -> Tensor:
    """A 4-D mask that tells transformers not to build one (it returns 4-D masks as they are); layouts ignore it."""
    return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)


def envgrad_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    attention_layout: AttentionLayout | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in every layer."""
    if attention_layout is None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
            sliding_window=sliding_window, **kwargs,
        )  # fmt: skip
        return output, None
    changed = [name for name in NOT_EXPRESSED if kwargs.get(name) is not None]
    if changed:
        raise NotImplementedError(f"attention with {', '.join(changed)} is not a plain softmax over keys")
    if query.dtype != value.dtype:  # autocast: projections in half precision, rotary embeddings in float32
        query, key = query.to(value.dtype), key.to(value.dtype)
    layer: Any = module.layer_idx
    call = AttentionCall(layer=int(layer), scaling=scaling, dropout=dropout, window=sliding_window)
    return attention_layout.attend(call, query, key, value), None


def use_envgrad_attention(model: PreTrainedModel) -> str:
    """Switch ``model`` to our attention function and return the implementation it had.

    Models whose attention cannot be expressed here (softcapping, sinks, ALiBi, linear attention) are found by what they
    pass to it and by comparing a packed and a cached forward with the plain one (``sampling.compatibility``,
    ``logprobs``), not by their names.
    """
    AttentionInterface.register(IMPLEMENTATION, envgrad_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
    previous: str = model.config._attn_implementation
    model.set_attn_implementation(IMPLEMENTATION)
    return previous
