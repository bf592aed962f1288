"""Exact attention of a packed row from unmasked and causal pieces, each one call of torch's flash kernel on the CPU.

A sibling attends to its prompt and to itself. The softmax over both is put together from its halves: with outputs
``o``, ``o'`` and log-sum-exps ``l``, ``l'`` over disjoint keys, the whole has ``lse = log(exp l + exp l')`` and the
output ``exp(l - lse) o + exp(l' - lse) o'`` (Milakov and Gimelshein, arXiv:1805.02867; Hydragen, arXiv:2402.05099). The
flash backward needs only output and log-sum-exp (Dao et al., arXiv:2205.14135, section 3.1): handed those of the whole,
each piece gives its exact share of the gradients. So all siblings of a group attend to their prompt in one call,
without mask and padding, and keys and values of a prompt are never copied to its siblings.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 96
"""queries of a causal piece: it sees the keys up to its last query, so that what is computed beyond the triangle is a
strip of this width. What gave the quickest forward and backward of 48, 64, 96, 128, 192, 256 on one core of an AMD EPYC
for 200 to 1000 queries of 8 heads of width 16"""

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""what the kernel computes in"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """``count`` equal pieces, side by side: ``queries`` of every ``query_step`` from ``query`` on attend to ``keys`` of
    every ``key_step`` from ``key`` on. One call of the kernel.
    """

    query: int
    queries: int
    key: int
    keys: int
    count: int = 1
    query_step: int = 0
    key_step: int = 0
    joins: bool = False
    """its queries have attended to other keys before it"""
    causal: bool = False
    """query ``i`` sees the keys up to ``i``"""
    places: tuple[int, ...] | range | None = None
    """the last key that each query sees, where a mask must say so"""

    def at_queries(self, x: Tensor) -> Tensor:
        """``(H, T, ...)`` -> ``(count, H, queries, ...)``, a view."""
        return _cut(x, self.query, self.queries, self.count, self.query_step)

    def at_keys(self, x: Tensor) -> Tensor:
        """``(H, T, ...)`` -> ``(count, H, keys, ...)``, a view."""
        return _cut(x, self.key, self.keys, self.count, self.key_step)


def _cut(x: Tensor, start: int, size: int, count: int, step: int) -> Tensor:
    heads, tokens, *rest = x.stride()
    return x.as_strided(
        (count, x.shape[0], size, *x.shape[2:]), (step * tokens, heads, tokens, *rest),
        x.storage_offset() + start * tokens,
    )  # fmt: skip


class Pieces:
    """What a packed row's attention is put together from, and the masks of pieces that need one.

    Neither a dataclass nor a tuple on purpose: FSDP rebuilds those among a forward's arguments.

    Example:
        >>> [(p.query, p.queries, p.key, p.keys, p.count) for p in Pieces.of([(4, (3, 3, 2))])]
        [(0, 4, 0, 4, 1), (4, 3, 4, 3, 2), (10, 2, 10, 2, 1), (4, 8, 0, 4, 1)]
    """

    __slots__ = ("_masks", "_pieces")

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = tuple(pieces)
        self._masks: dict[Hashable, Tensor] = {}

    def __iter__(self) -> Iterator[Piece]:
        return iter(self._pieces)

    @classmethod
    def of_queries(cls, families: Sequence[tuple[int, Sequence[int]]], wanted: Sequence[int]) -> Pieces:
        """The same for the tokens ``wanted`` only, ascending and different: query ``i`` is token ``wanted[i]``.

        Example:
            >>> [(p.query, p.queries, p.key, p.keys, p.places) for p in Pieces.of_queries([(4, (3, 2))], [3, 5, 6, 7])]
            [(0, 1, 0, 4, None), (1, 2, 4, 3, (1, 2)), (3, 1, 7, 1, None), (1, 3, 0, 4, None)]
        """
        pieces: list[Piece] = []
        start = 0
        for prefix, lengths in families:
            pieces += _wanted_pieces(start, prefix, wanted)
            first = start = start + prefix
            for length in lengths:
                pieces += _wanted_pieces(start, length, wanted)
                start += length
            begin, end = (bisect_left(wanted, place) for place in (first, start))
            if prefix and end > begin:
                pieces.append(
                    Piece(query=begin, queries=end - begin, key=first - prefix, keys=prefix, joins=True)
                )  # fmt: skip
        return cls(pieces)

    @classmethod
    def of(cls, families: Sequence[tuple[int, Sequence[int]]]) -> Pieces:
        """Pieces of ``(prefix length, own lengths)`` families (``layout.PackedLayout.build``), one after another."""
        pieces: list[Piece] = []
        start = 0
        for prefix, lengths in families:
            pieces += _causal_pieces(start, prefix, 1)
            first = start = start + prefix
            for length, equal in groupby(lengths):
                count = len(list(equal))
                pieces += _causal_pieces(start, length, count)
                start += count * length
            if prefix and start > first:
                pieces.append(
                    Piece(query=first, queries=start - first, key=first - prefix, keys=prefix, joins=True)
                )  # fmt: skip
        return cls(pieces)

    def mask(self, piece: Piece, like: Tensor) -> Tensor | None:
        """Additive mask ``(queries, keys)``, or None if the piece needs none; kept, as it depends on shapes only."""
        if piece.places is None:
            return None
        name = (piece.places, piece.keys, like.dtype)
        if name not in self._masks:
            # A mask first made in inference mode could not be used in a later training forward.
            with torch.inference_mode(False):
                last = torch.tensor(piece.places)[:, None]
                mask = torch.zeros((piece.queries, piece.keys), dtype=like.dtype)
                self._masks[name] = mask.masked_fill_(torch.arange(piece.keys)[None, :] > last, -inf)
        return self._masks[name]


def _causal_pieces(start: int, length: int, count: int) -> Iterator[Piece]:
    """``count`` rows of ``length`` tokens from ``start`` on, each causal, in pieces of about ``CHUNK`` queries."""
    if length == 0:
        return
    parts = max(1, round(length / CHUNK))
    for first, last in pairwise(length * part // parts for part in range(parts + 1)):
        yield Piece(
            query=start + first, queries=last - first, key=start, keys=last, count=count, query_step=length,
            key_step=length, causal=first == 0, places=range(first, last) if first else None,
        )  # fmt: skip


def _wanted_pieces(start: int, length: int, wanted: Sequence[int]) -> Iterator[Piece]:
    """Of the queries among ``wanted`` that lie in the row of ``length`` tokens from ``start`` on."""
    begin, end = (bisect_left(wanted, place) for place in (start, start + length))
    parts = max(1, round((end - begin) / CHUNK))
    for first, last in pairwise(begin + (end - begin) * part // parts for part in range(parts + 1)):
        if first < last:
            places = tuple(place - start for place in wanted[first:last])
            causal = places == tuple(range(len(places)))
            yield Piece(
                query=first, queries=last - first, key=start, keys=places[-1] + 1, causal=causal,
                places=None if causal or len(places) == 1 else places,
            )  # fmt: skip


def can_split(query: Tensor, key: Tensor, value: Tensor, *, dropout: float) -> bool:
    """Whether torch's CPU flash kernel computes this attention."""
    same = query.dtype == key.dtype == value.dtype and query.shape[-1] == key.shape[-1] == value.shape[-1]
    on_cpu = query.device.type == key.device.type == value.device.type == "cpu"
    return on_cpu and dropout == 0.0 and same and query.dtype in DTYPES


