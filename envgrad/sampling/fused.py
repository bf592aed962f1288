"""A Llama-like decoder's forward over ragged rows in few operations: for sampling on a CPU, beside the module itself.

A decoding step of a small model is mostly the cost of calling modules and operations, one after the other. Here the
three projections in front of attention are one product, so are the two in front of the activation, residuals are added
by the product that feeds them, the rotation is one complex multiplication (weights are reordered so that the two
numbers of a pair lie side by side: products of queries with keys do not depend on the order), and the last layer's
outputs are computed for the tokens that need logits only. Large weights are kept in the order in which oneDNN reads
them. All of it works on copies: the module, its weights and its training are untouched.

Models of another shape (``decoder_shape``), or whose numbers differ, run their own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from envgrad.attention import AttentionCall
from envgrad.sampling.decode_layout import DecodeLayout
from envgrad.sampling.decoder_shape import (
    KEPT_BYTES,
    DecoderShape,
    OtherShape,
    child,
    epsilon_of,
    head_norms,
    linear,
    tensor,
)
from envgrad.sampling.kv_cache import KVCache
from envgrad.sampling.projections import Projection

_PACKED = 1 << 18
"""weights with at least so many numbers are packed; below, a plain product is as quick"""
_ROWS = 32
"""rows that packed weights are laid out for"""


class _Product:
    """``x @ weight.T + bias`` for one weight ``(N, K)``, or several on top of each other."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._bias = bias
        self._packed = pack_weight(weight) if weight.numel() >= _PACKED else None
        self._columns = weight.t().contiguous() if self._packed is None else weight[:0]

    def __call__(self, x: Tensor) -> Tensor:
        """(T, K) -> (T, N)."""
        if self._packed is not None:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
            return out
        if self._bias is not None:
            return torch.addmm(self._bias, x, self._columns)
        return torch.mm(x, self._columns)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """(T, K) and (T, N) -> (T, N)."""
        if self._packed is None and self._bias is None:
            return torch.addmm(residual, x, self._columns)
        return self(x).add_(residual)


