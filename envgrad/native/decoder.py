"""The decoder kernels as Python sees them: their structures, threads, and packed weights."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_long, c_void_p

import numpy as np
import torch
from torch import Tensor

from envgrad.native.compiler import library
from envgrad.native.memory import floats

_SHORT = 1 << 17
"""logits up to which drawing takes less time than waking threads, and than waiting for the interpreter again"""


class LayerPointers(Structure):
    """``Layer`` of ``decode.cpp``: a layer's packed weights, and its part of the keys and values."""

    _fields_ = [
        (name, c_void_p)
        for name in (
            "before", "qkv", "qkv_bias", "query_norm", "key_norm", "out", "out_bias", "between", "gate_up",
            "gate_up_bias", "down", "down_bias", "keys", "values",
        )
    ]  # fmt: skip


class ModelPointers(Structure):
    """``Model`` of ``decode.cpp``."""

    _fields_ = [
        *((name, c_int32) for name in ("layers", "width", "heads", "kv_heads", "size", "mlp", "vocabulary")),
        *((name, c_float) for name in ("epsilon", "query_epsilon", "scaling")),
        *((name, c_void_p) for name in ("table", "norm", "head", "head_bias", "cosine", "sine")),
        ("layer", POINTER(LayerPointers)),
        ("blocks", c_int32),
        ("pool", c_void_p),
    ]


class StepPointers(Structure):
    """``Step`` of ``decode.cpp``."""

    _fields_ = [
        ("tokens", c_int32),
        ("kept", c_int32),
        *((name, c_void_p) for name in ("ids", "slots", "positions", "sources", "shared", "keep", "logits", "room")),
    ]


class _Packing(Structure):
    _fields_ = [("rows", c_void_p), ("others", c_void_p), ("n", c_int32), ("k", c_int32), ("panels", c_void_p)]


class DrawPointers(Structure):
    """``Draw`` of ``sample.cpp``."""

    _fields_ = [
        ("rows", c_int32),
        ("vocabulary", c_int32),
        ("stride", c_long),
        *(
            (name, c_void_p)
            for name in ("logits", "temperature", "greedy", "seeds", "positions", "tokens", "logprobs", "room")
        ),
    ]


class Kernels:
    """The compiled kernels and ``threads`` threads that they run on, the caller's included. For one caller at a time.

    Raises:
        LookupError: there are no kernels on this machine.

    Example:
        >>> from envgrad.native.compiler import library
        >>> kernels = None if library() is None else Kernels(1)
        >>> kernels is None or kernels.vector in (4, 8, 16)
        True
    """

    def __init__(self, threads: int) -> None:
        found = library()
        if found is None:
            raise LookupError("there are no compiled kernels on this machine")
        found.envgrad_pool_new.restype = c_void_p
        found.envgrad_pool_free.argtypes = [c_void_p]
        found.envgrad_room.argtypes, found.envgrad_room.restype = [POINTER(ModelPointers), c_int], c_long
        found.envgrad_pack.argtypes = [c_void_p, POINTER(_Packing)]
        found.envgrad_forward.argtypes = [POINTER(ModelPointers), POINTER(StepPointers)]
        found.envgrad_draw.argtypes = [c_void_p, POINTER(DrawPointers)]
        self._library = found
        # The same functions, without letting other Python threads run; by its handle, as its file may be gone.
        self._holding = ctypes.PyDLL(found._name, handle=found._handle)
        self._holding.envgrad_draw.argtypes = [c_void_p, POINTER(DrawPointers)]
        self.vector: int = found.envgrad_vector()
        """floats in one vector"""
        self.pool: int | None = found.envgrad_pool_new(threads)
        if self.pool is None:
            raise LookupError("there is no memory for the kernels' threads")
        self.threads: int = found.envgrad_pool_threads(c_void_p(self.pool))
        self._scratch = floats(0)
        weakref.finalize(self, found.envgrad_pool_free, self.pool)

    def room(self, model: ModelPointers, tokens: int) -> int:
        """Floats that a step of so many tokens needs beside its arguments."""
        return int(self._library.envgrad_room(ctypes.byref(model), tokens))

    def forward(self, model: ModelPointers, step: StepPointers) -> None:
        """One step; see ``decode.cpp``."""
        self._library.envgrad_forward(ctypes.byref(model), ctypes.byref(step))

    def draw(
        self,
        logits: Tensor,
        *,
        temperature: Tensor,
        greedy: Tensor | None,
        seeds: np.ndarray[tuple[int], np.dtype[np.uint64]],
        positions: Sequence[int],
    ) -> tuple[list[int], list[float]]:
        """A token of each row of ``logits`` (B, V), float32 with numbers of a row side by side, and their log-probs:
        ``sampling_ops.sample_tokens`` for rows that draw from the whole distribution."""
        rows, vocabulary = logits.shape
        room = self.threads * -(-vocabulary // self.vector) * self.vector
        if self._scratch.numel() < room:
            self._scratch = floats(room)
        at = np.array(positions, dtype=np.int32)
        tokens, logprobs = np.empty(rows, dtype=np.int32), np.empty(rows)
        draw = DrawPointers(
            rows=rows, vocabulary=vocabulary, stride=logits.stride(0), logits=logits.data_ptr(),
            temperature=temperature.data_ptr(), greedy=None if greedy is None else greedy.data_ptr(),
            seeds=seeds.ctypes.data, positions=at.ctypes.data, tokens=tokens.ctypes.data,
            logprobs=logprobs.ctypes.data, room=self._scratch.data_ptr(),
        )  # fmt: skip
        if rows * vocabulary < _SHORT:
            self._holding.envgrad_draw(None, ctypes.byref(draw))
        else:
            self._library.envgrad_draw(self.pool, ctypes.byref(draw))
        return tokens.tolist(), logprobs.tolist()

    def packed_size(self, outputs: int, inputs: int, *, gated: bool = False) -> int:
        """Floats of a packed weight; ``outputs`` of one half where it is ``gated``."""
        step = self.vector if gated else 2 * self.vector
        return -(-outputs // step) * inputs * 2 * self.vector

    def pack(self, weights: Sequence[Tensor], *, gated: bool = False, into: Tensor | None = None) -> Tensor:
        """Weights ``(N, K)`` on top of each other, as the kernels read them: panels of ``2 * vector`` outputs; where
        they are ``gated``, half of each panel from the first and half from the second. Written to the front of
        ``into``, if that is given."""
        rows = weights[0] if gated or len(weights) == 1 else torch.cat(list(weights))
        parts = [one.float().contiguous() for one in (weights if gated else [rows])]
        n, k = parts[0].shape
        size = self.packed_size(n, k, gated=gated)
        panels = floats(size) if into is None else into[:size]
        others = parts[1].data_ptr() if gated else None
        packing = _Packing(rows=parts[0].data_ptr(), others=others, n=n, k=k, panels=panels.data_ptr())
        self._library.envgrad_pack(self.pool, ctypes.byref(packing))
        return panels

    def pack_bias(self, biases: Sequence[Tensor], *, gated: bool = False) -> Tensor:
        """Biases of such weights, in the order of the panels."""
        columns = [one.float().unsqueeze(1) for one in biases]
        return self.pack(columns, gated=gated)
