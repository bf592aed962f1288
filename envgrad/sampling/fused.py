"""A Llama-like decoder's forward over ragged rows in few operations: for sampling on a CPU, beside the module itself.

A decoding step of a small model is mostly the cost of calling modules and operations, one after the other. Here the
three projections in front of attention are one product, so are the two in front of the activation, residuals are added
by the product that feeds them, the rotation is one complex multiplication (weights are reordered so that the two
numbers of a pair lie side by side: products of queries with keys do not depend on the order), and the last layer's
outputs are computed for the tokens that need logits only. Large weights are kept in the order in which oneDNN reads
them. All of it works on copies: the module, its weights and its training are untouched.

Which models have this shape is read from their modules, and whether the numbers are theirs is found by comparing
(``compatibility.fused_decoder``); all others run their own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from envgrad.attention import AttentionCall
from envgrad.sampling.decode_layout import DecodeLayout
from envgrad.sampling.limits import text_config
from envgrad.sampling.projections import Projection

MOST_BYTES = 2 << 30
"""models whose copies would take more memory run their own forward"""
KEPT_BYTES = 64 << 20
"""copies up to this size stay when nothing is sampled"""
_PACKED = 1 << 18
"""weights with at least so many numbers are packed; below, a plain product is as quick"""
_ROWS = 32
"""rows that packed weights are laid out for"""
_GROWING_ROTATIONS = ("dynamic", "longrope")
"""rotations that depend on the row's length"""


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
        weight, epsilon = _tensor(module, "weight"), module.__dict__.get("variance_epsilon")
        if not isinstance(epsilon, float):
            raise _OtherShape
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


class _OtherShape(Exception):
    """The model is not built as this file needs it."""


