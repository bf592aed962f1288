"""How the flat tokens of one step attend over the slots of the KV cache.

A step forwards T tokens in one row of batch size 1: for each busy slot the tokens that come next, one for a decoding
row, many for a prompt. ``DecodeLayout`` writes their keys and values into the slots and lets each token attend to its
own slot's past. Rows of like length attend together; nothing but the attention itself is ever padded.

On a CPU, decoding siblings attend to the prompt that they share all at once, and each to its own tokens; the two halves
of the softmax are put together by their log-sum-exps (Hydragen, arXiv:2402.05099): ``o = a + (b - a) sigmoid(l_b -
l_a)``. That reads the prompt's keys and values once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from envgrad.attention import AttentionCall
from envgrad.sampling.kv_cache import KVCache, StepRow
from envgrad.sampling.requests import SharedPrefix
from envgrad.sampling.shared_half import SharedHalf, flash, is_flash

_MASK_ELEMENTS = 1 << 22
_SPREAD = 2.5
"""attend over a span of slots with holes, instead of gathering the busy ones, up to this ratio of span to busy"""
_WORTH_SPLITTING = 4096
"""pairs of decoding tokens and shared keys from which on attention in two halves is quicker"""


@dataclass(slots=True)
class _Bucket:
    """Rows that attend together: query ``(B, Hq, n, D)``, n the largest size; shorter rows repeat a token."""

    rows: list[StepRow]
    offsets: list[int]
    """index of each row's first token in the flat step"""
    device: torch.device
    span: tuple[int, int] | None = None
    """attend over this range of slots; else ``slots`` are gathered"""
    shared: SharedHalf | None = None
    """what the rows attend to together; they attend to the rest here"""
    first: int = field(init=False)
    """keys before this one are in nobody's own half"""
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
        self.first = 0
        if self.shared is not None:
            self.first = min(self.shared.lengths)
            self.shared.align(places, high - low)
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
        key = torch.arange(self.first, self.width if self.fresh else self.keys, device=self.device)
        hidden = key > query
        if self.shared is not None and self.shared.cut is not None:
            hidden |= key < self.shared.cut
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
        prefixes: for each row, what its slot shares with others; default: nothing.

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

    def __init__(
        self,
        cache: KVCache,
        rows: Sequence[StepRow],
        device: torch.device,
        prefixes: Sequence[SharedPrefix | None] | None = None,
    ) -> None:
        self._cache = cache
        self._device = device
        self._rows = list(rows)
        self._prefixes = [None] * len(rows) if prefixes is None else list(prefixes)
        self._offsets = list(accumulate((size for _, _, size in rows), initial=0))
        slots = [slot for slot, _, size in rows for _ in range(size)]
        positions = [start + step for _, start, size in rows for step in range(size)]
        both = torch.tensor(slots + positions, device=device)
        self.slots, self.positions = torch.split(both, len(slots))
        """(T,) each token's slot, and its position in its row"""
        self._places: dict[tuple[int, int], Tensor] = {}
        """where the tokens are stored, for each number of key heads and length of the slots"""
        self._plans: dict[bool, list[_Bucket]] = {}
        """buckets that attend in halves where that is worth it, and buckets that never do"""
        self._decodes = all(size == 1 for _, _, size in rows)
        self.layers_seen: set[int] = set()

    def followed_by(self, rows: Sequence[StepRow], prefixes: Sequence[SharedPrefix | None]) -> bool:
        """Whether ``advance`` makes this the layout of ``rows``: those of this step, each a token further."""
        return (
            self._decodes
            and self._prefixes == prefixes
            and rows == [StepRow(slot, start + 1, 1) for slot, start, _ in self._rows]
        )

    def advance(self) -> None:
        """Become the layout of the step in which every row decodes one token more, without building it anew."""
        if not self._decodes:
            raise AssertionError("only a step that decodes one token per row can be advanced")
        self.positions.add_(1)
        for places in self._places.values():
            places.add_(1)
        for buckets in self._plans.values():
            for bucket in buckets:
                bucket.advance()
        self._rows = [StepRow(slot, start + 1, 1) for slot, start, _ in self._rows]

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """``attend_tokens`` in the shapes of ``AttentionLayout``."""
        query, key, value = (one[0].transpose(0, 1) for one in (query, key, value))
        return self.attend_tokens(call, query, key, value).unsqueeze(0)

    def attend_tokens(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Query ``(T, Hq, D)``, key ``(T, Hkv, D)`` and value ``(T, Hkv, Dv)`` -> ``(T, Hq, Dv)``."""
        if key.shape[2] == value.shape[2]:
            return self.attend_joined(call, query, torch.cat((key, value), 1))
        keys, values = self._cache.write(call.layer, (key, value), self._places_of(key.shape[1]))
        return self._attend_all(call, query, key, value, keys, values)

    def attend_joined(self, call: AttentionCall, query: Tensor, joined: Tensor) -> Tensor:
        """Query ``(T, Hq, D)``, keys and values ``(T, 2 Hkv, D)`` on top of each other -> ``(T, Hq, D)``."""
        keys, values = self._cache.write(call.layer, (joined,), self._places_of(joined.shape[1]))
        heads = keys.shape[1]
        return self._attend_all(call, query, joined[:, :heads], joined[:, heads:], keys, values)

    def _attend_all(
        self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        self.layers_seen.add(call.layer)
        buckets = self._buckets(call.window is None and is_flash(query, keys, values))
        first = buckets[0]
        if len(buckets) == 1 and first.in_order and first.offsets == self._offsets[:-1]:
            return self._attend(first, call, query, key, value, keys, values)
        output = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
        for bucket in buckets:
            output.index_copy_(0, bucket.tokens, self._attend(bucket, call, query, key, value, keys, values))
        return output

    def _attend(
        self, bucket: _Bucket, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, keys: Tensor,
        values: Tensor,
    ) -> Tensor:  # fmt: skip
        shared = bucket.shared
        if shared is None:
            return _attend_bucket(bucket, call, query, key, value, keys, values)
        block = self._cache.block(call.layer, shared.prefixes, shared.sources)
        own = _own_half(bucket, call, query, keys, values)
        flat = shared.complete(query, block, own, call.scaling)
        return flat if bucket.in_order else flat.index_select(0, bucket.give)

    def _buckets(self, split: bool) -> list[_Bucket]:
        found = self._plans.get(split)
        if found is None:
            groups = _partition(self._rows)
            sharing = self._sharing(groups[0]) if split else []
            if sharing:
                alone = [one for one in groups[0] if one not in sharing]
                groups = [sharing, *([alone] if alone else []), *groups[1:]]
            found = self._plans[split] = [
                self._bucket(chosen, bool(sharing) and number == 0) for number, chosen in enumerate(groups)
            ]
        return found

    def _sharing(self, decoding: list[int]) -> list[int]:
        """Which of these rows share a prompt with another of them, if there is enough of it; else none."""
        alike: dict[SharedPrefix, list[int]] = {}
        for one in decoding:
            prefix, row = self._prefixes[one], self._rows[one]
            if prefix is not None and row.size == 1 and prefix.length <= row.start:
                alike.setdefault(prefix, []).append(one)
        pairs = sum(prefix.length * len(family) for prefix, family in alike.items() if len(family) > 1)
        if pairs < _WORTH_SPLITTING:
            return []
        sharing = {one for family in alike.values() if len(family) > 1 for one in family}
        return [one for one in decoding if one in sharing]

    def _bucket(self, chosen: list[int], in_halves: bool) -> _Bucket:
        rows, offsets = [self._rows[one] for one in chosen], [self._offsets[one] for one in chosen]
        shared = None
        if in_halves:
            prefixes = [prefix for one in chosen if (prefix := self._prefixes[one]) is not None]
            shared = SharedHalf(prefixes, rows, offsets, self._device)
        return _Bucket(rows, offsets, self._device, shared=shared)

    def _places_of(self, heads: int) -> Tensor:
        length = self._cache.length
        places = self._places.get((heads, length))
        if places is None:
            first = self.slots.unsqueeze(1) * heads + torch.arange(heads, device=self._device)
            places = (first * length + self.positions.unsqueeze(1)).flatten()
            self._places[heads, length] = places
        return places


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
    q = query.index_select(0, bucket.take.view(-1))
    if bucket.fresh:
        k, v = (one.index_select(0, bucket.take.view(-1)) for one in (key, value))
        k, v = (one.view(size, width, heads, -1).transpose(1, 2) for one in (k, v))
    elif bucket.span is not None:
        low, high = bucket.span
        k, v = keys[low:high, :, : bucket.keys], values[low:high, :, : bucket.keys]
    else:
        k = keys[:, :, : bucket.keys].index_select(0, bucket.slots)
        v = values[:, :, : bucket.keys].index_select(0, bucket.slots)
    k, v = k.to(q.dtype), v.to(q.dtype)
    if width == 1:
        # one query per row: the query heads that share a key head become its queries, and nothing is repeated
        q = q.view(size, heads, groups, -1)
        out = scaled_dot_product_attention(q, k, v, attn_mask=bucket.mask(call.window, q.dtype), scale=call.scaling)
        flat = out.reshape(size, heads * groups, -1)
        return flat if bucket.in_order else flat.index_select(0, bucket.give)
    q = q.view(size, width, heads * groups, -1).transpose(1, 2)
    if bucket.fresh and (call.window is None or call.window >= width):
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=call.scaling, enable_gqa=groups > 1)
    else:
        mask = bucket.mask(call.window, q.dtype)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=call.scaling, enable_gqa=groups > 1)
    flat = out.transpose(1, 2).reshape(size * width, heads * groups, -1)
    return flat if bucket.in_order else flat.index_select(0, bucket.give)


def _own_half(
    bucket: _Bucket, call: AttentionCall, query: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Decoding rows over what they do not share: output ``(rows, Hkv, G, D)`` and log-sum-exp ``(rows, Hkv, G)``."""
    size, heads = bucket.take.shape[0], keys.shape[1]
    q = query.index_select(0, bucket.take.view(-1)).view(size, heads, query.shape[1] // heads, -1)
    if bucket.span is None:
        k, v = (one[:, :, bucket.first : bucket.keys].index_select(0, bucket.slots) for one in (keys, values))
    else:
        low, high = bucket.span
        k, v = (one[low:high, :, bucket.first : bucket.keys] for one in (keys, values))
    return flash(q, k, v, bucket.mask(None, query.dtype).expand(size, heads, q.shape[2], -1), call.scaling)
