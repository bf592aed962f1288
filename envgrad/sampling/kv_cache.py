"""Keys and values of many rows in slots, and attention of one flat, padding-free step over them.

A step forwards T tokens in one row of batch size 1: for each busy slot the tokens that come next, one for a decoding
row, many for a prompt. ``DecodeLayout`` writes their keys and values into the slots and lets each token attend to its
own slot's past. Rows of like length attend together; nothing but the attention itself is ever padded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from envgrad.attention import AttentionCall

_MASK_ELEMENTS = 1 << 22
_SPARE_BYTES = 1 << 26
_SPREAD = 2.5
"""attend over a span of slots with holes, instead of gathering the busy ones, up to this ratio of span to busy"""


class StepRow(NamedTuple):
    """The tokens ``start .. start + size`` of the row in ``slot``. (A tuple: made per row and step.)"""

    slot: int
    start: int
    size: int


class KVCache:
    """Preallocated keys and values: per layer ``(slots, Hkv, length, D)``, made when a layer first writes.

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
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._spare: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for pair in self._layers.values() for tensor in pair)

    def resize(self, slots: int, length: int, keep: Sequence[int] | None = None) -> None:
        """Make room for ``slots`` rows of ``length`` tokens. Old slot ``keep[i]`` becomes ``i`` (default: all stay)."""
        kept = list(range(min(self.slots, slots))) if keep is None else list(keep)
        for layer, pair in self._layers.items():
            self._layers[layer] = (
                _moved(pair[0], slots, length, kept),
                _moved(pair[1], slots, length, kept),
            )
        self.slots, self.length = slots, length

    def drop(self) -> None:
        """Forget everything. Memory is freed, for training to use, but for a small cache's, which is kept for reuse."""
        small = self.num_bytes <= _SPARE_BYTES
        self._spare = {layer: (key.view(-1), value.view(-1)) for layer, (key, value) in self._layers.items() if small}
        self._layers.clear()
        self.slots = self.length = 0

    def copy(self, source: int, targets: Sequence[int], count: int) -> None:
        """Copy the first ``count`` tokens of slot ``source`` to each of ``targets``."""
        for pair in self._layers.values():
            for tensor in pair:
                prefix = tensor[source, :, :count]
                for target in targets:
                    tensor[target, :, :count].copy_(prefix)

    def write(self, layer: int, key: Tensor, value: Tensor, slot: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values (``(1, Hkv, T, D)``) at ``(slot[t], position[t])``; returns the layer's buffers."""
        pair = self._layers.get(layer)
        if pair is None:
            old = self._spare.pop(layer, (None, None))
            pair = (self._buffer(key, old[0]), self._buffer(value, old[1]))
            self._layers[layer] = pair
        pair[0][slot, :, position] = key[0].transpose(0, 1).to(pair[0].dtype)
        pair[1][slot, :, position] = value[0].transpose(0, 1).to(pair[1].dtype)
        return pair

    def _buffer(self, like: Tensor, spare: Tensor | None) -> Tensor:
        shape = (self.slots, like.shape[1], self.length, like.shape[3])
        numel = math.prod(shape)
        if spare is not None and spare.numel() >= numel and spare.dtype == like.dtype and spare.device == like.device:
            return spare[:numel].view(shape)
        return like.new_zeros(shape)


def _moved(old: Tensor, slots: int, length: int, kept: list[int]) -> Tensor:
    new = old.new_zeros(slots, old.shape[1], length, old.shape[3])
    common = min(length, old.shape[2])
    for target, source in enumerate(kept):
        new[target, :, :common].copy_(old[source, :, :common])
    return new


@dataclass(slots=True)
class _Bucket:
    """Rows that attend together: query ``(B, Hq, n, D)``, n the largest size; shorter rows repeat a token."""

    rows: list[StepRow]
    offsets: list[int]
    """index of each row's first token in the flat step"""
    device: torch.device
    span: tuple[int, int] | None = None
    """attend over this range of slots; else ``slots`` are gathered"""
    keys: int = field(init=False)
    width: int = field(init=False)
    fresh: bool = field(init=False)
    """no row has a past: keys and values come from the step itself"""
    take: Tensor = field(init=False)
    """(B, n) flat token index of each query; B covers the whole span"""
    give: Tensor = field(init=False)
    """(tokens,) index into (B * n) of each of the bucket's tokens, in ``tokens`` order"""
    tokens: Tensor = field(init=False)
    slots: Tensor = field(init=False)
    positions: Tensor = field(init=False)
    """(B, n) position of each query in its row"""
    masks: dict[int | None, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        rows = self.rows
        self.keys = max(start + size for _, start, size in rows)
        self.width = max(size for _, _, size in rows)
        self.fresh = self.width > 1 and all(start == 0 for _, start, _ in rows)
        if self.width == 1 and len(rows) > 1:
            low, high = rows[0].slot, rows[-1].slot + 1
            if high - low <= _SPREAD * len(rows):
                self.span = (low, high)
        low, high = self.span or (0, len(rows))
        places = [slot - low for slot, _, _ in rows] if self.span else list(range(len(rows)))
        self._index(places, high - low)
        self.masks = {}

    def _index(self, places: list[int], size: int) -> None:
        """Index tensors, for rows at ``places`` of ``size``; holes repeat the step's first token, at position 0."""
        width = self.width
        if width == 1:
            take, positions, give, tokens = [0] * size, [0] * size, places, self.offsets
            for place, offset, (_, start, _) in zip(places, self.offsets, self.rows, strict=True):
                take[place], positions[place] = offset, start
        else:
            take, positions = [0] * (size * width), [0] * (size * width)
            give, tokens = [], []
            for place, (_, start, count), offset in zip(places, self.rows, self.offsets, strict=True):
                inner = [*range(count), *([count - 1] * (width - count))]
                base = place * width
                take[base : base + width] = [offset + step for step in inner]
                positions[base : base + width] = [start + step for step in inner]
                give += range(base, base + count)
                tokens += range(offset, offset + count)
        flat = torch.tensor([*take, *positions, *give, *tokens, *(row.slot for row in self.rows)], device=self.device)
        parts = torch.split(flat, [len(take), len(positions), len(give), len(tokens), len(self.rows)])
        self.take, self.positions = parts[0].view(size, width), parts[1].view(size, width)
        self.give, self.tokens, self.slots = parts[2], parts[3], parts[4]

    def advance(self) -> None:
        """Every row decodes one token more (holes too: what they attend to is thrown away)."""
        self.positions.add_(1)
        self.keys += 1
        self.masks.clear()

    @property
    def in_order(self) -> bool:
        """Whether the queries are exactly the bucket's tokens, in order: no padding, no holes."""
        return self.take.numel() == self.tokens.numel()

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask (B, 1, n, keys), or (1, 1, n, n) where no row has a past; built once per window size."""
        known = self.masks.get(window)
        if known is not None:
            return known
        if self.fresh:
            query = torch.arange(self.width, device=self.device).view(1, 1, -1, 1)
        else:
            query = self.positions[:, None, :, None]
        key = torch.arange(self.width if self.fresh else self.keys, device=self.device)
        hidden = key > query
        if window is not None:
            hidden |= key <= query - window
        made = torch.zeros(hidden.shape, dtype=dtype, device=self.device).masked_fill_(hidden, float("-inf"))
        self.masks[window] = made
        return made


class DecodeLayout:
    """How the flat tokens of one step attend: each to the past of its own slot. An ``AttentionLayout``.

    Args:
        cache: the slots; it must have room for every row.
        rows: what the step forwards, in flat order. Each row's earlier tokens must be in the cache.
        device: where the step runs.

    Example:
        >>> cache = KVCache()
        >>> cache.resize(2, 8)
        >>> layout = DecodeLayout(cache, [StepRow(slot=1, start=0, size=3)], torch.device("cpu"))
        >>> layout.positions.tolist()
        [0, 1, 2]
        >>> q, k, v = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8)
        >>> layout.attend(AttentionCall(layer=0, scaling=None, dropout=0.0, window=None), q, k, v).shape
        torch.Size([1, 3, 4, 8])
    """

    def __init__(self, cache: KVCache, rows: Sequence[StepRow], device: torch.device) -> None:
        self._cache = cache
        self._device = device
        offsets = list(accumulate((size for _, _, size in rows), initial=0))
        slots = [slot for slot, _, size in rows for _ in range(size)]
        positions = [start + step for _, start, size in rows for step in range(size)]
        both = torch.tensor(slots + positions, device=device)
        self.slots, self.positions = torch.split(both, len(slots))
        """(T,) each token's slot, and its position in its row"""
        self._buckets = [
            _Bucket([rows[index] for index in chosen], [offsets[index] for index in chosen], device)
            for chosen in _partition(rows)
        ]
        first = self._buckets[0]
        self._whole = len(self._buckets) == 1 and first.in_order and first.offsets == sorted(first.offsets)
        """one bucket whose queries are the step's tokens, in order"""
        decoding = all(size == 1 for _, _, size in rows)
        self._next = [StepRow(slot, start + 1, 1) for slot, start, _ in rows] if decoding else None
        self.layers_seen: set[int] = set()

    @property
    def follows(self) -> Sequence[StepRow] | None:
        """The rows of the next step if every row decodes one token more; None if this step had longer rows."""
        return self._next

    def advance(self) -> None:
        """Become the layout of that next step, without building it anew."""
        if self._next is None:
            raise AssertionError("only a step that decodes one token per row can be advanced")
        self.positions.add_(1)
        for bucket in self._buckets:
            bucket.advance()
        self._next = [StepRow(slot, start + 1, 1) for slot, start, _ in self._next]

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.layers_seen.add(call.layer)
        keys, values = self._cache.write(call.layer, key, value, self.slots, self.positions)
        if self._whole:
            return _attend_bucket(self._buckets[0], call, query, key, value, keys, values).unsqueeze(0)
        output = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
        for bucket in self._buckets:
            output.index_copy_(0, bucket.tokens, _attend_bucket(bucket, call, query, key, value, keys, values))
        return output.unsqueeze(0)


def _partition(rows: Sequence[StepRow]) -> list[list[int]]:
    """Group row indices: decoding rows in slot order, then prompts and suffixes of like length."""
    decoding = sorted((slot, index) for index, (slot, _, size) in enumerate(rows) if size == 1)
    groups = [[index for _, index in decoding]] if decoding else []
    longer = [index for index, (_, _, size) in enumerate(rows) if size > 1]
    longer.sort(key=lambda index: (rows[index].start > 0, rows[index].size, rows[index].start, index))
    current: list[int] = []
    keys = 0

    for index in longer:
        row = rows[index]
        keys = max(keys, row.start + row.size)
        if current:
            first = rows[current[0]]
            fits = row.start == 0 or (len(current) + 1) * row.size * keys <= _MASK_ELEMENTS
            if (first.start > 0) == (row.start > 0) and row.size <= 1.5 * first.size and fits:
                current.append(index)
                continue
        current, keys = [index], row.start + row.size
        groups.append(current)
    return groups


def _attend_bucket(
    bucket: _Bucket, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Attention output of the bucket's tokens, ``(tokens, Hq, Dv)``."""
    heads, groups = key.shape[1], query.shape[1] // key.shape[1]
    size, width = bucket.take.shape
    q = query[0].index_select(1, bucket.take.view(-1)).view(query.shape[1], size, width, -1).transpose(0, 1)
    if bucket.fresh:
        shape = (heads, size, width, -1)
        k = key[0].index_select(1, bucket.take.view(-1)).view(shape).transpose(0, 1)
        v = value[0].index_select(1, bucket.take.view(-1)).view(shape).transpose(0, 1)
    elif bucket.span is not None:
        low, high = bucket.span
        k, v = keys[low:high, :, : bucket.keys], values[low:high, :, : bucket.keys]
    else:
        k = keys[:, :, : bucket.keys].index_select(0, bucket.slots)
        v = values[:, :, : bucket.keys].index_select(0, bucket.slots)
    k, v = k.to(q.dtype), v.to(q.dtype)
    if width == 1:
        # one query per row: the query heads that share a key head become its queries, and nothing is repeated
        q = q.reshape(size, heads, groups, -1)
        out = scaled_dot_product_attention(q, k, v, attn_mask=bucket.mask(call.window, q.dtype), scale=call.scaling)
    elif bucket.fresh and (call.window is None or call.window >= width):
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=call.scaling, enable_gqa=groups > 1)
    else:
        mask = bucket.mask(call.window, q.dtype)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=call.scaling, enable_gqa=groups > 1)
    if width == 1:
        flat = out.reshape(size, heads * groups, -1)
    else:
        flat = out.transpose(1, 2).reshape(size * width, heads * groups, -1)
    return flat if bucket.in_order else flat.index_select(0, bucket.give)
