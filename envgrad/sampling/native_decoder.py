"""A Llama-like decoder's forward over ragged rows in one call of compiled kernels: for sampling on a CPU.

A decoding step of a small model is mostly the cost of starting operations; of a larger one, products of few rows, for
which general libraries are not at their best. ``envgrad/native`` does a whole step in one call, on several threads.
Where it cannot be compiled, or the model has another activation, ``fused`` does the same in torch's operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from envgrad.native.compiler import library
from envgrad.native.decoder import Kernels, LayerPointers, ModelPointers, StepPointers
from envgrad.native.memory import floats, give_back_freed
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
from envgrad.sampling.native_cache import NativeCache, NativeLayout
from envgrad.sampling.projections import Projection

_SILU = ("SiLU", "SiLUActivation")
_THREADS = 16
"""most threads of a step: beyond, they would wait for each other more than they compute"""


@dataclass(slots=True, kw_only=True)
class _Copies:
    """What is derived from the weights of one moment, and the pointers to it."""

    stamp: tuple[object, ...]
    model: ModelPointers
    layers: object
    """array of ``LayerPointers``, to which ``model`` points"""
    held: list[Tensor]
    """all that is pointed to"""
    cache: tuple[int, ...] | None = None
    """the keys and values that are pointed to"""
    room: Tensor = field(default_factory=lambda: floats(0))
    logits: Tensor = field(default_factory=lambda: floats(0))


class NativeDecoder:
    """The forward of a model of known shape. Copies are made when it is first used, and anew when weights changed.

    Args:
        model: see ``NativeDecoder.of``.
        threads: most threads to compute on; small models get fewer.
    """

    layout = NativeLayout

    def __init__(self, model: PreTrainedModel, threads: int) -> None:
        self._shape = DecoderShape.of(model)
        self._facts = _Facts.of(self._shape)
        width = int(self._shape.table.shape[1])
        vector = Kernels(1).vector
        self.kernels = Kernels(max(1, min(threads, _THREADS, width // (2 * vector))))
        self._copies: _Copies | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, threads: int = 1) -> NativeDecoder | None:
        """A decoder for ``model`` if there are kernels and it is one of pre-norm layers with rotary attention and an
        MLP gated by SiLU, in float32 on a CPU, whose modules are the plain ones, without hooks; else None.

        Example:
            >>> from transformers import GPT2Config, GPT2LMHeadModel
            >>> NativeDecoder.of(GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=8))) is None
            True
        """
        try:
            if not DecoderShape.of(model).fits or library() is None:  # in this order: compiling takes seconds
                return None
            return cls(model, threads)
        except (OtherShape, LookupError):
            return None

    @property
    def fits(self) -> bool:
        """Whether the module is as it must be: on the CPU, in float32, without hooks."""
        return self._shape.fits

    def new_cache(self) -> NativeCache:
        shape = self._shape
        return NativeCache(
            layers=len(shape.layers), kv_heads=shape.kv_heads, size=shape.size, vector=self.kernels.vector
        )

    def refresh(self) -> None:
        """Make the copies anew if a weight was replaced or written to since."""
        stamp = self._shape.stamp
        if self._copies is None or self._copies.stamp != stamp:
            self._copies = None  # not two sets at once
            if self._shape.num_bytes > KEPT_BYTES:
                give_back_freed()  # of a training step's, which is larger
            with torch.no_grad():
                self._copies = self._made(stamp)

    def forget(self) -> None:
        """Forget the copies: the weights have changed. Fused optimizers write to them without a trace in the stamp."""
        self._copies = None

    def release(self) -> None:
        """Forget large copies."""
        if self._shape.num_bytes > KEPT_BYTES:
            self._copies = None

    def forward(self, layout: NativeLayout, token_ids: Sequence[int], keep: Sequence[int] | None) -> Tensor:
        """Logits ``(len(keep), V)`` of the flat ``token_ids`` at the indices ``keep`` (None: at all), until the next
        call."""
        copies, kernels, cache = self._copies, self.kernels, layout.cache
        if copies is None:
            raise AssertionError("refresh() comes before forward()")
        if layout.longest > cache.length:
            raise AssertionError(f"a row of {layout.longest} tokens in slots of {cache.length}")
        self._point_at(copies, cache)
        tokens = len(token_ids)
        ids = np.array(token_ids, dtype=np.int32)
        kept = np.arange(tokens, dtype=np.int32) if keep is None else np.array(keep, dtype=np.int32)
        vocabulary, panel = copies.model.vocabulary, 2 * kernels.vector
        width = -(-vocabulary // panel) * panel
        if copies.logits.numel() < len(kept) * width:
            copies.logits = floats(len(kept) * width)
        logits = copies.logits[: len(kept) * width].view(len(kept), width)
        needed = kernels.room(copies.model, tokens)
        if copies.room.numel() < needed:
            copies.room = floats(needed)
        index = layout.index.ctypes.data
        kernels.forward(
            copies.model,
            StepPointers(
                tokens=tokens, kept=len(kept), ids=ids.ctypes.data, slots=index, positions=index + 4 * tokens,
                sources=index + 8 * tokens, shared=index + 12 * tokens, keep=kept.ctypes.data,
                logits=logits.data_ptr(), room=copies.room.data_ptr(),
            ),
        )  # fmt: skip
        return logits[:, :vocabulary]

    def _point_at(self, copies: _Copies, cache: NativeCache) -> None:
        place = (cache.keys.data_ptr(), cache.values.data_ptr(), cache.slots, cache.blocks)  # memory is reused
        if copies.cache == place:
            return
        keys, values = cache.keys, cache.values
        for number in range(copies.model.layers):
            layer = copies.model.layer[number]
            layer.keys = place[0] + 4 * number * keys.stride(0)
            layer.values = place[1] + 4 * number * values.stride(0)
        copies.model.blocks = cache.blocks
        copies.cache = place

    def _made(self, stamp: tuple[object, ...]) -> _Copies:
        shape, facts, kernels = self._shape, self._facts, self.kernels
        held: list[Tensor] = []

        def held_at(one: Tensor | None) -> int | None:
            if one is None:
                return None
            held.append(one)
            return one.data_ptr()

        shelf = _Shelf(kernels, shape)
        layers = (LayerPointers * len(shape.layers))()
        for number, module in enumerate(shape.layers):
            for name, one in _layer(shelf, module).items():
                setattr(layers[number], name, held_at(one))
        head, head_bias = shelf.packed([shape.head])
        cosine, sine = shape.rotation()
        table = shape.table.contiguous()
        model = ModelPointers(
            layers=len(shape.layers), width=table.shape[1], heads=shape.heads, kv_heads=shape.kv_heads,
            size=shape.size, mlp=shape.mlp, vocabulary=shape.head.base.out_features, epsilon=facts.epsilon,
            query_epsilon=facts.query_epsilon, scaling=facts.scaling, table=held_at(table),
            norm=held_at(_plain(child(shape.body, "norm"))), head=held_at(head), head_bias=held_at(head_bias),
            cosine=held_at(cosine), sine=held_at(sine), layer=layers, blocks=0, pool=kernels.pool,
        )  # fmt: skip
        return _Copies(stamp=stamp, model=model, layers=layers, held=held)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """Numbers that all layers must have in common."""

    epsilon: float
    query_epsilon: float
    scaling: float

    @classmethod
    def of(cls, shape: DecoderShape) -> _Facts:
        """
        Raises:
            OtherShape: the layers differ, or are of another kind.
        """
        outer, inner, scaling = {epsilon_of(child(shape.body, "norm"))}, set(), set()
        for layer in shape.layers:
            attention, mlp = child(layer, "self_attn"), child(layer, "mlp")
            outer |= {epsilon_of(child(layer, one)) for one in ("input_layernorm", "post_attention_layernorm")}
            inner |= {epsilon_of(one) for one in head_norms(layer) if one is not None}
            scaling.add(attention.__dict__.get("scaling"))
            if type(getattr(mlp, "act_fn", None)).__name__ not in _SILU:
                raise OtherShape
        found = next(iter(scaling))
        if len(outer) > 1 or len(inner) > 1 or len(scaling) > 1 or not isinstance(found, float):
            raise OtherShape
        return cls(epsilon=next(iter(outer)), query_epsilon=next(iter(inner), 0.0), scaling=found)


class _Shelf:
    """All packed weights in one piece of memory: a large one goes back to the system when it is freed, many small ones
    would stay with the thread that asked for them."""

    def __init__(self, kernels: Kernels, shape: DecoderShape) -> None:
        self._kernels = kernels
        parts = [(linears, name == "gate_up") for layer in shape.layers for name, linears in _parts(layer).items()]
        self._left = floats(sum(self._size(*one) for one in [*parts, ([shape.head], False)]))

    def _size(self, linears: list[Projection], gated: bool) -> int:
        outputs = [one.base.out_features for one in linears]
        inputs = linears[0].base.in_features
        return self._kernels.packed_size(outputs[0] if gated else sum(outputs), inputs, gated=gated)

    def packed(self, linears: list[Projection], *, gated: bool = False) -> tuple[Tensor, Tensor | None]:
        """Their weights on top of each other, and their biases, if they have any."""
        weights = [one.weight() for one in linears]
        packed = self._kernels.pack(weights, gated=gated, into=self._left)
        self._left = self._left[self._size(linears, gated) :]
        if all(one.bias is None for one in linears):
            return packed, None
        biases = [
            weight.new_zeros(weight.shape[0]) if one.bias is None else one.bias
            for one, weight in zip(linears, weights, strict=True)
        ]
        return packed, self._kernels.pack_bias(biases if gated else [torch.cat(biases)], gated=gated)


def _parts(layer: nn.Module) -> dict[str, list[Projection]]:
    """What is multiplied together, by the names of ``LayerPointers``."""
    attention, mlp = child(layer, "self_attn"), child(layer, "mlp")
    return {
        "qkv": [linear(attention, one) for one in ("q_proj", "k_proj", "v_proj")],
        "out": [linear(attention, "o_proj")],
        "gate_up": [linear(mlp, one) for one in ("gate_proj", "up_proj")],
        "down": [linear(mlp, "down_proj")],
    }


def _layer(shelf: _Shelf, layer: nn.Module) -> dict[str, Tensor | None]:
    """By the names of ``LayerPointers``."""
    query_norm, key_norm = head_norms(layer)
    found: dict[str, Tensor | None] = {
        "before": _plain(child(layer, "input_layernorm")),
        "between": _plain(child(layer, "post_attention_layernorm")),
        "query_norm": None if query_norm is None else _plain(query_norm),
        "key_norm": None if key_norm is None else _plain(key_norm),
    }
    for name, linears in _parts(layer).items():
        found[name], found[f"{name}_bias"] = shelf.packed(linears, gated=name == "gate_up")
    return found


def _plain(norm: nn.Module) -> Tensor:
    return tensor(norm, "weight").detach().contiguous()
