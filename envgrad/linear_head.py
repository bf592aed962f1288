"""A linear language-model head fused with log-softmax: log-probs and entropies, never tokens x vocabulary in memory."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

MAX_LOGITS = 2**24
"""logits held at once: 64 MiB in float32"""


def linear_head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target_ids: Tensor,
    *,
    temperature: float = 1.0,
    entropy: Literal["none", "metric", "grad"] = "none",
    max_logits: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``z = (hidden @ weight.T + bias) / temperature``; log-probs ``z[target] - logsumexp(z)`` and entropies, ``(N,)``.

    At most ``max_logits`` (default ``MAX_LOGITS``) logits exist at a time. If all fit, they are kept for the backward;
    else it recomputes them chunk by chunk. With p = softmax(z), H its entropy and g, h the two incoming gradients::

        dL/dz = g * (onehot(target) - p) - h * p * (log p + H)

    Args:
        hidden: ``(N, D)``.
        weight: ``(V, D)``.
        bias: ``(V,)`` or None.
        target_ids: ``(N,)`` int64.
        temperature: Above 0.
        entropy: ``none``: not computed; ``metric``: without gradient; ``grad``: with.
        max_logits: Chunk size in logits.

    Example:
        >>> logprobs, _ = linear_head_logprobs(torch.zeros(1, 3), torch.ones(8, 3), None, torch.tensor([2]))
        >>> round(logprobs.exp().item(), 6)
        0.125
    """
    rows = max(1, (MAX_LOGITS if max_logits is None else max_logits) // weight.shape[0])
    outputs: tuple[Tensor, Tensor | None] = _LinearHead.apply(
        hidden, weight, bias, target_ids, temperature, entropy, rows
    )  # type: ignore[no-untyped-call]
    return outputs


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    z = hidden @ weight.T
    if bias is not None:
        z += bias
    z = z.float()
    return z if temperature == 1.0 else z.div_(temperature)


class _LinearHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target_ids: Tensor,
        temperature: float,
        entropy: str,
        rows: int,
    ) -> tuple[Tensor, Tensor | None]:
        device = hidden.device.type
        # Autocast does not reach into a Function: cast as it would.
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        count = hidden.shape[0]
        logprobs = torch.empty(count, dtype=torch.float32, device=hidden.device)
        log_norm = torch.empty_like(logprobs)
        entropies = None if entropy == "none" else torch.empty_like(logprobs)
        cast_hidden, cast_weight = hidden.to(dtype), weight.to(dtype)
        cast_bias = None if bias is None else bias.to(dtype)
        kept: Tensor | None = None
        for start in range(0, count, rows):
            part = slice(start, start + rows)
            z = _logits(cast_hidden[part], cast_weight, cast_bias, temperature)
            log_norm[part] = torch.logsumexp(z, dim=-1)
            logprobs[part] = z.gather(1, target_ids[part, None]).squeeze(1) - log_norm[part]
            if count <= rows and any(ctx.needs_input_grad[:3]):
                kept = z
            if entropies is not None:
                logs = z - log_norm[part, None]
                entropies[part] = -torch.linalg.vecdot(logs.exp(), logs)
        ctx.save_for_backward(hidden, weight, bias, target_ids, log_norm, entropies, kept)
        ctx.temperature, ctx.rows, ctx.dtype = temperature, rows, dtype
        if entropies is not None and entropy != "grad":
            ctx.mark_non_differentiable(entropies)
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target_ids, log_norm, entropies, kept = ctx.saved_tensors
        cast_hidden, cast_weight = hidden.to(ctx.dtype), weight.to(ctx.dtype)
        cast_bias = None if bias is None else bias.to(ctx.dtype)
        needs = ctx.needs_input_grad
        hidden_grad = torch.empty_like(cast_hidden) if needs[0] else None
        weight_grad = torch.zeros_like(weight) if needs[1] else None
        bias_grad = torch.zeros_like(bias) if bias is not None and needs[2] else None
        if grad is None:
            grad = torch.zeros_like(log_norm)
        for start in range(0, hidden.shape[0], ctx.rows):
            part = slice(start, start + ctx.rows)
            z = _logits(cast_hidden[part], cast_weight, cast_bias, ctx.temperature) if kept is None else kept
            logs = z.sub(log_norm[part, None]) if kept is not None else z.sub_(log_norm[part, None])
            if entropy_grad is None:
                z_grad = logs.exp_().mul_(-grad[part, None])
            else:
                slope = (logs + entropies[part, None]).mul_(entropy_grad[part, None]).add_(grad[part, None])
                z_grad = logs.exp_().mul_(slope).neg_()
            z_grad.scatter_add_(1, target_ids[part, None], grad[part, None])
            z_grad = (z_grad if ctx.temperature == 1.0 else z_grad.div_(ctx.temperature)).to(ctx.dtype)
            if hidden_grad is not None:
                torch.mm(z_grad, cast_weight, out=hidden_grad[part])
            if weight_grad is not None:
                weight_grad.addmm_(z_grad.T.to(weight.dtype), cast_hidden[part].to(weight.dtype))
            if bias_grad is not None:
                bias_grad += z_grad.sum(0)
        return (
            None if hidden_grad is None else hidden_grad.to(hidden.dtype),
            weight_grad, bias_grad, None, None, None, None,
        )  # fmt: skip