def split_attention(query: Tensor, key: Tensor, value: Tensor, pieces: Pieces, scale: float | None) -> Tensor:
    """Query ``(Hq, T, D)``, key and value ``(Hkv, T, D)`` -> ``(T, Hq, D)``; see ``can_split``."""
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    output: Tensor = _Split.apply(query, key, value, pieces, scale)  # type: ignore[no-untyped-call]
    return output


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _by_head(x: Tensor) -> Tensor:
    """An empty ``(H, T, ...)`` of the shape and type of ``x`` that lies in memory as ``(T, H, ...)``."""
    return torch.empty((x.shape[1], x.shape[0], *x.shape[2:]), dtype=x.dtype).transpose(0, 1)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, pieces: Pieces, scale: float | None) -> Tensor:
        output = _by_head(query)
        # The kernel keeps the log-sum-exps of half precision in single.
        norm = _by_head(query[..., 0].to(torch.promote_types(query.dtype, torch.float32)))
        for piece in pieces:
            q, k, v = piece.at_queries(query), piece.at_keys(key), piece.at_keys(value)
            there, there_norm = _flash(q, k, v, 0.0, piece.causal, attn_mask=pieces.mask(piece, query), scale=scale)
            out, lse = piece.at_queries(output), piece.at_queries(norm)
            if piece.joins:
                out.lerp_(there, torch.sigmoid(there_norm - lse)[..., None].to(out.dtype))
                torch.logaddexp(lse, there_norm, out=lse)
            else:
                out.copy_(there)
                lse.copy_(there_norm)
        ctx.save_for_backward(query, key, value, output, norm)
        ctx.pieces, ctx.scale = pieces, scale
        return output.transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, norm = ctx.saved_tensors
        by_query = (grad.contiguous().transpose(0, 1), query)  # the kernel reads what an expanded one does not have
        # A query's first piece joins nothing: it writes what the others add to.
        grads = [_by_head(query), _by_head(key).zero_(), _by_head(value).zero_()]
        for piece in ctx.pieces:
            given, q = (piece.at_queries(x) for x in by_query)
            k, v, out, lse = piece.at_keys(key), piece.at_keys(value), piece.at_queries(output), piece.at_queries(norm)
            mask = ctx.pieces.mask(piece, query)
            found = _flash_backward(given, q, k, v, out, lse, 0.0, piece.causal, attn_mask=mask, scale=ctx.scale)
            if piece.joins:
                piece.at_queries(grads[0]).add_(found[0])
            else:
                piece.at_queries(grads[0]).copy_(found[0])
            piece.at_keys(grads[1]).add_(found[1])
            piece.at_keys(grads[2]).add_(found[2])
        return *grads, None, None
