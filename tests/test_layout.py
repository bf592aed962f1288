from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from envgrad.attention import AttentionCall
from envgrad.layout import BLOCK_COST, PackedLayout, length_buckets


def test_length_buckets_cut_where_padding_costs_more_than_a_call() -> None:
    assert length_buckets(0, []) == []
    assert length_buckets(400, [40, 40, 39, 38]) == [[40, 40, 39, 38]]
    assert length_buckets(400, [300, 10, 10]) == [[300], [10, 10]]
    assert length_buckets(30, [20, 10, 4]) == [[20, 10, 4]]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 200), st.lists(st.integers(1, 300), max_size=7))
def test_length_buckets_are_the_cheapest_cut(prefix: int, lengths: list[int]) -> None:
    def cost(cut: list[list[int]]) -> int:
        return sum(len(run) * max(run) * (prefix + max(run)) + BLOCK_COST for run in cut)

    def cuts(rest: list[int]) -> list[list[list[int]]]:
        if not rest:
            return [[]]
        return [[rest[:n], *more] for n in range(1, len(rest) + 1) for more in cuts(rest[n:])]

    found = length_buckets(prefix, lengths)
    assert [length for run in found for length in run] == lengths
    assert cost(found) == min(cost(cut) for cut in cuts(lengths))


def test_build_counts_tokens() -> None:
    assert PackedLayout.build([(4, (3, 0, 2)), (0, (5, 1))]).num_tokens == 15


def attend(layout: PackedLayout, window: int | None, dtype: torch.dtype = torch.double) -> list[torch.Tensor]:
    """Output and gradients for random queries of 4 heads, keys and values of 2."""
    torch.manual_seed(0)
    size = layout.num_tokens
    shapes = ((1, 4, size, 8), (1, 2, size, 8), (1, 2, size, 8))
    inputs = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    call = AttentionCall(layer=0, scaling=0.5, dropout=0.0, window=window)
    output = layout.attend(call, *inputs)
    output.pow(2).sum().backward()
    return [output.detach(), *(x.grad for x in inputs if x.grad is not None)]


class Masked:
    """What a layout must equal: one attention over the whole row, with a mask made token by token."""

    def __init__(self, families: list[tuple[int, list[int]]]) -> None:
        owners: list[tuple[int, int, int]] = []  # family, sibling (-1 for the prefix), position
        for family, (prefix, lengths) in enumerate(families):
            owners += [(family, -1, position) for position in range(prefix)]
            for sibling, length in enumerate(lengths):
                owners += [(family, sibling, prefix + position) for position in range(length)]
        self.owners, self.num_tokens = owners, len(owners)

    def attend(self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        def sees(q: tuple[int, int, int], k: tuple[int, int, int]) -> bool:
            near = call.window is None or q[2] - k[2] < call.window
            return q[0] == k[0] and k[1] in (-1, q[1]) and k[2] <= q[2] and near

        mask = torch.tensor([[sees(q, k) for k in self.owners] for q in self.owners])
        key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
        scores = (query @ key.transpose(2, 3) * 0.5).masked_fill(~mask, -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2)


families = st.lists(
    st.tuples(st.integers(0, 9), st.lists(st.integers(1, 9), min_size=1, max_size=4)), min_size=1, max_size=3
)


@settings(max_examples=40, deadline=None)
@given(families, st.none() | st.integers(1, 20), st.sampled_from([0, 20, 2**14]), st.sampled_from([2, 3, 96]))
def test_a_layout_attends_as_one_masked_row(
    shape: list[tuple[int, list[int]]], window: int | None, block_cost: int, chunk: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("envgrad.layout.BLOCK_COST", block_cost)
        patch.setattr("envgrad.split_attention.CHUNK", chunk)
        found = attend(PackedLayout.build(shape), window)
    expected = attend(Masked(shape), window)  # type: ignore[arg-type]
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-10)


def test_masks_are_kept_and_shared_by_equal_shapes() -> None:
    layout = PackedLayout.build([(4, (3, 2)), (4, (3, 3)), (4, (1,))])
    attend(layout, None)
    assert not layout._masks  # what is seen whole needs none
    attend(layout, 6)
    kept = dict(layout._masks)
    assert len(kept) == 2  # rows of 3 behind 4, within the window; a row of 1 behind 4
    attend(layout, 6)
    assert layout._masks == kept
    attend(layout, 2)
    assert len(layout._masks) > 2
