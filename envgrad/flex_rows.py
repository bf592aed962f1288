"""A packed row's attention in one call of torch's FlexAttention, whose GPU kernels skip blocks that nothing sees.

The idea of a mask as a function, compiled into the kernel, is FlexAttention's (arXiv:2412.05496).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from envgrad.errors import first_line

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""tokens on a side of the blocks that kernels skip: FlexAttention's own"""

COMPILATIONS = 64
"""of FlexAttention in a process, at most"""


def has_flex_attention() -> bool:
    """Whether this torch has FlexAttention."""
    return find_spec("torch.nn.attention.flex_attention") is not None


def visible_spans(families: Sequence[tuple[int, Sequence[int]]], window: int | None = None) -> Tensor:
    """``(3, T)`` int32: where what each query sees of its prefix begins and ends, and of its own row begins.

    Its own row it sees up to itself.

    Args:
        families: ``(prefix length, own lengths)``, one after another (``layout.PackedLayout.build``).
        window: Sliding window in positions; None for all.

    Example:
        >>> visible_spans([(3, (2, 1))]).tolist()  # p0 p1 p2 | a0 a1 | b0
        [[0, 0, 0, 0, 0, 0], [0, 0, 0, 3, 3, 3], [0, 0, 0, 3, 3, 5]]
        >>> visible_spans([(3, (2, 1))], 2).tolist()
        [[0, 0, 0, 2, 3, 2], [0, 0, 0, 3, 3, 3], [0, 0, 1, 3, 3, 5]]
    """
    rows, start = [], 0
    for prefix, lengths in families:
        prefix_start = start
        for before, length in ((0, prefix), *((prefix, own) for own in lengths)):
            nearest = before + torch.arange(length, dtype=torch.int32)
            oldest = torch.zeros_like(nearest) if window is None else (nearest - window + 1).clamp(min=0)
            begin, end = prefix_start + oldest.clamp(max=before), torch.full_like(oldest, prefix_start + before)
            rows.append(torch.stack((begin, end, start + (oldest - before).clamp(min=0))))
            start += length
    return torch.cat(rows, 1)


