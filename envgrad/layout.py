"""How the tokens of a packed row attend to each other: prompts causally, siblings to their prompt and to themselves.

Exact, not approximate: log-probs and gradients equal those of the plain rows up to float rounding. The idea of
forwarding a common prefix once is known from decoding (Hydragen, arXiv:2402.05099); here it is differentiated too.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from envgrad.flex_rows import BLOCK, FlexRow
from envgrad.native.packed_attention import AttentionPlan, can_attend, native_attention
from envgrad.split_attention import Pieces, can_split, split_attention

if TYPE_CHECKING:
    from envgrad.attention import AttentionCall, AttentionLayout

PackedAttention: TypeAlias = Literal["auto", "flex"]
"""how packed rows attend: ``auto``, by kernels or pieces on a CPU and in padded blocks elsewhere; ``flex``, in one call
of FlexAttention"""

BLOCK_COST = 2**14
"""cost of one more attention call, in (query, key) pairs: what gave the quickest forward and backward on one CPU core,
for 4 heads of width 32, of 2^10, 2^12, 2^14, 2^16"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """``count`` siblings that lie side by side in the row and attend to one common prefix and to themselves.

    One attention call. ``pad`` ``(count * longest,)`` brings rows of different lengths to one length, inside attention
    only, and ``unpad`` takes the real ones back; both are None if all lengths are equal.
    """

    tokens: int
    count: int
    longest: int
    prefix: int | None = None
    """the block that is the prefix; None for rows that have none"""
    prefix_length: int = 0
    pad: Tensor | None = None
    unpad: Tensor | None = None

    @classmethod
    def of(cls, lengths: Sequence[int], prefix: int | None = None, prefix_length: int = 0) -> _Block:
        longest = max(lengths)
        pad = unpad = None
        if min(lengths) < longest:
            size = torch.tensor(lengths)[:, None]
            column = torch.arange(longest)[None, :]
            real = column < size
            # A padded key is only ever seen by padded queries, and those are dropped: any valid index will do.
            pad = torch.where(real, torch.cumsum(size, 0) - size + column, 0).flatten()
            unpad = real.flatten().nonzero().flatten()
        return cls(
            tokens=sum(lengths), count=len(lengths), longest=longest, prefix=prefix, prefix_length=prefix_length,
            pad=pad, unpad=unpad,
        )  # fmt: skip

    def to(self, device: torch.device | str) -> _Block:
        if self.pad is None or self.unpad is None:
            return self
        return replace(self, pad=self.pad.to(device), unpad=self.unpad.to(device))

    def batch(self, own: Tensor, prefix: Tensor | None = None) -> Tensor:
        """Own rows ``(tokens, H, D)``, prefix ``(P, H, D)`` -> ``(count, H, P + longest, D)``."""
        rows = own if self.pad is None else own.index_select(0, self.pad)
        rows = rows.reshape(self.count, self.longest, *own.shape[1:])
        if prefix is not None:
            rows = torch.cat((prefix.expand(self.count, -1, -1, -1), rows), dim=1)
        return rows.transpose(1, 2)

    def flatten(self, x: Tensor) -> Tensor:
        """``(count, H, longest, D)`` -> the real rows ``(tokens, H, D)``."""
        flat = x.transpose(1, 2).flatten(0, 1)
        return flat if self.unpad is None else flat.index_select(0, self.unpad)


class _Whole:
    """Attention on a CPU where nothing is beyond a window: by our own kernel, or else in pieces by torch's.

    Of all tokens, or of those ``wanted`` only (int64, ascending, different).
    """

    __slots__ = ("_pieces", "_plan", "_wanted")

    def __init__(self, families: Sequence[tuple[int, Sequence[int]]], wanted: Tensor | None = None) -> None:
        places = None if wanted is None else wanted.tolist()
        self._plan = AttentionPlan.of(families, places)
        self._pieces = Pieces.of(families) if places is None else Pieces.of_queries(families, places)
        self._wanted = wanted

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Query ``(Hq, T, D)``, key and value ``(Hkv, T, D)`` -> ``(T, Hq, D)``, 0 for what is not wanted."""
        if can_attend(query, key, value):
            return native_attention(query, key, value, self._plan, scale)
        if self._wanted is None:
            return split_attention(query, key, value, self._pieces, scale)
        found = split_attention(query.index_select(1, self._wanted), key, value, self._pieces, scale)
        return found.new_zeros((query.shape[1], *found.shape[1:])).index_copy(0, self._wanted, found)


