"""What a decoder layer does between its matrix products, on the CPU: a kernel call forward and one backward each.

They (``kernels/layers.cpp``) keep less for the backward than torch's operations would. Tensors are ``(..., width)``;
``native.memory.can_compute`` says which they compute with.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from envgrad.native.compiler import library
from envgrad.native.memory import floats

SHARE = 1 << 18
"""numbers for which another thread is worth its start, about a tenth of a millisecond's work"""


class _Norm(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "added", "weight", "sum", "y", "scale")),
        *((name, ctypes.c_int64) for name in ("rows", "width")),
        ("epsilon", ctypes.c_float),
        ("threads", ctypes.c_int32),
    )


class _NormBack(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "grad", "sum_grad", "sum", "weight", "scale", "x_grad", "weight_grad"
        )),
        *((name, ctypes.c_int64) for name in ("rows", "width")),
        ("threads", ctypes.c_int32),
    )  # fmt: skip


class _Gated(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("gate", "up", "hidden")),
        ("count", ctypes.c_int64),
        ("threads", ctypes.c_int32),
    )


class _GatedBack(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("grad", "gate", "up", "gate_grad", "up_grad", "hidden")),
        ("count", ctypes.c_int64),
        ("threads", ctypes.c_int32),
    )


class _Rotation(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "cosine", "sine", "y")),
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("heads", "size")),
        ("direction", ctypes.c_float),
        ("threads", ctypes.c_int32),
    )