class FusedDecoder:
    """The forward of a model of known shape. Copies are made when it is first used, and anew when weights changed.

    Args:
        model: see ``FusedDecoder.of``.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> FusedDecoder.of(GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=8))) is None
        True
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._shape = _Shape.of(model)
        self._copies: _Copies | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> FusedDecoder | None:
        """A decoder for ``model`` if it is one of pre-norm layers with rotary attention and a gated MLP, in float32 on
        a CPU, whose modules are the plain ones, without hooks or adapters; else None."""
        try:
            decoder = cls(model)
        except _OtherShape:
            return None
        return decoder if decoder.fits else None

    @property
    def fits(self) -> bool:
        """Whether the module is as it must be: on the CPU, in float32, without hooks."""
        if any(module._forward_hooks or module._forward_pre_hooks for module in self._shape.modules):
            return False
        if any(found.undone for layer in self._shape.layers for found in _projections(layer)):
            return False
        parameters = self._shape.parameters
        plain = all(
            one.dtype == torch.float32 and one.device.type == "cpu" and not one.is_inference() for one in parameters
        )
        return plain and 4 * sum(one.numel() for one in parameters) <= MOST_BYTES

    def refresh(self) -> None:
        """Make the copies anew if a weight was replaced or written to since."""
        stamp = self._shape.stamp
        if self._copies is None or self._copies.stamp != stamp:
            self._copies = None  # not two sets at once
            with torch.no_grad():
                self._copies = self._shape.copies(stamp)

    def forget(self) -> None:
        """Forget the copies: the weights have changed. Fused optimizers write to them without a trace in the stamp."""
        self._copies = None

    def release(self) -> None:
        """Forget large copies."""
        if 4 * sum(one.numel() for one in self._shape.parameters) > KEPT_BYTES:
            self._copies = None

    def forward(self, layout: DecodeLayout, token_ids: Tensor, keep: Tensor | None) -> Tensor:
        """Logits ``(len(keep), V)`` of the flat tokens ``token_ids`` (T,) at the indices ``keep`` (None: at all)."""
        copies, shape = self._copies, self._shape
        if copies is None:
            raise AssertionError("refresh() comes before forward()")
        rotation = copies.rotation.index_select(0, layout.positions)
        x = embedding(token_ids, copies.table)
        last = copies.layers[-1]
        for layer in copies.layers:
            attended = self._attend(layer, layout, layer.before(x), rotation)
            if layer is last and keep is not None:
                attended, x = attended.index_select(0, keep), x.index_select(0, keep)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """The modules of a model, found; and its sizes."""

    body: nn.Module
    layers: tuple[nn.Module, ...]
    head: Projection
    rotary: nn.Module
    heads: int
    kv_heads: int
    size: int
    mlp: int
    positions: int
    modules: tuple[nn.Module, ...]
    parameters: tuple[nn.Parameter, ...]

    @property
    def stamp(self) -> tuple[object, ...]:
        """Differs from an earlier one if a weight was replaced or written to, or another adapter acts."""
        adapters = tuple(found.added for layer in self.layers for found in _projections(layer))
        return (*((one.data_ptr(), one._version) for one in self.parameters), *adapters)

    @classmethod
    def of(cls, model: PreTrainedModel) -> _Shape:
        """
        Raises:
            _OtherShape: a module is missing, or is another one.
        """
        config = text_config(model)
        body, head = _child(model, "model"), _linear(model, "lm_head")
        rotary, stack = _child(body, "rotary_emb"), _child(body, "layers")
        layers = tuple(stack.children())
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        kind = rotary.__dict__.get("rope_type")
        if not layers or kinds != {"full_attention"} or kind is None or any(one in kind for one in _GROWING_ROTATIONS):
            raise _OtherShape
        if any(isinstance(getattr(one, "sliding_window", None), int) for one in (config, *_attentions(layers))):
            raise _OtherShape
        first = _attentions(layers)[0]
        size = first.__dict__.get("head_dim")
        if not isinstance(size, int) or size % 2:
            raise _OtherShape
        query, key = _linear(first, "q_proj").base, _linear(first, "k_proj").base
        shape = cls(
            body=body, layers=layers, head=head, rotary=rotary, size=size,
            heads=query.out_features // size, kv_heads=key.out_features // size,
            mlp=_linear(_child(layers[0], "mlp"), "gate_proj").base.out_features,
            positions=int(config.max_position_embeddings),
            modules=tuple(model.modules()), parameters=tuple(model.parameters()),
        )  # fmt: skip
        used = {id(one) for layer in layers for one in _weights_of(layer)}
        used |= {
            id(one) for one in (*_child(model, "lm_head").parameters(), _tensor(_child(body, "embed_tokens"), "weight"))
        }
        used |= {id(_tensor(_child(body, "norm"), "weight"))}
        if {id(one) for one in shape.parameters} != used:  # it has weights that this forward would not use
            raise _OtherShape
        return shape

    def copies(self, stamp: tuple[object, ...]) -> _Copies:
        half = torch.arange(self.size // 2)
        order = torch.stack((half, half + self.size // 2), 1).flatten()
        """where each number of a head comes from, so that pairs lie side by side"""
        table = _tensor(_child(self.body, "embed_tokens"), "weight").detach()
        return _Copies(
            stamp=stamp,
            layers=tuple(self._layer(number, layer, order) for number, layer in enumerate(self.layers)),
            norm=_Norm.of(_child(self.body, "norm")),
            head=_stacked([(self.head, None)], self.size),
            table=table,
            rotation=self._rotation(),
        )

    def _layer(self, number: int, layer: nn.Module, order: Tensor) -> _Layer:
        attention, mlp = _child(layer, "self_attn"), _child(layer, "mlp")
        norms = [dict(attention.named_children()).get(name) for name in ("q_norm", "k_norm")]
        turned = [_linear(attention, name) for name in ("q_proj", "k_proj")]
        gated: list[tuple[Projection, Tensor | None]] = [(_linear(mlp, one), None) for one in ("gate_proj", "up_proj")]
        small = gated[0][0].base.weight.numel() < _PACKED
        activation: Any = mlp.act_fn
        return _Layer(
            call=AttentionCall(layer=number, scaling=attention.__dict__.get("scaling"), dropout=0.0, window=None),
            before=_Norm.of(_child(layer, "input_layernorm")),
            qkv=_stacked([(one, order) for one in turned] + [(_linear(attention, "v_proj"), None)], self.size),
            query_norm=None if norms[0] is None else _Norm.of(norms[0], order),
            key_norm=None if norms[1] is None else _Norm.of(norms[1], order),
            out=_stacked([(_linear(attention, "o_proj"), None)], self.size),
            between=_Norm.of(_child(layer, "post_attention_layernorm")),
            gate_up=(_stacked(gated, self.size),) if small else tuple(_stacked([one], self.size) for one in gated),
            down=_stacked([(_linear(mlp, "down_proj"), None)], self.size),
            activation=activation,
        )

    def _rotation(self) -> Tensor:
        cosine, sine = self.rotary(torch.zeros(1), torch.arange(self.positions).unsqueeze(0))
        half = self.size // 2
        if cosine.shape[-1] != self.size or not torch.equal(cosine[..., :half], cosine[..., half:]):
            raise _OtherShape
        return torch.complex(cosine[0, :, :half].float(), sine[0, :, :half].float()).unsqueeze(1)


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


def _projections(layer: nn.Module) -> Iterator[Projection]:
    attention, mlp = _child(layer, "self_attn"), _child(layer, "mlp")
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        yield _linear(attention, name)
    for name in ("gate_proj", "up_proj", "down_proj"):
        yield _linear(mlp, name)


def _weights_of(layer: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a layer that ``_Shape._layer`` reads."""
    for found in _projections(layer):
        yield from (found.base if found.lora is None else found.lora).parameters()
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield _tensor(_child(layer, name), "weight")
    for name, norm in _child(layer, "self_attn").named_children():
        if name in ("q_norm", "k_norm"):
            yield _tensor(norm, "weight")


def _attentions(layers: tuple[nn.Module, ...]) -> list[nn.Module]:
    return [_child(layer, "self_attn") for layer in layers]


def _child(module: nn.Module, name: str) -> nn.Module:
    found = module._modules.get(name)
    if found is None:
        raise _OtherShape
    return found


def _linear(module: nn.Module, name: str) -> Projection:
    found = Projection.of(_child(module, name))
    if found is None:
        raise _OtherShape
    return found


def _tensor(module: nn.Module, name: str) -> nn.Parameter:
    found = module._parameters.get(name)
    if found is None:
        raise _OtherShape
    return found