class PackedLayout:
    """How the tokens of a micro-batch's row attend to each other (``attention.AttentionLayout``).

    On a CPU, the row's attention is a call of our own kernel (``native.packed_attention``), or put together from pieces
    without padding (``split_attention``). Elsewhere, and where a sliding window is shorter than the rows, every block
    is one ``scaled_dot_product_attention``: prompts causally among themselves, siblings as a batch over prompt and own
    tokens; ``by("flex")`` is the same row in one block-sparse call for a GPU. Nothing but masks is kept between calls,
    and these depend on shapes only, so activation checkpointing and several forwards with one layout are safe.

    Not a dataclass on purpose: FSDP rebuilds dataclasses that it finds among a forward's arguments.

    Example:
        >>> layout = PackedLayout.build([(2, (3, 1))])  # a prompt of 2 tokens, siblings with 3 and 1 own tokens
        >>> layout.num_tokens
        6
    """

    __slots__ = ("_blocks", "_families", "_flex", "_longest", "_masks", "_whole", "num_tokens")

    def __init__(self, blocks: tuple[_Block, ...], families: Sequence[tuple[int, Sequence[int]]]) -> None:
        self._blocks = blocks
        self._families = families
        self._whole = _Whole(families)
        self._longest = max((block.prefix_length + block.longest for block in blocks), default=0)
        self._masks: dict[Hashable, Tensor] = {}
        self._flex: FlexLayout | None = None
        self.num_tokens = sum(block.tokens for block in blocks)

    @classmethod
    def build(cls, families: Sequence[tuple[int, Sequence[int]]]) -> PackedLayout:
        """The layout of ``(prefix length, own lengths of its siblings in row order)`` families, one after another.

        A prefix length of 0 means rows that share nothing. Own lengths may be 0.
        """
        blocks: list[_Block] = []
        for prefix_length, lengths in families:
            prefix = None
            if prefix_length:
                prefix = len(blocks)
                blocks.append(_Block.of((prefix_length,)))
            buckets = length_buckets(prefix_length, [length for length in lengths if length])
            blocks.extend(_Block.of(bucket, prefix, prefix_length) for bucket in buckets)
        return cls(tuple(blocks), tuple(families))

    @property
    def families(self) -> Sequence[tuple[int, Sequence[int]]]:
        """What it was built of (``build``)."""
        return self._families

    def to(self, device: torch.device | str) -> PackedLayout:
        return PackedLayout(tuple(block.to(device) for block in self._blocks), self._families)

    def by(self, attention: PackedAttention) -> PackedLayout:
        """The same row, attending so; what is made for it is kept."""
        if attention == "auto":
            return self
        if self._flex is None:
            self._flex = FlexLayout(self)
        return self._flex

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Query ``(1, Hq, T, D)``, key and value ``(1, Hkv, T, D)`` -> ``(1, T, Hq, Dv)``."""
        if self._splits(call, query, key, value):
            return self._whole.attend(query[0], key[0], value[0], call.scaling).unsqueeze(0)
        return self._attend_masked(call, query, key, value)

    def _splits(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> bool:
        whole = call.window is None or call.window >= self._longest
        return whole and can_split(query, key, value, dropout=call.dropout)

    def of_queries(self, wanted: Tensor) -> AttentionLayout:
        """The same row where only the outputs of the tokens ``wanted`` (int64, ascending, different) are read."""
        return QueriesLayout(self, wanted)

    def _attend_masked(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        sizes = [block.tokens for block in self._blocks]
        # Split once: the gradient of a split is one concatenation, that of a slice is a row of zeros for each slice.
        queries, keys, values = (torch.split(x[0].transpose(0, 1), sizes) for x in (query, key, value))
        outputs = []
        for number, block in enumerate(self._blocks):
            length = block.prefix_length if call.window is None else min(block.prefix_length, call.window - 1)
            if block.prefix is None or length == 0:
                own_keys, own_values = block.batch(keys[number]), block.batch(values[number])
            else:
                own_keys = block.batch(keys[number], keys[block.prefix][-length:])
                own_values = block.batch(values[number], values[block.prefix][-length:])
            outputs.append(
                block.flatten(self._attend(call, length, block.batch(queries[number]), own_keys, own_values))
            )
        return torch.cat(outputs).unsqueeze(0)

    def _attend(self, call: AttentionCall, prefix: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Query ``(n, Hq, L, D)`` over keys ``(n, Hkv, prefix + L, D)``: causal, within the window."""
        longest = query.shape[2]
        window = call.window if call.window is not None and call.window < prefix + longest else None
        causal = prefix == 0 and window is None
        mask = None if causal else self._mask(prefix, longest, window, query)
        grouped = query.shape[1] != key.shape[1]
        if grouped and mask is not None and query.device.type != "cpu":
            # The fused GPU kernels take grouped heads only without a mask.
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
            grouped = False
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=call.dropout, is_causal=causal, scale=call.scaling,
            enable_gqa=grouped,
        )  # fmt: skip

    def _mask(self, prefix: int, longest: int, window: int | None, like: Tensor) -> Tensor:
        """Additive mask ``(longest, prefix + longest)``: causal, and within ``window`` tokens."""
        name = (prefix, longest, window, like.dtype, like.device)
        if name not in self._masks:
            # A mask first made in inference mode could not be used in a later training forward.
            with torch.inference_mode(False):
                queries = torch.arange(prefix, prefix + longest, device=like.device)[:, None]
                keys = torch.arange(prefix + longest, device=like.device)[None, :]
                hidden = keys > queries
                if window is not None:
                    hidden |= keys <= queries - window
                mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
                self._masks[name] = mask.masked_fill_(hidden, -inf)
        return self._masks[name]


