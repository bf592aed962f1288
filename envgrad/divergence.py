"""Divergences between a student's and a teacher's next-token distributions, one value per token.

Self-distillation (SDPO, "Reinforcement Learning via Self-Distillation", arXiv:2601.20802) pulls the student's
distribution p towards the teacher's q on the tokens that the student sampled. The teacher's side has no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from envgrad.errors import ConfigurationError

DivergenceMode: TypeAlias = Literal["sampled_token", "full_logits", "topk_logits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Which divergence, over which tokens of the vocabulary. Names are trl's.

    ::

        sampled_token   stop_gradient(log p(x) - log q(x)) * log p(x)     x: the sampled token
        full_logits     D(p, q) over the whole vocabulary
        topk_logits     D(p', q') over the k tokens likeliest under p, where p' and q' are
                        p and q renormalized on them, or (add_tail) with one more bucket for the rest

        D, alpha = 1    KL(p || q) = sum_v p_v * (log p_v - log q_v)                     reverse KL
        D, alpha = 0    KL(q || p)                                                        forward KL
        D, between      (1 - alpha) * KL(p || m) + alpha * KL(q || m),  m = (1 - alpha) * p + alpha * q
                                                                                          generalized Jensen-Shannon

    The expectation over x ~ p of the first one's gradient is that of the reverse KL, since the score
    ``grad log p(x)`` has mean 0; its value is not the divergence.

    Example:
        >>> p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
        >>> round(Divergence(mode="full_logits", alpha=0.0).of_logs(p, q).item(), 4)
        0.1308
        >>> Divergence(mode="sampled_token", alpha=0.5)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        envgrad.errors.ConfigurationError: distillation_alpha=0.5 must be 1.0 for ...

    Raises:
        ConfigurationError: a value out of range, or one that cannot act in this mode.
    """

    mode: DivergenceMode = "sampled_token"
    alpha: float = 1.0
    topk: int | None = None
    add_tail: bool = False

    def __post_init__(self) -> None:
        if self.mode not in get_args(DivergenceMode):
            raise ConfigurationError(
                f"distillation_mode={self.mode!r} must be one of {', '.join(get_args(DivergenceMode))}"
            )
        if not 0 <= self.alpha <= 1:
            raise ConfigurationError(
                f"distillation_alpha={self.alpha} must be in [0, 1]: 0 is forward KL, 1 reverse KL, 0.5 Jensen-Shannon"
            )
        if self.mode == "sampled_token" and self.alpha != 1:
            raise ConfigurationError(
                f"distillation_alpha={self.alpha} must be 1.0 for distillation_mode='sampled_token', which estimates "
                "the reverse KL only; choose full_logits or topk_logits for another divergence"
            )
        if self.mode == "topk_logits" and (self.topk is None or self.topk < 1):
            raise ConfigurationError(
                f"distillation_topk={self.topk} must be at least 1 for distillation_mode='topk_logits'; 100 is usual"
            )
        if self.mode != "topk_logits" and self.topk is not None:
            raise ConfigurationError(
                f"distillation_topk={self.topk} cannot act in distillation_mode={self.mode!r}; leave it None, or "
                "choose topk_logits"
            )
        if self.mode != "topk_logits" and self.add_tail:
            raise ConfigurationError(
                f"distillation_add_tail=True cannot act in distillation_mode={self.mode!r}: only topk_logits leaves a "
                "tail"
            )

    @property
    def reads_distributions(self) -> bool:
        """Whether it needs more than log-probs of the sampled tokens."""
        return self.mode != "sampled_token"

    def of_logs(self, student: Tensor, teacher: Tensor) -> Tensor:
        """``(n, V)`` log-probs of both -> ``(n,)`` divergences, for the modes that read distributions."""
        if self.topk is not None:
            # The support is the student's: indices have no gradient.
            support = student.detach().topk(min(self.topk, student.shape[-1]), dim=-1).indices
            student, teacher = student.gather(-1, support), teacher.gather(-1, support)
            if self.add_tail:
                student, teacher = with_tail(student), with_tail(teacher)
            else:
                student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
        return generalized_jsd(student, teacher, self.alpha)


