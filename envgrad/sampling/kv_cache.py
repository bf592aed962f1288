"""Keys and values of the rows that are being sampled, in slots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from envgrad.sampling.requests import SharedPrefix

_SPARE_BYTES = 1 << 26
"""most memory that is kept for reuse when all keys and values go"""


class StepRow(NamedTuple):
    """The tokens ``start .. start + size`` of the row in ``slot``. (A tuple: made per row and step.)"""

    slot: int
    start: int
    size: int


class SlotMemory(Protocol):
    """Keys and values of rows in slots, as a scheduler sees them."""

    slots: int
    length: int
    """tokens of a slot"""

    @property
    def num_bytes(self) -> int: ...

    def resize(self, slots: int, length: int, keep: Sequence[int] | None = None) -> None:
        """Make room for ``slots`` rows of ``length`` tokens. Old slot ``keep[i]`` becomes ``i`` (default: all stay)."""

    def drop(self) -> None:
        """Forget everything."""

    def copy(self, source: int, targets: Sequence[int], count: int) -> None:
        """Copy the first ``count`` tokens of slot ``source`` to each of ``targets``."""


class Usual(NamedTuple):
    """The slots that rows took before their keys and values went: the next ones get such at once, and need not grow.

    Example:
        >>> before = Usual(slots=8, length=4096)
        >>> before.length_for(8), before.length_for(64)  # never more memory than there was
        (4096, 512)
    """

    slots: int = 0
    length: int = 0

    @classmethod
    def of(cls, memory: SlotMemory, longest: int) -> Usual:
        """Of rows of up to ``longest`` tokens. Slots are at most twice as long: one long row is forgotten in time."""
        return cls(memory.slots, min(memory.length, 2 * longest))

    def length_for(self, rows: int) -> int:
        """How long slots are that so many rows get at once."""
        return min(self.length, self.slots * self.length // max(1, rows))


class KVCache:
    """Preallocated keys and values: per layer ``(slots, 2 Hkv, length, D)``, all heads' keys and then their values, so
    that a step's are stored at once; two buffers where they differ in size. Made when a layer first writes.

    Memory is zeroed, not merely reserved: masked positions get a weight of 0, which would not hide a NaN.

    Example:
        >>> cache = KVCache()
        >>> cache.resize(2, 16)
        >>> cache.slots, cache.length, cache.num_bytes
        (2, 16, 0)
    """

    def __init__(self) -> None:
        self.slots = 0
        self.length = 0
        self._layers: dict[int, tuple[Tensor, ...]] = {}
        self._spare: dict[int, tuple[Tensor, ...]] = {}
        self._blocks: dict[int, tuple[Tensor, Tensor]] = {}
        self._block_of: tuple[SharedPrefix, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for buffers in self._layers.values() for tensor in buffers)

    def resize(self, slots: int, length: int, keep: Sequence[int] | None = None) -> None:
        """Make room for ``slots`` rows of ``length`` tokens. Old slot ``keep[i]`` becomes ``i`` (default: all stay)."""
        kept = list(range(min(self.slots, slots))) if keep is None else list(keep)
        for layer, buffers in self._layers.items():
            self._layers[layer] = tuple(_moved(one, slots, length, kept) for one in buffers)
        self.slots, self.length = slots, length

    def drop(self) -> None:
        """Forget everything. Memory is freed, for training to use, but for a small cache's, which is kept for reuse."""
        small = self.num_bytes <= _SPARE_BYTES
        self._spare = {layer: tuple(one.view(-1) for one in found) for layer, found in self._layers.items() if small}
        self._layers.clear()
        self._blocks.clear()
        self.slots = self.length = 0

    def copy(self, source: int, targets: Sequence[int], count: int) -> None:
        """Copy the first ``count`` tokens of slot ``source`` to each of ``targets``."""
        for buffers in self._layers.values():
            for tensor in buffers:
                prefix = tensor[source, :, :count]
                for target in targets:
                    tensor[target, :, :count].copy_(prefix)

    def write(self, layer: int, parts: tuple[Tensor, ...], places: Tensor) -> tuple[Tensor, Tensor]:
        """Store a step's keys and values; returns all of the layer's, ``(slots, Hkv, length, D)`` each.

        Args:
            layer: its number.
            parts: keys and values on top of each other, ``(T, 2 Hkv, D)``; or ``(T, Hkv, D)`` and
                ``(T, Hkv, Dv)``.
            places: for each token and head of a part, its place among all ``slots * heads * length``.
        """
        buffers = self._layers.get(layer)
        if buffers is None:
            old = self._spare.pop(layer, ())
            spare = old if len(old) == len(parts) else (None,) * len(parts)
            buffers = tuple(self._buffer(one, kept) for one, kept in zip(parts, spare, strict=True))
            self._layers[layer] = buffers
        for buffer, new in zip(buffers, parts, strict=True):
            size = buffer.shape[-1]
            rows = new.reshape(-1, size)
            buffer.view(-1, size).index_copy_(0, places, rows if rows.dtype == buffer.dtype else rows.to(buffer.dtype))
        return _pair(buffers)

    def block(self, layer: int, prefixes: tuple[SharedPrefix, ...], sources: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the prefixes, found in the slots ``sources``: ``(len(sources), Hkv, longest, D)`` each.

        Gathered once for as long as the same prefixes are asked for: they do not change.
        """
        if self._block_of != prefixes:
            self._blocks.clear()
            self._block_of = prefixes
        found = self._blocks.get(layer)
        if found is None:
            longest = max(one.length for one in prefixes)
            key, value = (one[:, :, :longest].index_select(0, sources) for one in _pair(self._layers[layer]))
            found = self._blocks[layer] = (key, value)
        return found

    def _buffer(self, like: Tensor, spare: Tensor | None) -> Tensor:
        shape = (self.slots, like.shape[1], self.length, like.shape[2])
        numel = math.prod(shape)
        if spare is not None and spare.numel() >= numel and spare.dtype == like.dtype and spare.device == like.device:
            return spare[:numel].view(shape)
        return _zeros(like, shape)


def _pair(buffers: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    if len(buffers) == 1:
        heads = buffers[0].shape[1] // 2
        return buffers[0][:, :heads], buffers[0][:, heads:]
    return buffers[0], buffers[1]


def _zeros(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Zeros that can be written to in and out of inference mode."""
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=like.dtype, device=like.device)


def _moved(old: Tensor, slots: int, length: int, kept: list[int]) -> Tensor:
    new = _zeros(old, (slots, old.shape[1], length, old.shape[3]))
    common = min(length, old.shape[2])
    for target, source in enumerate(kept):
        new[target, :, :common].copy_(old[source, :, :common])
    return new
