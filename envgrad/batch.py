"""The records of one optimizer step: totals, micro-batches, and the batch that they make (``packing.pack``)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor

from envgrad.layout import PackedLayout
from envgrad.types import TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTotals:
    """Counts over one whole optimizer step: all micro-batches, all processes. The loss weights' denominators.

    Example:
        >>> StepTotals(num_samples=2, num_tokens=10) + StepTotals(num_samples=1, num_tokens=5)
        StepTotals(num_samples=3, num_tokens=15)
    """

    num_samples: float
    num_tokens: float
    """trained tokens"""

    def __add__(self, other: StepTotals) -> StepTotals:
        return StepTotals(
            num_samples=self.num_samples + other.num_samples, num_tokens=self.num_tokens + other.num_tokens
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherRows:
    """The same trained tokens behind the prompts that a teacher sees: M of a micro-batch's N, in the same order."""

    rows: MicroBatch
    """packed from ``teacher_prompt`` and the tokens after the sample's own prompt; it has M trained tokens"""
    index: Tensor
    """``(M,)`` int64, ascending: which of the micro-batch's N trained tokens each of them is"""

    def to(self, device: torch.device | str) -> TeacherRows:
        return TeacherRows(rows=self.rows.to(device), index=self.index.to(device))


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward and backward: a flat row of T tokens of which N positions predict a trained token.

    Made by ``pack``; ``dataclasses.replace`` fills in what a no-grad pass computes (old and reference log-probs).
    """

    input_ids: Tensor
    """``(1, T)`` int64"""
    position_ids: Tensor
    """``(1, T)`` int64"""
    layout: PackedLayout | None
    """None for a plain row"""
    predict_index: Tensor
    """``(N,)`` index into T of the token whose hidden state predicts the n-th trained token"""
    target_ids: Tensor
    """``(N,)`` the trained tokens"""
    sampler_logprobs: Tensor
    """``(N,)`` the log-probs they were sampled with"""
    old_logprobs: Tensor
    """``(N,)`` denominators of the importance ratio: the sampler's, unless they were recomputed"""
    advantages: Tensor
    """``(N,)``"""
    weights: Tensor
    """``(N,)`` loss weights, decided for the whole step"""
    sample_index: Tensor
    """``(N,)`` int64, which of this micro-batch's samples the token belongs to: 0 .. num_samples - 1"""
    num_samples: int
    samples: tuple[int, ...]
    """this micro-batch's samples, as indices into ``Batch.samples``"""
    total_tokens: float
    """trained tokens in the whole step"""
    ref_logprobs: Tensor | None = None
    """``(N,)`` the reference model's, if there is one"""
    importance: Tensor | None = None
    """``(N,)`` weight old / sampler where the old log-probs were recomputed (``losses.importance_correction``)"""
    selected: Tensor | None = None
    """``(N,)`` 1 for tokens whose surrogate counts, 0 for the others (``losses.select_top_entropy``); None: all"""
    total_selected: float = 0.0
    """selected tokens in the whole step; read only beside ``selected``"""
    total_samples: float = inf
    """samples in the whole step"""
    teacher: TeacherRows | None = None
    """the rows that a teacher reads, where samples have a ``teacher_prompt``"""
    temperature: float | None = None
    """that its tokens were sampled at, where it is not the run's"""

    @property
    def num_forwarded_tokens(self) -> int:
        """Tokens of its row; the teacher's rows are counted apart."""
        return self.input_ids.shape[1]

    @property
    def num_teacher_tokens(self) -> int:
        """Tokens that the teacher forwards."""
        return 0 if self.teacher is None else self.teacher.rows.num_forwarded_tokens

    @property
    def num_trained_tokens(self) -> int:
        return self.target_ids.shape[0] if self.samples else 0

    def at_temperature(self, temperature: float) -> MicroBatch:
        """The same tokens, sampled at ``temperature``."""
        teacher = self.teacher
        if teacher is not None:
            teacher = replace(teacher, rows=teacher.rows.at_temperature(temperature))
        return replace(self, temperature=temperature, teacher=teacher)

    def to(self, device: torch.device | str) -> MicroBatch:
        def move(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(device)

        return replace(
            self,
            input_ids=self.input_ids.to(device),
            position_ids=self.position_ids.to(device),
            layout=None if self.layout is None else self.layout.to(device),
            predict_index=self.predict_index.to(device),
            target_ids=self.target_ids.to(device),
            sampler_logprobs=self.sampler_logprobs.to(device),
            old_logprobs=self.old_logprobs.to(device),
            advantages=self.advantages.to(device),
            weights=self.weights.to(device),
            sample_index=self.sample_index.to(device),
            ref_logprobs=move(self.ref_logprobs),
            importance=move(self.importance),
            selected=move(self.selected),
            teacher=None if self.teacher is None else self.teacher.to(device),
        )


def padding_micro_batch() -> MicroBatch:
    """One token of weight 0: a forward and backward that change nothing, to even out counts over processes.

    Example:
        >>> padding_micro_batch().weights.tolist()
        [0.0]
    """
    index = torch.zeros(1, dtype=torch.int64)
    zero = torch.zeros(1)
    return MicroBatch(
        input_ids=index[None], position_ids=index[None], layout=None, predict_index=index, target_ids=index,
        sampler_logprobs=zero, old_logprobs=zero, advantages=zero, weights=zero, sample_index=index, num_samples=1,
        samples=(), total_tokens=inf, ref_logprobs=zero, importance=zero,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """All micro-batches of one optimizer step on this process."""

    micro_batches: tuple[MicroBatch, ...]
    samples: tuple[TrainingSample, ...]
    totals: StepTotals
    num_required_tokens: int
    """tokens that must be forwarded if every common prompt is forwarded once"""

    def __len__(self) -> int:
        return len(self.micro_batches)

    @property
    def num_samples(self) -> int:
        return len(self.samples)

    @property
    def num_tokens(self) -> int:
        """Trained tokens."""
        return sum(micro_batch.num_trained_tokens for micro_batch in self.micro_batches)

    @property
    def num_forwarded_tokens(self) -> int:
        return sum(micro_batch.num_forwarded_tokens for micro_batch in self.micro_batches)

    @property
    def num_teacher_tokens(self) -> int:
        return sum(micro_batch.num_teacher_tokens for micro_batch in self.micro_batches)

    def padded_to(self, count: int) -> Batch:
        """With ``padding_micro_batch`` appended up to ``count``: processes must agree on it under FSDP and ZeRO-3."""
        missing = max(0, count - len(self))
        return replace(self, micro_batches=self.micro_batches + (padding_micro_batch(),) * missing)
