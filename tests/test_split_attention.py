from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from envgrad.attention import AttentionCall
from envgrad.layout import PackedLayout
from envgrad.split_attention import CHUNK, DTYPES, Pieces, can_split


def random_row(tokens: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, tokens, 16), (1, 2, tokens, 16), (1, 2, tokens, 16))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


class Calls(TorchDispatchMode):
    """Numbers of (query, key) pairs of each attention call, and of all elements copied by concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[int] = []
        self.masked: list[bool] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if "flash_attention_for_cpu.default" in str(func):
            query, key = args[:2]
            self.pairs.append(query.shape[0] * query.shape[2] * key.shape[2])
            self.masked.append((kwargs or {}).get("attn_mask") is not None)
        return func(*args, **(kwargs or {}))


CALL = AttentionCall(layer=0, scaling=None, dropout=0.0, window=None)


def test_siblings_attend_to_their_prompt_in_one_call_without_mask() -> None:
    lengths = (70, 50, 50, 3)
    layout = PackedLayout.build([(200, lengths)])
    with Calls() as calls:
        layout.attend(CALL, *random_row(200 + sum(lengths)))
    assert 200 * sum(lengths) in calls.pairs
    assert not calls.masked[calls.pairs.index(200 * sum(lengths))]


def test_a_long_causal_row_is_computed_little_beyond_its_triangle() -> None:
    size = 10 * CHUNK
    with Calls() as calls:
        PackedLayout.build([(0, (size,))]).attend(CALL, *random_row(size))
    assert sum(calls.pairs) == size * size // 2 + size * CHUNK // 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_of_the_kernel_gives_plain_attention(dtype: torch.dtype) -> None:
    prompt, lengths = 30, (2 * CHUNK, 40)
    row = random_row(prompt + sum(lengths), dtype)
    output = PackedLayout.build([(prompt, lengths)]).attend(CALL, *row)
    output.double().pow(2).sum().backward()
    start, expected = prompt, []
    exact = [x.detach().double().requires_grad_() for x in row]
    for length in lengths:
        pick = torch.cat((torch.arange(prompt), torch.arange(start, start + length)))
        parts = [x[:, :, pick] for x in exact]
        expected.append(scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)[:, :, prompt:])
        start += length
    head = scaled_dot_product_attention(*(x[:, :, :prompt] for x in exact), is_causal=True, enable_gqa=True)
    whole = torch.cat([head, *expected], 2).transpose(1, 2)
    whole.pow(2).sum().backward()
    limit = {torch.float64: 1e-9, torch.float32: 1e-5}.get(dtype, 5e-2)
    assert (output - whole).abs().max() <= limit * whole.abs().max()
    for ours, theirs in zip(row, exact, strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert (ours.grad - theirs.grad).abs().max() <= limit * theirs.grad.abs().max()


def test_extreme_scores_stay_finite() -> None:
    row = [(x.detach() * 1e3).requires_grad_() for x in random_row(9)]
    output = PackedLayout.build([(4, (3, 2))]).attend(CALL, *row)
    output.sum().backward()
    assert output.isfinite().all() and all(x.grad is not None and x.grad.isfinite().all() for x in row)


def test_expanded_gradients_are_read_as_what_they_are() -> None:
    layout, found = PackedLayout.build([(4, (3, 2))]), []
    for spread in (torch.ones(()).expand(1, 9, 4, 16), torch.ones(1, 9, 4, 16)):
        row = random_row(9)
        layout.attend(CALL, *row).backward(spread)
        found.append([x.grad for x in row])
    for a, b in zip(*found, strict=True):
        assert a is not None and b is not None and torch.equal(a, b)


def test_equal_rows_are_one_call() -> None:
    with Calls() as calls:
        PackedLayout.build([(0, (5, 5, 5, 2))]).attend(CALL, *random_row(17))
    assert calls.pairs == [75, 4]


def test_masks_are_kept_and_can_be_trained_with() -> None:
    pieces = Pieces.of([(0, (2 * CHUNK,)), (0, (2 * CHUNK, 2 * CHUNK))])
    like = torch.zeros(1)
    with torch.inference_mode():
        masks = [pieces.mask(piece, like) for piece in pieces]
    assert masks[0] is masks[2] is None
    assert masks[1] is masks[3] is not None and not masks[1].is_inference()
    again = [pieces.mask(piece, like) for piece in pieces]
    assert all(a is b for a, b in zip(masks, again, strict=True))


def test_what_the_kernel_cannot_compute_is_known() -> None:
    query, key, value = (x[0].transpose(0, 1) for x in random_row(4))
    assert can_split(query, key, value, dropout=0.0)
    assert not can_split(query, key, value, dropout=0.1)
    assert not can_split(query, key, value[..., :8], dropout=0.0)
    assert not can_split(query.to("meta"), key, value, dropout=0.0)
