"""Forward and backward of an optimizer step, as a trainer does them, and what all processes then know of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from envgrad.algorithms.base import Algorithm
from envgrad.algorithms.grpo import GRPO
from envgrad.algorithms.rloo import RLOO
from envgrad.batch import Batch, MicroBatch
from envgrad.config import RolloutConfig
from envgrad.distributed.meeting import Step, meet
from envgrad.logprobs import policy_logprobs
from envgrad.losses import LossInputs, LossOutputs
from envgrad.training.guards import GuardedTrainer
from envgrad.training.passes import TrainingThreads, passes_one_by_one, passes_side_by_side, side_by_side_fits
from envgrad.training.together import join_ranks

if TYPE_CHECKING:
    from envgrad.training.rollouts import Rollouts
    from envgrad.training.stream import StepItem, StepStream
    from envgrad.training.teacher import Teacher


class PassesTrainer(GuardedTrainer):
    """``Trainer`` that makes a step's passes: all micro-batches, or this process's share of them."""

    algorithm: Algorithm
    user_args: RolloutConfig
    rollouts: Rollouts
    teacher: Teacher | None
    _stream: StepStream | None
    outputs: list[LossOutputs]
    """of this process's micro-batches of the step"""
    threads: TrainingThreads
    """for micro-batches side by side"""
    met: Step | None = None
    """the step as all processes see it, where there are several"""

    def join(self, args: RolloutConfig) -> None:
        """Take part in the run, with the other processes if there are any."""
        self.ranks = join_ranks(args)
        self.signals.together = self.ranks.size > 1

    def meet(self, fault: str | None) -> str | None:
        """All processes see the step alike: what is not finite, its loss and metrics, and a signal to any of them."""
        if self.ranks.size == 1:
            return fault
        self.met = meet(self.ranks, self.outputs, fault=fault, signal=self.signals.arrived)
        if self.met.signal is not None:
            self.signals.tell(self.met.signal)
        return self.met.fault

    def _passes(self, model: nn.Module, inputs: StepItem, own: Batch) -> Iterator[LossOutputs]:
        """Forward and backward of this process's share of ``inputs``. Between two micro-batches a signal is raised, and
        the step given back, unless there are other processes."""
        micro_batches, forward = own.micro_batches, partial(self._forward_loss, model)
        if len(micro_batches) > 1 and torch.get_num_threads() > 1 and self._side_by_side(model):
            trained = [one for one in model.parameters() if one.requires_grad]
            passes = passes_side_by_side(micro_batches, forward, trained, self.threads, torch.get_num_threads())
        else:
            passes = passes_one_by_one(micro_batches, forward, self.accelerator, model)
        with contextlib.closing(passes):
            for _ in micro_batches:
                alone = self.ranks.size == 1
                if alone and self.signals.arrived is not None and self._stream is not None:  # no weight has changed yet
                    passes.close()
                    self._stream.pending.appendleft(inputs)
                    self.signals.release()
                yield next(passes)

    def _side_by_side(self, model: nn.Module) -> bool:
        ours = type(self.algorithm) in (GRPO, RLOO) and self.teacher is None  # their loss keeps no state
        return ours and self.accelerator.scaler is None and side_by_side_fits(model, self.rollouts.policy.base)

    def _forward_loss(self, model: nn.Module, packed: MicroBatch) -> LossOutputs:
        """One micro-batch's share of the loss."""
        temperature, entropy = self.user_args.temperature, self.algorithm.entropy
        signal = None if self.teacher is None else self.teacher.signal(packed)
        with self.compute_loss_context_manager():
            outputs = policy_logprobs(model, packed, temperature=temperature, entropy=entropy, teacher=signal)
            found = self.algorithm.loss(LossInputs.of(packed, outputs))
        self.guard.seen(packed, outputs.logprobs, found.loss)
        return found
