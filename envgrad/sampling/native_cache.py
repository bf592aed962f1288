"""Keys and values in the order in which the compiled kernels read them, and which rows a step forwards."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from envgrad.native.memory import floats
from envgrad.sampling.kv_cache import StepRow
from envgrad.sampling.requests import SharedPrefix

_SPARE_BYTES = 1 << 26
"""most memory that is kept for reuse when all keys and values go"""


class NativeCache:
    """Preallocated keys and values of all layers. Keys ``(layers, slots, Hkv, blocks, D, vector)``: blocks of as many
    tokens as a vector has numbers; values ``(layers, slots, Hkv, blocks * vector, D')``, padded to whole vectors.

    Memory is not zeroed: nothing is read that was not written.

    Example:
        >>> cache = NativeCache(layers=1, kv_heads=2, size=4, vector=8)
        >>> cache.resize(2, 20)
        >>> cache.keys.shape, cache.values.shape
        (torch.Size([1, 2, 2, 3, 4, 8]), torch.Size([1, 2, 2, 24, 8]))
    """

    def __init__(self, *, layers: int, kv_heads: int, size: int, vector: int) -> None:
        self.slots = 0
        self.length = 0
        self._layers, self._kv_heads, self._size, self.vector = layers, kv_heads, size, vector
        self._spare: list[Tensor] = []
        self.keys, self.values = self._made(0, 0)

    @property
    def blocks(self) -> int:
        """Blocks of keys in a slot."""
        return -(-self.length // self.vector)

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def resize(self, slots: int, length: int, keep: Sequence[int] | None = None) -> None:
        """Make room for ``slots`` rows of ``length`` tokens. Old slot ``keep[i]`` becomes ``i`` (default: all stay)."""
        kept = list(range(min(self.slots, slots))) if keep is None else list(keep)
        old = (self.keys, self.values)
        common = min(self.blocks, -(-length // self.vector))
        self.slots, self.length = slots, length
        self.keys, self.values = self._made(slots, self.blocks)
        for target, source in enumerate(kept):
            self.keys[:, target, :, :common] = old[0][:, source, :, :common]
            self.values[:, target, :, : common * self.vector] = old[1][:, source, :, : common * self.vector]

    def drop(self) -> None:
        """Forget everything. Memory is freed, for training to use, but for a small cache's, which is kept for reuse."""
        if self.num_bytes:  # and not a second time, when there is nothing
            self._spare = [self.keys.view(-1), self.values.view(-1)] if self.num_bytes <= _SPARE_BYTES else []
        self.slots = self.length = 0
        self.keys, self.values = self._made(0, 0)

    def copy(self, source: int, targets: Sequence[int], count: int) -> None:
        """Copy the first ``count`` tokens of slot ``source`` to each of ``targets``."""
        blocks = -(-count // self.vector)
        keys, values = self.keys[:, source, :, :blocks], self.values[:, source, :, :count]
        for target in targets:
            self.keys[:, target, :, :blocks].copy_(keys)
            self.values[:, target, :, :count].copy_(values)

    def _made(self, slots: int, blocks: int) -> tuple[Tensor, Tensor]:
        width = -(-self._size // self.vector) * self.vector
        shapes = (
            (self._layers, slots, self._kv_heads, blocks, self._size, self.vector),
            (self._layers, slots, self._kv_heads, blocks * self.vector, width),
        )
        spare, found = self._spare, []
        with torch.inference_mode(False):  # written to in and out of it
            for number, shape in enumerate(shapes):
                numel = int(np.prod(shape, dtype=np.int64))
                reused = spare[number] if spare and numel and spare[number].numel() >= numel else None
                found.append(floats(*shape) if reused is None else reused[:numel].view(shape))
        if slots:
            self._spare = []
        return found[0], found[1]


class NativeLayout:
    """The flat tokens of one step: each one's slot and position. ``DecodeLayout``'s part for the compiled kernels.

    Example:
        >>> cache = NativeCache(layers=1, kv_heads=1, size=4, vector=8)
        >>> NativeLayout(cache, [StepRow(slot=1, start=3, size=2)], torch.device("cpu")).index.tolist()
        [[1, 1], [3, 4], [1, 1], [0, 0]]
    """

    def __init__(
        self,
        cache: NativeCache,
        rows: Sequence[StepRow],
        device: torch.device,
        prefixes: Sequence[SharedPrefix | None] | None = None,
    ) -> None:
        self.cache = cache
        self._rows = list(rows)
        self.longest = max(start + size for _, start, size in rows)
        """tokens of the longest row, behind this step"""
        self._ahead = 0
        """steps since it was made"""
        self._decodes = all(size == 1 for _, _, size in rows)
        self._prefixes = [None] * len(rows) if prefixes is None else list(prefixes)
        sources: dict[SharedPrefix, int] = {}
        index: list[tuple[int, int, int, int]] = []
        for (slot, start, size), prefix in zip(rows, self._prefixes, strict=True):
            source, shared = slot, 0
            if prefix is not None:
                source, shared = sources.setdefault(prefix, slot), min(prefix.length, start)
            index += [(slot, start + step, source, shared) for step in range(size)]
        self.index = np.ascontiguousarray(np.array(index, dtype=np.int32).T)
        """(4, T): each token's slot and position; a slot with the same first tokens, and how many they are"""

    def followed_by(self, rows: Sequence[StepRow], prefixes: Sequence[SharedPrefix | None]) -> bool:
        """Whether ``advance`` makes this the layout of ``rows``: those of this step, each a token further."""
        ahead = self._ahead + 1
        further = [StepRow(slot, start + ahead, 1) for slot, start, _ in self._rows]
        return self._decodes and self._prefixes == prefixes and rows == further

    def advance(self) -> None:
        """Become the layout of the step in which every row decodes one token more."""
        self.index[1] += 1
        self._ahead += 1
        self.longest += 1
