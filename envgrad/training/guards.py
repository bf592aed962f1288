"""NaN and infinity in an optimizer step: found, named, and the step's update is made whole or not at all.

::

    micro-batch --forward--> log-probs --> loss --backward--> gradients --> allows()? --yes--> optimizer, schedule
                                 `-----------`-- seen()           `-- norm      `------no--> all stay; the step counts

Rewards and samplers' log-probs are looked at where episodes are played (``rollout.finite``). Looking costs a few sums
for each micro-batch, and one number that is read back for each step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from envgrad.batch import Batch, MicroBatch
from envgrad.distributed.sharded import whole
from envgrad.errors import NonFiniteError
from envgrad.rollout.finite import episode_name
from envgrad.training.signals import StoppableTrainer

logger = logging.getLogger(__name__)

MOST_IN_A_ROW = 16
"""updates skipped one after another, beyond which nothing is learned any more and the run ends"""
SKIPPED = "updates/skipped"
"""metric: share of the steps whose update was skipped"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What one micro-batch's loss was made of."""

    packed: MicroBatch
    logprobs: Tensor
    loss: Tensor

    def inputs(self) -> dict[str, Tensor | None]:
        """The loss's inputs, each ``(N,)``, in the order in which they arise."""
        return {
            "the advantage (the algorithm's credit)": self.packed.advantages,
            "the log-prob before the update (the old policy's)": self.packed.old_logprobs,
            "the reference model's log-prob": self.packed.ref_logprobs,
            "the importance weight (old by sampler's probability)": self.packed.importance,
            "the policy's log-prob": self.logprobs,
        }

    def total(self) -> Tensor:
        """Finite only if all of it is."""
        parts = [tensor.sum().float() for tensor in self.inputs().values() if tensor is not None]
        return torch.stack([*parts, self.loss.float()]).sum()


