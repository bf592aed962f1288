"""A packed row's attention on the CPU in one kernel call forward and one backward (``kernels/packed_attention.cpp``).

Queries see the prefix of their family and their own row up to themselves, so nothing is padded, masked or put together
afterwards. For float32 only; ``split_attention`` computes the rest.
"""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from operator import add
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from envgrad.native.compiler import library
from envgrad.native.memory import can_compute

WIDEST = 256
"""head size up to which a block of queries stays in a core's caches"""

SHARE = 1 << 25
"""products of a (query, key) pair's numbers for which another thread is worth its start, about a millisecond's work"""


class AttentionPlan:
    """Which keys the queries of a packed row see, as the kernel reads it.

    Neither a dataclass nor a tuple on purpose: FSDP rebuilds those among a forward's arguments.

    Example:
        >>> plan = AttentionPlan.of([(4, (3, 2))])
        >>> plan.spans.tolist()  # first query, queries, first key of the prefix, its keys, first own key
        [[0, 4, 0, 0, 0], [4, 3, 0, 4, 4], [7, 2, 0, 4, 7]]
        >>> plan.visible.tolist()  # how many own keys each query sees
        [1, 2, 3, 4, 1, 2, 3, 1, 2]
    """

    __slots__ = ("_cuts", "num_tokens", "pairs", "spans", "tokens", "visible")

    def __init__(
        self, num_tokens: int, spans: Sequence[tuple[int, ...]], visible: Sequence[int], tokens: Sequence[int] | None
    ) -> None:
        self.num_tokens = num_tokens
        # Kept between calls: made in inference mode they could not be used elsewhere.
        with torch.inference_mode(False):
            self.spans = torch.tensor(spans, dtype=torch.int32, device="cpu").reshape(-1, 5)
            self.visible = torch.tensor(visible, dtype=torch.int32, device="cpu")
            self.tokens = None if tokens is None else torch.tensor(tokens, dtype=torch.int32, device="cpu")
        self.pairs = sum(visible) + sum(queries * prefix for _, queries, _, prefix, _ in spans)
        """of a query and a key that it sees"""
        self._cuts: dict[int, list[int]] = {}

    @classmethod
    def of(cls, families: Sequence[tuple[int, Sequence[int]]], wanted: Sequence[int] | None = None) -> AttentionPlan:
        """The plan of ``(prefix length, own lengths)`` families (``layout.PackedLayout.build``).

        Args:
            families: One after another.
            wanted: The tokens whose outputs are read, ascending and different; None for all.

        Example:
            >>> plan = AttentionPlan.of([(4, (3, 2))], [3, 5, 6])
            >>> plan.spans.tolist(), plan.visible.tolist()
            ([[0, 1, 0, 0, 0], [1, 2, 0, 4, 4]], [4, 2, 3])
        """
        spans: list[tuple[int, ...]] = []
        visible: list[int] = []
        for prefix_start, prefix, start, length in _rows(families):
            seen: Sequence[int] = range(1, length + 1)
            if wanted is not None:
                begin, end = (bisect_left(wanted, place) for place in (start, start + length))
                seen = [place - start + 1 for place in wanted[begin:end]]
            if seen:
                spans.append((len(visible), len(seen), prefix_start, prefix, start))
                visible += seen
        return cls(sum(prefix + sum(lengths) for prefix, lengths in families), spans, visible, wanted)

    def cuts(self, parts: int) -> list[int]:
        """Where to cut the queries into ``parts`` of about equal work, begin and end included; kept.

        Example:
            >>> AttentionPlan.of([(0, (9,))]).cuts(2)
            [0, 6, 9]
        """
        if parts not in self._cuts:
            prefixes = (prefix for _, queries, _, prefix, _ in self.spans.tolist() for _ in range(queries))
            work = list(accumulate(map(add, prefixes, self.visible.tolist())))
            inner = [bisect_left(work, self.pairs * part / parts) for part in range(1, parts)]
            self._cuts[parts] = [0, *inner, len(work)]
        return self._cuts[parts]


def _rows(families: Sequence[tuple[int, Sequence[int]]]) -> Iterator[tuple[int, int, int, int]]:
    """``(prefix start, prefix length, start, length)`` of every prefix and every own row."""
    start = 0
    for prefix, lengths in families:
        first = start
        yield first, 0, first, prefix
        start += prefix
        for length in lengths:
            yield first, prefix, start, length
            start += length


class _Arguments(ctypes.Structure):
    """``PackedAttention`` of the kernel."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value")),
        *((f"{name}_{step}", ctypes.c_int64) for name in ("query", "key", "value") for step in ("token", "head")),
        *((name, ctypes.c_void_p) for name in ("output", "shift", "share", "grad")),
        *((name, ctypes.c_int64) for name in ("grad_token", "grad_head")),
        *((name, ctypes.c_void_p) for name in ("query_grad", "key_grad", "value_grad", "spans", "visible", "tokens")),
        *((name, ctypes.c_int32) for name in ("num_spans", "begin", "end", "kv_heads", "group", "width")),
        ("scale", ctypes.c_float),
    )


def can_attend(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernel computes this attention, which has no dropout and no window."""
    same = query.shape[-1] == key.shape[-1] == value.shape[-1]
    return same and 0 < query.shape[-1] <= WIDEST and can_compute(query, key, value)