def generalized_jsd(student: Tensor, teacher: Tensor, alpha: float) -> Tensor:
    """``D`` of ``Divergence`` between log-probs ``(n, V)`` of the same V outcomes: ``(n,)``, never negative.

    Example:
        >>> p = torch.tensor([[0.5, 0.25, 0.25]]).log()
        >>> generalized_jsd(p, p, 0.5).item()
        0.0
    """
    if alpha == 0:
        return _kl(teacher, student)
    if alpha == 1:
        return _kl(student, teacher)
    # An outcome that neither can have would give logaddexp a gradient of 0 * NaN.
    mixture = torch.logaddexp(student.clamp(min=-1e4) + math.log1p(-alpha), teacher.clamp(min=-1e4) + math.log(alpha))
    return (1 - alpha) * _kl(student, mixture) + alpha * _kl(teacher, mixture)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of log-probs; an outcome that p cannot have adds nothing, even where q cannot have it either."""
    impossible = p == -math.inf
    difference = (p - q).masked_fill(impossible, 0.0)
    return (p.exp() * difference).sum(-1)


def with_tail(logs: Tensor) -> Tensor:
    """``(n, k)`` log-probs of k outcomes -> ``(n, k + 1)``: with the log-prob of none of them, at least about 1e-7.

    Example:
        >>> with_tail(torch.tensor([[0.5, 0.25]]).log()).exp()
        tensor([[0.5000, 0.2500, 0.2500]])
    """
    covered = torch.logsumexp(logs, dim=-1, keepdim=True).clamp(max=-1e-7)
    return torch.cat((logs, torch.log(-torch.expm1(covered))), dim=-1)


def sampled_token_divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Log-probs of the sampled tokens ``(n,)`` -> ``stop_gradient(log p - log q) * log p``.

    Descending it raises tokens that the teacher finds likelier than the student does, and lowers the others.

    Example:
        >>> logs = torch.tensor([-1.0], requires_grad=True)
        >>> sampled_token_divergence(logs, torch.tensor([-0.5])).backward()
        >>> logs.grad
        tensor([-0.5000])
    """
    return (student - teacher).detach() * student


class TeacherSignal:
    """What a student's forward needs of the teacher: M tokens of the student's N.

    Neither a dataclass nor a tuple on purpose: wrappers (FSDP, accelerate) look into those.

    Args:
        divergence: How both are compared.
        index: ``(M,)`` int64, ascending: the student's trained tokens that have a teacher.
        logprobs: ``(M,)`` the teacher's log-probs of the sampled tokens, for ``sampled_token``.
        logits: ``(first, last)`` -> ``(last - first, V)`` logits of those tokens over the temperature, without
            gradient, for the modes that read distributions. Called chunk by chunk, and once more in backward.
    """

    __slots__ = ("divergence", "index", "logits", "logprobs")

    def __init__(
        self,
        *,
        divergence: Divergence,
        index: Tensor,
        logprobs: Tensor | None = None,
        logits: Callable[[int, int], Tensor] | None = None,
    ) -> None:
        self.divergence = divergence
        self.index = index
        self.logprobs = logprobs
        self.logits = logits

    def bounds(self, count: int, rows: int) -> list[int]:
        """Where chunks of ``rows`` of the student's ``count`` tokens begin among the teacher's M, and the end."""
        starts = torch.arange(0, count + rows, rows, device=self.index.device)
        return [int(place) for place in torch.searchsorted(self.index, starts).tolist()]

    def of_logs(self, student: Tensor, first: int, last: int, offset: int = 0) -> Tensor:
        """Divergences of the teacher's tokens ``first`` to ``last``.

        Args:
            student: ``(n, V)`` log-probs of the student's tokens from ``offset`` on.
            first: Of the teacher's tokens.
            last: One behind the last.
            offset: The student's token that ``student[0]`` is.
        """
        if self.logits is None:
            raise AssertionError(f"{self.divergence.mode} needs the teacher's logits")
        with torch.no_grad():
            teacher = self.logits(first, last).float().log_softmax(-1)
        return self.divergence.of_logs(student.index_select(0, self.index[first:last] - offset), teacher)

    def of_sampled(self, logprobs: Tensor) -> Tensor:
        """``(M,)`` from the student's log-probs ``(N,)`` of its tokens."""
        if self.logprobs is None:
            raise AssertionError("sampled_token needs the teacher's log-probs")
        return sampled_token_divergence(logprobs.index_select(0, self.index), self.logprobs)
