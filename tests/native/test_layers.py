"""What lies between a layer's matrix products, against torch's operations in double precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from envgrad.native import layers
from envgrad.native.compiler import library
from envgrad.native.layers import add_norm, gated, gated_linear, rotate

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler here")

WIDTHS = st.one_of(st.integers(1, 40), st.sampled_from([48, 63, 64, 65, 100, 576]))
ROWS = st.integers(0, 140)


@pytest.fixture(autouse=True)
def any_size_in_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three threads, however short the rows are."""
    before = torch.get_num_threads()
    monkeypatch.setattr(layers, "SHARE", 1)
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def randn(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def compared(
    ours: Callable[..., Any], expected: Callable[..., Any], inputs: Sequence[Tensor], tolerance: float = 2e-6
) -> None:
    """Outputs and gradients of both, the second in double precision; gradients of outputs are random."""
    found, wanted = [], []
    for function, kind, into in ((ours, torch.float32, found), (expected, torch.float64, wanted)):
        given = [one.to(kind).requires_grad_() for one in inputs]
        outputs = function(*given)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = sum((one * randn(*one.shape, seed=9 + n).to(kind)).sum() for n, one in enumerate(outputs))
        into += [*outputs, *torch.autograd.grad(loss, given)]
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.float32 and one.shape == other.shape
        if one.numel():
            assert (one - other).abs().max() <= tolerance * other.abs().max().clamp(min=1.0)


def norm_of(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, width=WIDTHS, seed=st.integers(0, 99), scale=st.sampled_from([1e-3, 1.0, 30.0]))
def test_a_norm_and_what_is_added_before_it(rows: int, width: int, seed: int, scale: float) -> None:
    x, added = randn(rows, width, seed=seed, scale=scale), randn(rows, width, seed=seed + 1, scale=scale)
    weight = 1 + 0.1 * randn(width, seed=2)

    def expected(x: Tensor, added: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return x + added, norm_of(x + added, weight)

    steep = torch.rsqrt(torch.stack((x, x + added)).pow(2).mean(-1) + 1e-5)  # what gradients are multiplied by
    tolerance = 4e-6 * max([1.0, *steep.flatten().tolist()])
    compared(lambda x, a, w: add_norm(x, a, w, 1e-5), expected, [x, added, weight], tolerance)
    alone = [x, weight]
    compared(lambda x, w: add_norm(x, None, w, 1e-5), lambda x, w: (x * 1, norm_of(x, w)), alone, tolerance)
    compared(lambda x, w: add_norm(x, None, w, 1e-5)[1], norm_of, alone, tolerance)


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, width=WIDTHS, seed=st.integers(0, 99), scale=st.sampled_from([0.1, 3.0, 40.0]))
def test_gated_activations(rows: int, width: int, seed: int, scale: float) -> None:
    gate, up = randn(rows, width, seed=seed, scale=scale), randn(rows, width, seed=seed + 1)
    weight = randn(7, width, seed=3)

    def expected(gate: Tensor, up: Tensor) -> Tensor:
        return torch.nn.functional.silu(gate) * up

    compared(gated, expected, [gate, up])
    compared(gated_linear, lambda gate, up, weight: expected(gate, up) @ weight.T, [gate, up, weight], 1e-5)


def test_gates_far_from_zero_are_open_or_shut() -> None:
    gate = torch.tensor([-1e30, -200.0, -87.5, 0.0, 87.5, 200.0, 1e30])
    found = gated(gate, torch.ones(7))
    assert torch.allclose(found, torch.nn.functional.silu(gate), atol=1e-34)
    gate.requires_grad_()
    (grad,) = torch.autograd.grad(gated(gate, torch.ones(7)).sum(), gate)
    assert torch.isfinite(grad).all() and grad[0].abs() < 1e-6 and grad[-1] == 1.0


def test_what_is_not_a_number_stays_none() -> None:
    bad = torch.full((2, 20), float("nan"))
    assert gated(bad, bad).isnan().all()
    assert add_norm(bad, None, torch.ones(20), 1e-5)[1].isnan().all()


def turned(x: Tensor, cosine: Tensor, sine: Tensor, size: int) -> Tensor:
    heads = x.unflatten(-1, (-1, size))
    first, second = heads.chunk(2, dim=-1)
    other = torch.cat((-second, first), dim=-1)
    return (heads * cosine[:, None] + other * sine[:, None]).flatten(-2)


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, heads=st.integers(1, 5), half=st.one_of(st.integers(1, 40), st.just(64)), seed=st.integers(0, 99))
def test_rotations(rows: int, heads: int, half: int, seed: int) -> None:
    x, angles = randn(rows, heads * 2 * half, seed=seed), randn(rows, half, seed=seed + 1).repeat(1, 2)

    def ours(x: Tensor) -> Tensor:
        return rotate(x * 1, angles.cos(), angles.sin(), 2 * half)

    compared(ours, lambda x: turned(x, angles.double().cos(), angles.double().sin(), 2 * half), [x])


def test_rows_that_do_not_lie_side_by_side_are_read_as_they_are() -> None:
    wide = randn(5, 6, 30, seed=0)
    x, weight = wide[:, ::2, 3:27], torch.ones(24)
    expected = norm_of(x, weight)
    assert torch.allclose(add_norm(x, None, weight, 1e-5)[1], expected, atol=1e-6)
    assert torch.allclose(gated(x, x), torch.nn.functional.silu(x) * x, atol=1e-6)
    out = gated_linear(x, x, randn(4, 24, seed=1))
    assert out.shape == (5, 3, 4)


def test_gradients_do_not_depend_on_what_else_needs_them() -> None:
    x, weight = randn(9, 24, seed=0).requires_grad_(), torch.ones(24)
    total, normed = add_norm(x, x.detach(), weight, 1e-5)
    (both,) = torch.autograd.grad((total + normed).sum(), x, retain_graph=True)
    (one,) = torch.autograd.grad(total.sum(), x, retain_graph=True)
    (other,) = torch.autograd.grad(normed.sum(), x)
    assert torch.equal(one, torch.ones_like(x)) and torch.allclose(both, one + other, atol=1e-6)


def test_a_weight_summed_over_many_rows_keeps_its_digits() -> None:
    """One after another in single precision, a hundred thousand equal numbers would be off in the fourth digit."""
    x, weight = torch.ones(100_000, 4), torch.ones(4).requires_grad_()
    (grad,) = torch.autograd.grad(add_norm(x, None, weight, 0.0)[1].sum() * 0.1, weight)
    assert torch.allclose(grad, torch.full((4,), 10_000.0), rtol=1e-5)
