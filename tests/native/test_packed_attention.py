from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from envgrad.attention import AttentionCall
from envgrad.layout import PackedLayout
from envgrad.native import memory, packed_attention
from envgrad.native.compiler import library
from envgrad.native.packed_attention import AttentionPlan, can_attend, native_attention
from envgrad.split_attention import Pieces, split_attention

needs_kernels = pytest.mark.skipif(library() is None, reason="needs a C++ compiler")

Families = list[tuple[int, list[int]]]
CALL = AttentionCall(layer=0, scaling=0.3, dropout=0.0, window=None)


def mask_of(families: Families) -> Tensor:
    """``(T, T)``: what each token sees."""
    owners = []
    for family, (prefix, lengths) in enumerate(families):
        owners += [(family, -1, place) for place in range(prefix)]
        for sibling, length in enumerate(lengths):
            owners += [(family, sibling, prefix + place) for place in range(length)]
    owner, part, place = torch.tensor(owners, dtype=torch.int64).reshape(-1, 3).unbind(1)
    near = (part[None, :] == -1) | (part[None, :] == part[:, None])
    return (owner[:, None] == owner[None, :]) & near & (place[None, :] <= place[:, None])


def random_row(families: Families, heads: int, kv_heads: int, width: int, scale: float = 1.0) -> list[Tensor]:
    """Query, key and value that lie in memory as a model's projection leaves them, and a gradient."""
    tokens = sum(prefix + sum(lengths) for prefix, lengths in families)
    generator = torch.Generator().manual_seed(tokens + heads)
    flat = scale * torch.randn(tokens, heads + 2 * kv_heads, width, generator=generator)
    parts = flat.transpose(0, 1).split((heads, kv_heads, kv_heads))
    return [*(x.requires_grad_() for x in parts), torch.randn(tokens, heads, width, generator=generator)]