def add_norm(x: Tensor, added: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """``x + added``, and its RMS norm (Zhang and Sennrich, arXiv:1910.07467) times ``weight`` ``(width,)``.

    Without ``added``, the first is ``x``. The gradient of what it is used for besides is added in the same pass.

    Example:
        >>> x = torch.tensor([[3.0, 4.0]])
        >>> if library() is not None:
        ...     total, normed = add_norm(x, x, torch.ones(2), 0.0)
        ...     assert torch.allclose(normed, torch.tensor([[6.0, 8.0]]) / 50**0.5)
    """
    total, normed = _AddNorm.apply(x, added, weight, epsilon)  # type: ignore[no-untyped-call]
    return total, normed


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` (Shazeer, arXiv:2002.05202).

    Example:
        >>> one = torch.ones(2)
        >>> library() is None or torch.allclose(gated(one, 2 * one), 2 * torch.nn.functional.silu(one))
        True
    """
    hidden: Tensor = _GatedUp.apply(gate, up)  # type: ignore[no-untyped-call]
    return hidden


def gated_linear(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """``gated(gate, up) @ weight.T``, which computes the product anew in the backward instead of keeping it.

    Args:
        gate: ``(..., I)``.
        up: As ``gate``.
        weight: ``(H, I)``.

    Example:
        >>> one = torch.ones(2)
        >>> library() is None or torch.equal(gated_linear(one, one, torch.eye(2)), gated(one, one))
        True
    """
    output: Tensor = _GatedLinear.apply(gate, up, weight)  # type: ignore[no-untyped-call]
    return output


def rotate(x: Tensor, cosine: Tensor, sine: Tensor, size: int) -> Tensor:
    """Heads of ``size`` numbers with their halves turned by each row's angles (Su et al., arXiv:2104.09864).

    Args:
        x: ``(..., heads * size)``; it is written to, so nothing else may need it.
        cosine: ``(..., size)``, whose halves are equal.
        sine: As ``cosine``.
        size: Of a head.

    Example:
        >>> x, angle = torch.tensor([[1.0, 0.0]]), torch.full((1, 2), 0.5)
        >>> turned = torch.tensor([[0.8776, 0.4794]])
        >>> library() is None or torch.allclose(rotate(x, angle.cos(), angle.sin(), 2), turned, atol=1e-4)
        True
    """
    turned: Tensor = _Rotate.apply(x, cosine, sine, size)  # type: ignore[no-untyped-call]
    return turned


def _threads(count: int) -> int:
    return max(1, min(torch.get_num_threads(), count // SHARE))


def _like(x: Tensor) -> Tensor:
    return floats(*x.shape)


def _call(name: str, arguments: ctypes.Structure) -> None:
    getattr(library(), f"envgrad_{name}")(ctypes.byref(arguments))


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, added: Tensor | None, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.set_materialize_grads(False)
        width = x.shape[-1]
        row, more, weight = x.contiguous(), None if added is None else added.contiguous(), weight.contiguous()
        total, normed = row if more is None else _like(row), _like(row)
        scale = floats(row.numel() // max(1, width))
        _call("norm", _Norm(
            x=row.data_ptr(), added=_pointer(more), weight=weight.data_ptr(), sum=total.data_ptr(),
            y=normed.data_ptr(), scale=scale.data_ptr(), rows=len(scale), width=width, epsilon=epsilon,
            threads=_threads(row.numel()),
        ))  # fmt: skip
        ctx.save_for_backward(total, weight, scale)
        return (x if more is None else total), normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, total_grad: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight, scale = ctx.saved_tensors
        if grad is None:
            return total_grad, total_grad if ctx.needs_input_grad[1] else None, None, None
        grad = grad.contiguous()
        other = None if total_grad is None else total_grad.contiguous()
        threads = _threads(total.numel())
        x_grad, width = _like(total), total.shape[-1]
        weight_grad = None
        if ctx.needs_input_grad[2]:
            weight_grad = torch.zeros((threads, 2, width), dtype=torch.float32, device="cpu")
        _call("norm_back", _NormBack(
            grad=grad.data_ptr(), sum_grad=_pointer(other), sum=total.data_ptr(), weight=weight.data_ptr(),
            scale=scale.data_ptr(), x_grad=x_grad.data_ptr(), weight_grad=_pointer(weight_grad), rows=len(scale),
            width=width, threads=threads,
        ))  # fmt: skip
        summed = None if weight_grad is None else weight_grad[:, 0].sum(0)
        return x_grad, x_grad if ctx.needs_input_grad[1] else None, summed, None


def _hidden_of(gate: Tensor, up: Tensor) -> Tensor:
    hidden, count = _like(gate), gate.numel()
    _call("gated", _Gated(
        gate=gate.data_ptr(), up=up.data_ptr(), hidden=hidden.data_ptr(), count=count, threads=_threads(count),
    ))  # fmt: skip
    return hidden


def _gated_grads(grad: Tensor, gate: Tensor, up: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradients of ``gate`` and ``up``; ``hidden`` is filled with what they made."""
    gate_grad, up_grad, grad, count = _like(gate), _like(up), grad.contiguous(), gate.numel()
    _call("gated_back", _GatedBack(
        grad=grad.data_ptr(), gate=gate.data_ptr(), up=up.data_ptr(), gate_grad=gate_grad.data_ptr(),
        up_grad=up_grad.data_ptr(), hidden=_pointer(hidden), count=count, threads=_threads(count),
    ))  # fmt: skip
    return gate_grad, up_grad


class _GatedUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return _hidden_of(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return _gated_grads(grad, gate, up, None)


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up, weight)
        return _hidden_of(gate, up) @ weight.T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        gate, up, weight = ctx.saved_tensors
        trains = ctx.needs_input_grad[2]
        hidden = _like(gate) if trains else None
        gate_grad, up_grad = _gated_grads(grad @ weight, gate, up, hidden)
        if hidden is None:
            return gate_grad, up_grad, None
        return gate_grad, up_grad, grad.flatten(0, -2).T @ hidden.flatten(0, -2)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor, size: int) -> Tensor:
        cosine, sine = cosine.contiguous(), sine.contiguous()
        ctx.save_for_backward(cosine, sine)
        ctx.size = size
        ctx.mark_dirty(x)
        _turn(x, x, cosine, sine, size, 1.0)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cosine, sine = ctx.saved_tensors
        grad = grad.contiguous()
        found = _like(grad)
        _turn(grad, found, cosine, sine, ctx.size, -1.0)
        return found, None, None, None


def _turn(x: Tensor, y: Tensor, cosine: Tensor, sine: Tensor, size: int, direction: float) -> None:
    heads = x.shape[-1] // size
    _call("rotate", _Rotation(
        x=x.data_ptr(), cosine=cosine.data_ptr(), sine=sine.data_ptr(), y=y.data_ptr(),
        rows=x.numel() // max(1, heads * size), heads=heads, size=size, direction=direction,
        threads=_threads(x.numel()),
    ))  # fmt: skip