class Guard(TrainerCallback):
    """Decides for each optimizer step whether its update is made.

    Args:
        accelerator: Whose optimizer makes it.
        model: What is trained.
        on_nonfinite: ``"skip"``, or ``"raise"``: a number that is not finite ends the run.
        report: Takes the step's metric.
        agree: Given what is not finite here (None: all is), says what is not finite on any process.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        on_nonfinite: str,
        report: Callable[[dict[str, float]], None],
        agree: Callable[[str | None], str | None] = lambda fault: fault,
    ) -> None:
        self._accelerator = accelerator
        self._model = model
        # DeepSpeed updates in the last backward: there is nothing left to skip.
        self._ends = on_nonfinite == "raise" or accelerator.distributed_type == DistributedType.DEEPSPEED
        self._report = report
        self._agree = agree
        self._seen: list[_Seen] = []
        self._held_back = False
        self._skipped = False
        self._in_a_row = 0
        self._scale = 0.0
        self.skipped = 0
        """updates of this trainer that were skipped for what is not finite"""
        self.weights_lost = False
        """whether the weights themselves are no longer finite"""
        self.agreed = False
        """whether the last step held something that is not finite, which all processes know of"""
        self.norm: Tensor | None = None
        """of the gradients of an update that is skipped"""

    # -- one step

    def begin(self) -> None:
        """A step's first micro-batch is next."""
        self._seen, self._held_back, self._skipped, self.norm = [], False, False, None

    def seen(self, packed: MicroBatch, logprobs: Tensor, loss: Tensor) -> None:
        """One micro-batch's forward is done. From any thread."""
        self._seen.append(_Seen(packed=packed, logprobs=logprobs.detach(), loss=loss.detach()))

    def allows(self, batch: Batch, step: int, algorithm: object) -> bool:
        """Whether the update of what was seen may be made; gradients are those of the whole step.

        Raises:
            NonFiniteError: it may not, and that ends the run.
        """
        scaler = self._accelerator.scaler is not None
        if not self._seen:
            if scaler:  # it cannot step without a gradient
                self._hold_back()
            self._agree(None)
            return True
        # With a gradient scaler an infinite gradient is a scale that is too large: it skips the update by itself.
        self.norm = torch.zeros(()) if scaler else self._gradient_norm()
        total = torch.stack([one.total() for one in self._seen]).sum() + self.norm.to(self._seen[0].loss.device)
        what = None if bool(torch.isfinite(total)) else self._name(batch, type(algorithm).__name__)
        self._seen = []
        what = self._agree(what)
        self.agreed = what is not None
        if what is None:  # all is finite, or there are large numbers, whose sum is too large
            self._in_a_row = 0
            return True
        self._skip(what, step)
        return False

    def _gradient_norm(self) -> Tensor:
        gradients = [one.grad for one in self._model.parameters() if one.grad is not None]
        return whole(get_total_norm(gradients)) if gradients else torch.zeros(())

    def _skip(self, what: str, step: int) -> None:
        for name, parameter in self._model.named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                self.weights_lost = True
                raise NonFiniteError(
                    f"step {step}: {what}; and the weight {name} is not finite itself, so nothing can be learned any "
                    "more: go on from a checkpoint before it, with a lower learning_rate or max_grad_norm"
                )
        if self._ends:
            raise NonFiniteError(
                f"step {step}: {what} (on_nonfinite='raise'; 'skip' leaves the step's update out, and counts it)"
            )
        self.skipped += 1
        self._in_a_row += 1
        if self._in_a_row >= MOST_IN_A_ROW:
            raise NonFiniteError(
                f"step {step}: {what}. {self._in_a_row} updates in a row were skipped for a number that is not finite, "
                "so nothing is learned any more"
            )
        logger.warning("step %d: %s; the update of this step is skipped, all of it", step, what)
        self._skipped = True
        for parameter in self._model.parameters():
            parameter.grad = None
        self._hold_back()

    def _hold_back(self) -> None:
        """Neither clip nor step: accelerate's optimizer does not step between synchronizations."""
        self._held_back = True
        self._accelerator.gradient_state._set_sync_gradients(False)
        if self._skipped:  # else the schedule goes on
            self._mark_skipped(True)

    @property
    def held_back(self) -> bool:
        """Whether this step's update is not made."""
        return self._held_back

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Know the gradient scaler's scale before it steps."""
        scaler = self._accelerator.scaler
        self._scale = 0.0 if scaler is None or self._held_back else float(scaler.get_scale())

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A scaler that lowers its scale has skipped the update: of a fused optimizer accelerate does not see it."""
        scaler = self._accelerator.scaler
        if self._scale and scaler is not None and float(scaler.get_scale()) < self._scale:
            logger.info("step %d: the gradient scaler skips the update, and lowers its scale", state.global_step + 1)
            self._skipped = True
            self._mark_skipped(True)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count, and let the next step's update be made."""
        if self._held_back:
            self._accelerator.gradient_state._set_sync_gradients(True)
        if self._skipped:
            self._mark_skipped(False)
        self._report({SKIPPED: float(self._skipped)})
        self._held_back = self._skipped = False

    def _mark_skipped(self, skipped: bool) -> None:
        """Where accelerate reads whether the schedule goes on."""
        for optimizer in self._accelerator._optimizers:
            optimizer._is_overflow = skipped

    # -- what it was

    def _name(self, batch: Batch, algorithm: str) -> str | None:
        """The first number that is not finite, as words; None if all are."""
        for seen in sorted(self._seen, key=lambda one: one.packed.samples):
            for what, tensor in seen.inputs().items():
                if tensor is not None and not bool(torch.isfinite(tensor).all()):
                    first = int((~torch.isfinite(tensor)).nonzero()[0])
                    if not seen.packed.samples:
                        return f"{what} is {tensor[first].item()} in a row of padding"
                    index = seen.packed.samples[int(seen.packed.sample_index[first])]
                    return f"{what} is {tensor[first].item()} at trained token {first} of {_sample(batch, index)}"
            if not bool(torch.isfinite(seen.loss)):
                where = ", ".join(dict.fromkeys(_sample(batch, index) for index in seen.packed.samples))
                return f"the loss of {algorithm} is {seen.loss.item()} over {where}"
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
                return f"the gradient of {name} is not finite, of {algorithm}'s loss over {_groups(batch)}"
        if self.norm is not None and not bool(torch.isfinite(self.norm)):
            return f"the gradient's norm is {self.norm.item()}, of {algorithm}'s loss over {_groups(batch)}"
        return None


def _sample(batch: Batch, index: int) -> str:
    sample = batch.samples[index]
    return f"group {sample.group}" if sample.episode is None else episode_name(sample.episode)


def _groups(batch: Batch) -> str:
    names = list(dict.fromkeys(sample.group for sample in batch.samples))
    return "groups " + ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


class GuardedTrainer(StoppableTrainer):
    """``Trainer`` that neither clips nor unscales what a guard has held back."""

    guard: Guard

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return self.guard.norm if self.guard.held_back else super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if self.guard.held_back:
            return 0.0 if self.guard.norm is None else self.guard.norm.item()
        return super()._get_grad_norm(model, grad_norm)

    def save_on_the_way_out(self) -> None:
        """Weights that are not finite are not worth a checkpoint."""
        if not self.guard.weights_lost:
            super().save_on_the_way_out()