def plain(row: list[Tensor], families: Families, scale: float, wanted: Tensor | None = None) -> list[Tensor]:
    """Output and gradients in double precision, of one masked softmax over the whole row."""
    query, key, value = (x.detach().double().requires_grad_() for x in row[:3])
    mask, chosen = mask_of(families), query
    if wanted is not None:
        mask, chosen = mask[wanted], query[:, wanted]
    keys, values = (x.repeat_interleave(query.shape[0] // x.shape[0], 0) for x in (key, value))
    scores = (chosen @ keys.transpose(1, 2) * scale).masked_fill(~mask, -torch.inf)
    output = (scores.softmax(-1) @ values).transpose(0, 1)
    given = row[3] if wanted is None else row[3][wanted]
    return [output, *torch.autograd.grad(output, (query, key, value), given.double())]


def native(row: list[Tensor], families: Families, scale: float | None) -> list[Tensor]:
    output = native_attention(*row[:3], AttentionPlan.of(families), scale)
    return [output, *torch.autograd.grad(output, row[:3], row[3])]


def assert_near(found: list[Tensor], expected: list[Tensor], limit: float = 1e-5) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        if ours.numel():
            assert (ours.double() - theirs.double()).abs().max() <= limit * max(1.0, theirs.abs().max().item())


families_of = st.lists(
    st.tuples(st.integers(0, 40), st.lists(st.integers(0, 70), max_size=4)), min_size=1, max_size=3
)  # fmt: skip
heads_of = st.sampled_from([(1, 1), (4, 2), (9, 3), (7, 1), (5, 5)])
widths = st.sampled_from([1, 3, 8, 16, 24, 40, 64])


@needs_kernels
@settings(max_examples=60, deadline=None)
@given(families_of, heads_of, widths)
def test_output_and_gradients_are_those_of_a_masked_softmax(
    families: Families, heads: tuple[int, int], width: int
) -> None:
    row = random_row(families, *heads, width)
    assert_near(native(row, families, 0.3), plain(row, families, 0.3))


@needs_kernels
@pytest.mark.parametrize(("heads", "width"), [((8, 2), 16), ((3, 1), 128), ((2, 2), 256)])
def test_long_rows_are_exact_and_equal_what_torch_computes_in_pieces(heads: tuple[int, int], width: int) -> None:
    families: Families = [(150, [333, 64, 1, 0]), (0, [129]), (65, [65])]
    row = random_row(families, *heads, width)
    scale = width**-0.5
    found = native(row, families, None)
    assert_near(found, plain(row, families, scale))
    split = split_attention(*row[:3], Pieces.of(families), scale)
    assert_near(found, [split, *torch.autograd.grad(split, row[:3], row[3])])


@needs_kernels
@settings(max_examples=40, deadline=None)
@given(families_of, heads_of, st.data())
def test_some_queries_give_what_they_give_among_all(families: Families, heads: tuple[int, int], data: object) -> None:
    row = random_row(families, *heads, 16)
    tokens = row[3].shape[0]
    chosen = data.draw(st.sets(st.integers(0, max(0, tokens - 1)), max_size=min(tokens, 60)))  # type: ignore[attr-defined]
    wanted = torch.tensor(sorted(chosen), dtype=torch.int64)
    layout = PackedLayout.build(families).of_queries(wanted)
    output = layout.attend(CALL, *(x.unsqueeze(0) for x in row[:3]))[0]
    gradients = torch.autograd.grad(output[wanted], row[:3], row[3][wanted])
    assert_near([output[wanted], *gradients], plain(row, families, 0.3, wanted))


@needs_kernels
def test_views_give_the_same_bits_as_contiguous_tensors_and_every_call_the_same() -> None:
    families: Families = [(20, [50, 33]), (0, [7])]
    row = random_row(families, 6, 2, 16)
    one, two = native(row, families, 0.3), native(row, families, 0.3)
    apart = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in row[:3]]
    assert apart[0].stride(-1) != 1
    three = native([*apart, row[3].transpose(0, 1).contiguous().transpose(0, 1)], families, 0.3)
    for a, b, c in zip(one, two, three, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


@needs_kernels
def test_expanded_gradients_are_read_as_what_they_are() -> None:
    families: Families = [(4, [3, 2])]
    row = random_row(families, 4, 2, 16)
    spread = native([*row[:3], torch.ones(()).expand(9, 4, 16)], families, 0.3)
    whole = native([*row[:3], torch.ones(9, 4, 16)], families, 0.3)
    assert all(torch.equal(a, b) for a, b in zip(spread, whole, strict=True))


@needs_kernels
@pytest.mark.parametrize("place", [0, 25, 60, 91])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_what_is_not_a_number_reaches_all_that_see_it(place: int, which: int, number: float) -> None:
    families: Families = [(20, [50, 33])]
    row = [x.detach() for x in random_row(families, 4, 2, 16)]
    row[which] = row[which].clone()
    row[which][0, place] = number
    output = native_attention(*row[:3], AttentionPlan.of(families), 0.3)
    affected = output[:, :2].isfinite().logical_not().flatten(1).any(1)
    seen = mask_of(families)[:, place] if which else torch.arange(103) == place
    assert affected[seen].all()
    alone = torch.arange(103) < place
    assert not affected[alone & (torch.arange(103) < 20)].any() or which == 2


@needs_kernels
@pytest.mark.parametrize("scale", [10.0, 1e3, 1e6])
def test_large_scores_stay_finite_and_right(scale: float) -> None:
    families: Families = [(100, [70, 3]), (0, [90])]
    row = random_row(families, 4, 2, 16)
    row = [(row[0].detach() * scale).requires_grad_(), *row[1:]]
    found = native(row, families, 1.0)
    assert all(x.isfinite().all() for x in found)
    if scale == 10.0:
        assert_near(found, plain(row, families, 1.0), 1e-4)


@needs_kernels
def test_scores_that_rise_along_the_row_are_right() -> None:
    """Weights are relative to the highest score so far: it is raised where later ones are much higher."""
    families: Families = [(130, [200])]
    row = random_row(families, 4, 2, 16)
    steps = torch.linspace(-90.0, 90.0, 330)[:, None]
    row[1] = (row[1].detach() * 0.1 + steps / 16).requires_grad_()
    row[0] = (row[0].detach() * 0.1 + 1.0).requires_grad_()
    assert_near(native(row, families, 1.0), plain(row, families, 1.0), 1e-4)


@needs_kernels
def test_threads_share_the_queries_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    families: Families = [(40, [90, 30, 1]), (0, [77])]
    row = random_row(families, 4, 2, 16)
    alone = native(row, families, 0.3)
    monkeypatch.setattr(packed_attention, "SHARE", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    shared = native(row, families, 0.3)
    assert torch.equal(alone[0], shared[0]) and torch.equal(alone[1], shared[1])
    assert_near(shared, alone, 1e-6)


@given(families_of, st.integers(1, 5))
def test_cuts_cover_all_queries_in_order(families: Families, parts: int) -> None:
    plan = AttentionPlan.of(families)
    cuts = plan.cuts(parts)
    assert len(cuts) == parts + 1 and cuts == sorted(cuts)
    assert cuts[0] == 0 and cuts[-1] == len(plan.visible) == sum(p + sum(own) for p, own in families)


@needs_kernels
def test_what_the_kernel_cannot_compute_or_others_look_at_is_left_to_torch() -> None:
    query, key, value = (x.detach() for x in random_row([(4, [3])], 4, 2, 16)[:3])
    assert can_attend(query, key, value)
    assert not can_attend(query.double(), key.double(), value.double())
    assert not can_attend(query, key, value[..., :8])
    assert not can_attend(query.to("meta"), key, value)
    wide = torch.zeros(1, 4, 264)
    assert not can_attend(wide, wide, wide)
    with FlopCounterMode(display=False):
        assert not can_attend(query, key, value)
    seen = []
    torch.func.vmap(lambda x: seen.append(can_attend(x, x, x)) or x)(query)
    assert seen == [False]


@needs_kernels
def test_a_plan_of_another_row_is_refused() -> None:
    row = random_row([(4, [3])], 4, 2, 16)
    with pytest.raises(ValueError, match="a plan of 8 tokens cannot attend in a row of 7"):
        native_attention(*row[:3], AttentionPlan.of([(4, [4])]), None)


def test_without_kernels_torch_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    families: Families = [(20, [30, 11])]
    row = random_row(families, 4, 2, 16)
    monkeypatch.setattr(memory, "library", lambda: None)
    assert not can_attend(*row[:3])
    layout, wanted = PackedLayout.build(families), torch.tensor([3, 30, 60])
    for one, rows in ((layout, torch.arange(61)), (layout.of_queries(wanted), wanted)):
        output = one.attend(CALL, *(x.unsqueeze(0) for x in row[:3]))[0][rows]
        gradients = torch.autograd.grad(output, row[:3], row[3][rows])
        assert_near([output, *gradients], plain(row, families, 0.3, rows))