def pack_weight(weight: Tensor) -> Tensor | None:
    """``weight`` in oneDNN's own order, or None where this build of torch cannot do that."""
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
    except (AttributeError, RuntimeError):
        return None
    return packed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Norm:
    weight: Tensor
    epsilon: float

    @classmethod
    def of(cls, module: nn.Module, order: Tensor | None = None) -> _Norm:
        weight, epsilon = tensor(module, "weight"), epsilon_of(module)
        ordered = weight.detach() if order is None else weight.detach()[order]
        return cls(weight=ordered * weight.shape[0] ** 0.5, epsilon=epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        # sqrt(D) / |x|, from the norm, which is one operation, and exact up to rounding
        size = x.shape[-1]
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().add_(size * self.epsilon).rsqrt_()
        return torch.mul(x, scale).mul_(self.weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """One layer's weights, as they are used here."""

    call: AttentionCall
    before: _Norm
    qkv: _Product
    query_norm: _Norm | None
    key_norm: _Norm | None
    out: _Product
    between: _Norm
    gate_up: tuple[_Product, ...]
    """one product for both, or one each where they are large"""
    down: _Product
    activation: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copies:
    """Everything that is derived from the weights of one moment."""

    stamp: tuple[object, ...]
    layers: tuple[_Layer, ...]
    norm: _Norm
    head: _Product
    table: Tensor
    rotation: Tensor
    """(positions, 1, D / 2) complex"""


class FusedDecoder:
    """The forward of a model of known shape. Copies are made when it is first used, and anew when weights changed.

    Args:
        model: see ``FusedDecoder.of``.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> FusedDecoder.of(GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=8))) is None
        True
    """

    kernels = None
    layout = DecodeLayout

    def __init__(self, model: PreTrainedModel) -> None:
        self._shape = DecoderShape.of(model)
        self._copies: _Copies | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> FusedDecoder | None:
        """A decoder for ``model`` if it is one of pre-norm layers with rotary attention and a gated MLP, in float32 on
        a CPU, whose modules are the plain ones, without hooks or adapters; else None."""
        try:
            decoder = cls(model)
        except OtherShape:
            return None
        return decoder if decoder.fits else None

    @property
    def fits(self) -> bool:
        """Whether the module is as it must be: on the CPU, in float32, without hooks."""
        return self._shape.fits

    def new_cache(self) -> KVCache:
        return KVCache()

    def refresh(self) -> None:
        """Make the copies anew if a weight was replaced or written to since."""
        stamp = self._shape.stamp
        if self._copies is None or self._copies.stamp != stamp:
            self._copies = None  # not two sets at once
            with torch.no_grad():
                self._copies = _copies_of(self._shape, stamp)

    def forget(self) -> None:
        """Forget the copies: the weights have changed. Fused optimizers write to them without a trace in the stamp."""
        self._copies = None

    def release(self) -> None:
        """Forget large copies."""
        if self._shape.num_bytes > KEPT_BYTES:
            self._copies = None

    def forward(self, layout: DecodeLayout, token_ids: Sequence[int], keep: Sequence[int] | None) -> Tensor:
        """Logits ``(len(keep), V)`` of the flat ``token_ids`` at the indices ``keep`` (None: at all)."""
        copies, shape = self._copies, self._shape
        kept = None if keep is None else torch.tensor(keep)
        if copies is None:
            raise AssertionError("refresh() comes before forward()")
        rotation = copies.rotation.index_select(0, layout.positions)
        x = embedding(torch.tensor(token_ids), copies.table)
        last = copies.layers[-1]
        for layer in copies.layers:
            attended = self._attend(layer, layout, layer.before(x), rotation)
            if layer is last and kept is not None:
                attended, x = attended.index_select(0, kept), x.index_select(0, kept)
            x = layer.out.add(attended, x)
            normed = layer.between(x)
            parts = [product(normed) for product in layer.gate_up]
            gate, up = parts if len(parts) == 2 else torch.split(parts[0], shape.mlp, dim=1)
            x = layer.down.add(layer.activation(gate).mul_(up), x)
        return copies.head(copies.norm(x))

    def _attend(self, layer: _Layer, layout: DecodeLayout, x: Tensor, rotation: Tensor) -> Tensor:
        shape = self._shape
        heads, turned = shape.heads, shape.heads + shape.kv_heads
        qkv = layer.qkv(x).view(x.shape[0], turned + shape.kv_heads, shape.size)
        if layer.query_norm is not None and layer.key_norm is not None:
            qkv[:, :heads] = layer.query_norm(qkv[:, :heads])
            qkv[:, heads:turned] = layer.key_norm(qkv[:, heads:turned])
        # turned in place, so that keys and values stay side by side, as they are stored
        torch.view_as_complex(qkv[:, :turned].view(x.shape[0], turned, shape.size // 2, 2)).mul_(rotation)
        out = layout.attend_joined(layer.call, qkv[:, :heads], qkv[:, heads:])
        return out.view(x.shape[0], heads * shape.size)


def _copies_of(shape: DecoderShape, stamp: tuple[object, ...]) -> _Copies:
    half = torch.arange(shape.size // 2)
    order = torch.stack((half, half + shape.size // 2), 1).flatten()
    """where each number of a head comes from, so that pairs lie side by side"""
    cosine, sine = shape.rotation()
    return _Copies(
        stamp=stamp,
        layers=tuple(_layer(shape, number, layer, order) for number, layer in enumerate(shape.layers)),
        norm=_Norm.of(child(shape.body, "norm")),
        head=_stacked([(shape.head, None)], shape.size),
        table=shape.table,
        rotation=torch.complex(cosine, sine).unsqueeze(1),
    )


def _layer(shape: DecoderShape, number: int, layer: nn.Module, order: Tensor) -> _Layer:
    attention, mlp = child(layer, "self_attn"), child(layer, "mlp")
    query_norm, key_norm = head_norms(layer)
    turned = [linear(attention, name) for name in ("q_proj", "k_proj")]
    gated: list[tuple[Projection, Tensor | None]] = [(linear(mlp, one), None) for one in ("gate_proj", "up_proj")]
    small = gated[0][0].base.weight.numel() < _PACKED
    activation: Any = mlp.act_fn
    return _Layer(
        call=AttentionCall(layer=number, scaling=attention.__dict__.get("scaling"), dropout=0.0, window=None),
        before=_Norm.of(child(layer, "input_layernorm")),
        qkv=_stacked([(one, order) for one in turned] + [(linear(attention, "v_proj"), None)], shape.size),
        query_norm=None if query_norm is None else _Norm.of(query_norm, order),
        key_norm=None if key_norm is None else _Norm.of(key_norm, order),
        out=_stacked([(linear(attention, "o_proj"), None)], shape.size),
        between=_Norm.of(child(layer, "post_attention_layernorm")),
        gate_up=(_stacked(gated, shape.size),) if small else tuple(_stacked([one], shape.size) for one in gated),
        down=_stacked([(linear(mlp, "down_proj"), None)], shape.size),
        activation=activation,
    )


def _stacked(parts: list[tuple[Projection, Tensor | None]], size: int) -> _Product:
    """One product for several, the rows of each head in the given order."""
    weights, biases = [], []
    for found, order in parts:
        weight, bias = found.weight(), found.bias
        if order is not None:
            weight = weight.view(-1, size, weight.shape[1])[:, order].flatten(0, 1)
            bias = None if bias is None else bias.view(-1, size)[:, order].flatten()
        weights.append(weight)
        biases.append(weight.new_zeros(weight.shape[0]) if bias is None else bias)
    biased = any(found.bias is not None for found, _ in parts)
    return _Product(weights[0] if len(weights) == 1 else torch.cat(weights), torch.cat(biases) if biased else None)