class QueriesLayout:
    """A row where only some tokens' outputs are read (``PackedLayout.of_queries``); 0 or anything for the others."""

    __slots__ = ("_layout", "_whole", "wanted")

    def __init__(self, layout: PackedLayout, wanted: Tensor) -> None:
        self._layout = layout
        self._whole = _Whole(layout.families, wanted)
        self.wanted = wanted

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As ``PackedLayout.attend``."""
        if not self._layout._splits(call, query, key, value):
            return self._layout.attend(call, query, key, value)
        return self._whole.attend(query[0], key[0], value[0], call.scaling).unsqueeze(0)


class FlexLayout(PackedLayout):
    """A row that attends by FlexAttention (``PackedLayout.by``).

    Where that gains nothing or cannot act, a row within one of its blocks or a call with dropout, it attends as others.
    """

    __slots__ = ("_row",)

    def __init__(self, layout: PackedLayout) -> None:
        self._blocks, self._families = layout._blocks, layout._families
        self._whole, self._longest, self._masks = layout._whole, layout._longest, layout._masks
        self.num_tokens = layout.num_tokens
        self._row = FlexRow(layout.families)
        self._flex = None

    def by(self, attention: PackedAttention) -> PackedLayout:
        return self

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As ``PackedLayout.attend``."""
        if call.dropout or self.num_tokens <= BLOCK:
            return super().attend(call, query, key, value)
        return self._row.attend(query, key, value, scale=call.scaling, window=call.window)

    def of_queries(self, wanted: Tensor) -> AttentionLayout:
        return self  # the kernels skip whole blocks, not single tokens


def length_buckets(prefix_length: int, lengths: Sequence[int]) -> list[list[int]]:
    """Cut ``lengths`` into runs that are each padded to their longest, so that padding and calls together cost least.

    The cost of a run of ``n`` rows is ``n * longest * (prefix_length + longest)`` pairs of query and key, plus
    ``BLOCK_COST``. The order is kept; it is best if ``lengths`` are sorted.

    Example:
        >>> length_buckets(100, [500, 497, 20, 20])
        [[500, 497], [20, 20]]
        >>> length_buckets(10, [9, 8, 8, 3])
        [[9, 8, 8, 3]]
    """
    best: list[float] = [0.0]
    cut: list[int] = [0]
    for end in range(1, len(lengths) + 1):
        cost, first, longest = inf, end - 1, 0
        for start in range(end - 1, -1, -1):
            longest = max(longest, lengths[start])
            pairs = (end - start) * longest * (prefix_length + longest)
            if best[start] + pairs + BLOCK_COST < cost:
                cost, first = best[start] + pairs + BLOCK_COST, start
        best.append(cost)
        cut.append(first)
    buckets: list[list[int]] = []
    end = len(lengths)
    while end:
        buckets.append(list(lengths[cut[end] : end]))
        end = cut[end]
    return buckets[::-1]