def block_mask(spans: Tensor) -> BlockMask:
    """What ``visible_spans`` say, for FlexAttention: which blocks hold pairs that see each other, and the pairs.

    Counted from the spans, so that no mask of all pairs is ever in memory.
    """
    from torch.nn.attention.flex_attention import BlockMask

    begin, end, own = spans
    size = spans.shape[1]
    blocks = -(-size // BLOCK)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen: Tensor = ((key >= begin[query]) & (key < end[query])) | ((key >= own[query]) & (key <= query))
        return seen

    first = torch.arange(0, size, BLOCK, dtype=torch.int32, device=spans.device)

    def keys(start: Tensor, stop: Tensor) -> Tensor:
        """``(T, blocks)`` keys from start to before stop in each block."""
        return (stop[:, None].minimum(first + BLOCK) - start[:, None].maximum(first)).clamp(min=0)

    after = torch.arange(1, size + 1, dtype=torch.int32, device=spans.device)
    pairs = spans.new_zeros(blocks * BLOCK, blocks)
    pairs[:size] = keys(begin, end) + keys(own, after)
    pairs = pairs.view(blocks, BLOCK, blocks).sum(1)
    whole = pairs == BLOCK * BLOCK
    from_kv_blocks: Callable[..., BlockMask] = BlockMask.from_kv_blocks
    return from_kv_blocks(
        *_listed((pairs > 0) & ~whole), *_listed(whole), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(size, size)
    )


def _listed(marked: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each row are marked, and the numbers of these, before those of the others."""
    numbers = marked.int().argsort(dim=1, descending=True, stable=True)
    return marked.sum(1, dtype=torch.int32)[None, None], numbers.int()[None, None]


@cache
def compiled_attention(backend: str | Callable[..., Any] = "inductor") -> Callable[..., Tensor]:
    """FlexAttention as a GPU runs it: compiled for rows of every length at once.

    It is compiled again with and without gradients, for other heads and dtypes: more often than ``torch.compile``
    allows by default where a process has several models. ``fullgraph``, because it would run uncompiled beyond its
    limit, and hold the scores of all pairs.
    """
    from torch._dynamo import config
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=backend)

    def attention(*inputs: Tensor, **options: Any) -> Tensor:
        with config.patch(cache_size_limit=COMPILATIONS):
            return compiled(*inputs, **options)

    return attention


class FlexRow:
    """The attention of one packed row. Its masks are kept: one for each window and device.

    Neither a dataclass nor a tuple on purpose: FSDP rebuilds those among a forward's arguments.

    Example:
        >>> row = FlexRow([(2, (3, 1))])
        >>> query = key = value = torch.ones(1, 1, 6, 16)
        >>> row.attend(query, key, value, scale=None, window=None).shape
        torch.Size([1, 6, 1, 16])
    """

    __slots__ = ("_families", "_longest", "_masks", "num_tokens")

    def __init__(self, families: Sequence[tuple[int, Sequence[int]]]) -> None:
        self._families = families
        self._longest = max((prefix + max(lengths, default=0) for prefix, lengths in families), default=0)
        self._masks: dict[tuple[int | None, torch.device], BlockMask] = {}
        self.num_tokens = sum(prefix + sum(lengths) for prefix, lengths in families)

    def mask(self, window: int | None, device: torch.device) -> BlockMask:
        window = None if window is None or window >= self._longest else window
        if (window, device) not in self._masks:
            # A mask first made in inference mode could not be used in a later training forward.
            with torch.inference_mode(False):
                self._masks[window, device] = block_mask(visible_spans(self._families, window).to(device))
        return self._masks[window, device]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, window: int | None) -> Tensor:
        """Query ``(1, Hq, T, D)``, key and value ``(1, Hkv, T, D)`` -> ``(1, T, Hq, Dv)``; without dropout."""
        from torch.nn.attention.flex_attention import flex_attention

        plain: Callable[..., Tensor] = flex_attention
        attention = compiled_attention() if query.device.type == "cuda" else plain
        output: Tensor = attention(
            query, key, value, block_mask=self.mask(window, query.device), scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        return output.transpose(1, 2)


def flex_fault(heads: int, kv_heads: int, width: int, *, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why FlexAttention cannot act here, in words; None if it gives plain attention's numbers, forward and backward.

    Args:
        heads: Of queries.
        kv_heads: Of keys and values.
        width: Of a head.
        device: Where it is to run.
        dtype: Of queries, keys and values.
    """
    families = [(BLOCK, (BLOCK + 3, 9)), (0, (20,))]
    row, size = FlexRow(families), 2 * BLOCK + 32
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(1, size, count, width, generator=generator) for count in (heads, kv_heads, kv_heads, heads)]
    query, key, value, grad = (x.to(device, dtype).transpose(1, 2) for x in made)
    inputs = [x.requires_grad_() for x in (query, key, value)]
    begin, end, own = visible_spans(families)[:, :, None].to(device)
    place = torch.arange(size, device=device)
    mask = ((place >= begin) & (place < end)) | ((place >= own) & (place <= place[:, None]))
    plain = [x.detach().float().requires_grad_() for x in inputs]
    keys, values = (x.repeat_interleave(heads // kv_heads, 1) for x in plain[1:])
    expected = scaled_dot_product_attention(plain[0], keys, values, attn_mask=mask)
    try:
        output = row.attend(query, key, value, scale=width**-0.5, window=None).transpose(1, 2)
        found = (output, *torch.autograd.grad(output, inputs, grad))
    except (RuntimeError, ValueError, AssertionError, ImportError) as error:
        return f"FlexAttention does not run here ({type(error).__name__}: {first_line(error)})"
    wanted = (expected, *torch.autograd.grad(expected, plain, grad.float()))
    difference = max(
        float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in zip(found, wanted, strict=True)
    )
    limit = 1e-3 if dtype == torch.float32 else 5e-2
    if difference <= limit:
        return None
    return f"FlexAttention differs from plain attention by {difference:.1e} (relative; at most {limit:.0e} allowed)"
