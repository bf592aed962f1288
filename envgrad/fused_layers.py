"""Decoder layers of packed rows on a CPU, with kernels for what lies between their matrix products.

A layer's own linear layers compute its products, adapters included; norms, rotations and gated activations are calls of
``native.layers``, which take less time and keep less for the backward than torch's operations. Only rows of ours in
float32 go this way, through layers that nobody has changed or hooked: any other call is as before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from envgrad.attention import AttentionCall, AttentionLayout
from envgrad.last_layer import LastLayer, Predicting
from envgrad.layout import PackedLayout
from envgrad.native.compiler import library
from envgrad.native.layers import add_norm, gated, gated_linear, rotate
from envgrad.native.memory import can_compute
from envgrad.sampling.decoder_shape import (
    DecoderShape,
    OtherShape,
    child,
    epsilon_of,
    head_norms,
    projections,
    tensor,
)

_GATES = ("SiLUActivation", "SiLU")


class FusedLayer(LastLayer):
    """A layer's ``forward``: rows that it can compute with kernels go that way, all others as before.

    As ``LastLayer``, it is an ordinary attribute of the layer, and carried along by a deep copy or a pickle.
    """

    def __init__(self, layer: Any, before: LastLayer | None) -> None:
        super().__init__(layer)
        self.before = before
        """what it replaces; it is the last layer's, which may return predicting tokens only"""
        self.tree = [(one, tuple(one._modules.values())) for one in layer.modules()]
        """the layer as it was found; what somebody has replaced or wrapped since is called as it stands"""
        self.products = [one.base for one in projections(layer)]
        self.norms = [layer.input_layernorm, layer.post_attention_layernorm]
        self.norms += [one for one in head_norms(layer) if one is not None]
        self.has_run = False
        """whether a row has gone by kernels"""

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        row, angles = kwargs.get("attention_layout"), kwargs.get("position_embeddings")
        packed = isinstance(row, PackedLayout | Predicting)
        if packed and angles is not None and not args and self._fits(hidden_states, angles):
            self.has_run = True
            return self._fused(hidden_states, row, angles)
        output: Tensor = (self._plain() if self.before is None else self.before)(hidden_states, *args, **kwargs)
        return output

    def _fits(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> bool:
        layer: Any = self.layer
        attention = layer.self_attn
        if layer.training and (attention.attention_dropout or getattr(layer, "gradient_checkpointing", False)):
            return False
        if any(tuple(one._modules.values()) != children for one, children in self.tree):
            return False
        if any(_is_changed(one) for one, _ in self.tree[1:]):  # the layer's own hooks are called around this
            return False
        turns = all(angle.shape == (1, x.shape[1], attention.head_dim) for angle in angles)
        weights = [one.weight for one in (*self.norms, *self.products)]
        return x.shape[0] == 1 and turns and can_compute(x, *angles, *weights) and not torch.is_autocast_enabled("cpu")

    def _fused(self, x: Tensor, row: Any, angles: tuple[Tensor, Tensor]) -> Tensor:
        layer: Any = self.layer
        before, between = layer.input_layernorm, layer.post_attention_layernorm
        wanted: Tensor | None = None
        if isinstance(row, Predicting) and self.before is not None:
            wanted, row = row.wanted, row.last
        x, normed = add_norm(x, None, before.weight, before.variance_epsilon)
        attended = self._attended(normed, row, angles)
        if wanted is not None:
            x, attended = x.index_select(1, wanted), attended.index_select(1, wanted)
        x, normed = add_norm(x, layer.self_attn.o_proj(attended), between.weight, between.variance_epsilon)
        mlp = layer.mlp
        gate, up, down = mlp.gate_proj(normed), mlp.up_proj(normed), mlp.down_proj
        if down.bias is None and type(down) is nn.Linear:
            return x + gated_linear(gate, up, down.weight)
        output: Tensor = x + down(gated(gate, up))
        return output

    def _attended(self, normed: Tensor, row: AttentionLayout, angles: tuple[Tensor, Tensor]) -> Tensor:
        """``(1, T, heads * size)``."""
        attention: Any = self.layer.self_attn
        size = attention.head_dim
        turned = []
        for part in ("q", "k"):
            x, norm = getattr(attention, f"{part}_proj")(normed), getattr(attention, f"{part}_norm", None)
            if norm is not None:
                x = add_norm(x.unflatten(-1, (-1, size)), None, norm.weight, norm.variance_epsilon)[1].flatten(-2)
            turned.append(rotate(x, *angles, size))
        parts = (x.unflatten(-1, (-1, size)).transpose(1, 2) for x in (*turned, attention.v_proj(normed)))
        call = AttentionCall(layer=int(attention.layer_idx), scaling=attention.scaling, dropout=0.0, window=None)
        return row.attend(call, *parts).flatten(-2)


def _is_changed(module: nn.Module) -> bool:
    """Whether a call of ``module`` does something beside its class's ``forward``."""
    return bool(
        "forward" in vars(module)
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def install_fused_layers(model: PreTrainedModel) -> list[FusedLayer]:
    """Put a ``FusedLayer`` into every layer of ``model``, if it is a Llama-like decoder; returns them."""
    if library() is None:
        return []
    try:
        layers = DecoderShape.of(model).layers
        for layer in layers:
            _check(layer)
    except OtherShape:
        return []
    found = []
    for layer in layers:
        before = vars(layer).get("forward")
        found.append(before if isinstance(before, FusedLayer) else FusedLayer(layer, before))
        layer.forward = found[-1]
    return found


def _check(layer: nn.Module) -> None:
    """
    Raises:
        OtherShape: the layer computes something else, or somebody has replaced its forward.
    """
    before, attention = vars(layer).get("forward"), child(layer, "self_attn")
    if before is not None and not isinstance(before, LastLayer):
        raise OtherShape
    if type(child(child(layer, "mlp"), "act_fn")).__name__ not in _GATES:
        raise OtherShape
    if not {"attention_dropout", "scaling", "layer_idx"} <= set(vars(attention)):
        raise OtherShape
    for norm in (child(layer, "input_layernorm"), child(layer, "post_attention_layernorm"), *head_norms(layer)):
        if norm is not None:
            epsilon_of(norm)
            tensor(norm, "weight")


def remove_fused_layers(model: PreTrainedModel) -> None:
    """Take them out again, where nobody has wrapped them since."""
    for layer in getattr(model.base_model, "layers", ()):
        fused = vars(layer).get("forward")
        if isinstance(fused, FusedLayer):
            if fused.before is None:
                del layer.forward
            else:
                layer.forward = fused.before