def native_attention(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float | None) -> Tensor:
    """Query ``(Hq, T, D)``, key and value ``(Hkv, T, D)`` -> ``(T, Hq, D)``, 0 for tokens that are no queries.

    See ``can_attend``.

    Raises:
        ValueError: the plan is of another row.
    """
    if not query.shape[1] == key.shape[1] == value.shape[1] == plan.num_tokens:
        raise ValueError(f"a plan of {plan.num_tokens} tokens cannot attend in a row of {query.shape[1]}")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    # The kernel's order: (T, H, D).
    query, key, value = (_dense(x.transpose(0, 1)) for x in (query, key, value))
    output: Tensor = _Native.apply(query, key, value, plan, scale)  # type: ignore[no-untyped-call]
    return output


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class _Native(torch.autograd.Function):
    """Query ``(T, Hq, D)``, key and value ``(T, Hkv, D)`` -> ``(T, Hq, D)``."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        output = _for_queries(query, plan)
        softmax = torch.empty((2, *query.shape[:2]), dtype=torch.float32, device="cpu")
        cuts = plan.cuts(_threads(query, plan, 2))
        _run("forward", [
            _arguments(plan, scale, part, query, key, value, output, softmax) for part in pairwise(cuts)
        ], (plan, query, key, value, output, softmax))  # fmt: skip
        ctx.save_for_backward(query, key, value, output, softmax)
        ctx.plan, ctx.scale = plan, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, softmax = ctx.saved_tensors
        plan, grad = ctx.plan, _dense(grad)
        cuts = plan.cuts(_threads(query, plan, 5))
        query_grad = _for_queries(query, plan)
        # Each thread adds to its own.
        shared = torch.zeros((2, len(cuts) - 1, *key.shape), dtype=torch.float32, device="cpu")
        calls = []
        for part, queries in enumerate(pairwise(cuts)):
            one = _arguments(plan, ctx.scale, queries, query, key, value, output, softmax)
            one.grad, one.grad_token, one.grad_head = grad.data_ptr(), *grad.stride()[:2]
            one.query_grad = query_grad.data_ptr()
            one.key_grad, one.value_grad = shared[0, part].data_ptr(), shared[1, part].data_ptr()
            calls.append(one)
        _run("backward", calls, (plan, query, key, value, output, softmax, grad, query_grad, shared))
        key_grad, value_grad = shared[:, 0] if len(calls) == 1 else shared.sum(1)
        return query_grad, key_grad, value_grad, None, None


def _for_queries(query: Tensor, plan: AttentionPlan) -> Tensor:
    """Of the shape of ``query``, 0 for the tokens that are no queries."""
    new = torch.empty if plan.tokens is None else torch.zeros
    return new(query.shape, dtype=torch.float32, device="cpu")


def _threads(query: Tensor, plan: AttentionPlan, products: int) -> int:
    work = plan.pairs * query.shape[1] * query.shape[2] * products
    return max(1, min(torch.get_num_threads(), work // SHARE))


def _arguments(
    plan: AttentionPlan, scale: float, queries: tuple[int, int], query: Tensor, key: Tensor, value: Tensor,
    output: Tensor, softmax: Tensor,
) -> _Arguments:  # fmt: skip
    """For the plan's ``queries`` from the first to before the second."""
    heads, kv_heads = query.shape[1], key.shape[1]
    return _Arguments(
        query=query.data_ptr(), query_token=query.stride(0), query_head=query.stride(1),
        key=key.data_ptr(), key_token=key.stride(0), key_head=key.stride(1),
        value=value.data_ptr(), value_token=value.stride(0), value_head=value.stride(1),
        output=output.data_ptr(), shift=softmax[0].data_ptr(), share=softmax[1].data_ptr(),
        spans=plan.spans.data_ptr(), visible=plan.visible.data_ptr(),
        tokens=None if plan.tokens is None else plan.tokens.data_ptr(),
        num_spans=len(plan.spans), begin=queries[0], end=queries[1],
        kv_heads=kv_heads, group=heads // max(1, kv_heads), width=query.shape[2], scale=scale,
    )  # fmt: skip


def _run(way: str, calls: Sequence[_Arguments], held: object) -> None:
    """Call the kernel, for all but the first in threads of their own, which keep what is ``held``: the calls point to
    it, and where this one is interrupted, they still compute."""
    kernel = getattr(library(), f"envgrad_packed_attention_{way}")
    results = [0] * len(calls)

    def run(number: int, _held: object) -> None:
        results[number] = kernel(ctypes.byref(calls[number]))

    threads = [
        threading.Thread(target=run, args=(number, held), name="envgrad-attention") for number in range(1, len(calls))
    ]
    for thread in threads:
        thread.start()
    run(0, held)
    for thread in threads:
        thread.join()
    if any(results):
        raise MemoryError("no memory for the attention kernel's intermediate results")
