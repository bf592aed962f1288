"""The language-model head over hidden states of trained tokens, in chunks: log-probs, entropies, divergences.

Neither forward nor backward ever holds tokens x vocabulary. Logits are recomputed in backward where they do not fit
``MAX_LOGITS``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from envgrad.divergence import TeacherSignal
from envgrad.linear_head import MAX_LOGITS, linear_head_logprobs

EntropyMode: TypeAlias = Literal["none", "metric", "grad"]
"""``metric``: entropies without gradient; ``grad``: with"""


class PolicyOutputs(NamedTuple):
    """``(N,)`` float32 each. A tuple, because wrappers find the tensors that need gradient hooks in tuples."""

    logprobs: Tensor
    entropy: Tensor | None
    divergence: Tensor | None = None
    """``(M,)`` from the teacher, of the trained tokens that have one"""


def logprobs_from_hidden(
    hidden: Tensor,
    head: nn.Module,
    target_ids: Tensor,
    *,
    temperature: float = 1.0,
    entropy: EntropyMode = "none",
    teacher: TeacherSignal | None = None,
) -> PolicyOutputs:
    """``log softmax(head(hidden) / temperature)`` at ``target_ids``, in float32, and the entropy of the distribution.

    A plain ``nn.Linear`` takes a path of its own, which recomputes the least; any other head (adapters, hooks), and
    the divergence from a teacher's whole distribution, is computed chunk by chunk under activation checkpointing.

    Args:
        hidden: ``(N, D)`` last hidden states.
        head: ``(n, D)`` -> logits ``(n, V)``.
        target_ids: ``(N,)`` int64.
        temperature: Above 0.
        entropy: ``EntropyMode``.
        teacher: The teacher's side of a divergence that reads distributions; see ``divergence.TeacherSignal``.

    Example:
        >>> head = nn.Linear(2, 4, bias=False).requires_grad_(False)
        >>> outputs = logprobs_from_hidden(torch.zeros(3, 2), head, torch.tensor([0, 1, 2]), entropy="metric")
        >>> outputs.logprobs.exp().tolist(), outputs.entropy.exp().tolist()
        ([0.25, 0.25, 0.25], [4.0, 4.0, 4.0])
    """
    if teacher is None and isinstance(head, nn.Linear) and is_plain(head):
        return PolicyOutputs(
            *linear_head_logprobs(hidden, head.weight, head.bias, target_ids, temperature=temperature, entropy=entropy)
        )
    width = head.out_features if isinstance(head, nn.Linear) else 2**16
    # A divergence holds the teacher's logits, both log-probs and their difference at once.
    rows = max(1, MAX_LOGITS // int(width) // (1 if teacher is None else 4))
    bounds = None if teacher is None else teacher.bounds(hidden.shape[0], rows)

    def chunk(number: int, part: Tensor, targets: Tensor) -> PolicyOutputs:
        logits: Tensor = head(part)
        logs = torch.log_softmax(logits.float() / temperature, dim=-1)
        outputs = logprobs_from_logs(logs, targets, entropy)
        if teacher is None or bounds is None:
            return outputs
        first, last = bounds[number], bounds[number + 1]
        return outputs._replace(divergence=teacher.of_logs(logs, first, last, offset=number * rows))

    if hidden.shape[0] <= rows:
        return chunk(0, hidden, target_ids)
    parts = [
        PolicyOutputs(*checkpoint(chunk, number, part, targets, use_reentrant=False))
        for number, (part, targets) in enumerate(
            zip(torch.split(hidden, rows), torch.split(target_ids, rows), strict=True)
        )
    ]
    return PolicyOutputs(
        torch.cat([part.logprobs for part in parts]),
        _joined([part.entropy for part in parts]),
        _joined([part.divergence for part in parts]),
    )


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    found = [part for part in parts if part is not None]
    return torch.cat(found) if found else None


def is_plain(head: nn.Linear) -> bool:
    """Whether calling ``head`` is nothing but ``x @ weight.T + bias`` with the weight in memory."""
    hooks = (head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks)
    ordinary = type(head) is nn.Linear and "forward" not in vars(head) and type(head.weight) is nn.Parameter
    return ordinary and not any(hooks) and head.weight.dim() == 2


def logprobs_from_logs(logs: Tensor, target_ids: Tensor, entropy: EntropyMode) -> PolicyOutputs:
    """``(N, V)`` log-probs -> those of ``target_ids``, and entropies."""
    chosen = logs.gather(-1, target_ids[:, None]).squeeze(-1)
    if entropy == "none":
        return PolicyOutputs(chosen, None)
    logs = logs if entropy == "grad" else logs.detach()
    return PolicyOutputs(chosen, -(logs.exp() * logs).sum(-1))
