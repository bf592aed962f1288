"""The teacher of self-distillation: the policy with weights of now, of a moving average, or of the beginning.

Before a round's first update it gives samples the prompts that the teacher reads; before each forward of the student it
gives what the divergence reads of the teacher. Consumes groups, samples and micro-batches; keeps the moving average.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import pstdev
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from envgrad.algorithms.base import TeacherPlan
from envgrad.algorithms.demonstrations import Reprompted
from envgrad.chat.base import Renderer
from envgrad.divergence import TeacherSignal
from envgrad.errors import ConfigurationError
from envgrad.head import is_plain
from envgrad.logprobs import install_policy_forward, policy_logprobs, predicting_states
from envgrad.packing import MicroBatch
from envgrad.sampling.limits import text_config
from envgrad.training.model import Reference, base_model
from envgrad.types import Group, TrainingSample

logger = logging.getLogger(__name__)

TEACHER_NAME = "teacher"
"""stem of the file in a checkpoint that holds a moving average"""

Autocast: TypeAlias = Callable[[], contextlib.AbstractContextManager[Any]]


class TeacherWeights(Protocol):
    """Whose weights the teacher has."""

    def active(self) -> contextlib.AbstractContextManager[nn.Module]:
        """The module to run, in evaluation mode; afterwards the policy is as it was."""
        ...


class Live:
    """The policy as it is."""

    def __init__(self, policy: nn.Module) -> None:
        self._policy = policy

    @contextlib.contextmanager
    def active(self) -> Iterator[nn.Module]:
        training = [module for module in self._policy.modules() if module.training]
        self._policy.eval()
        try:
            yield self._policy
        finally:
            for module in training:
                module.training = True


class MovingAverage(Live):
    """An exponential moving average of the policy's trained weights, beginning with those of now.

    ``active`` puts them in the policy's place for a while; what is not trained (a base under adapters) is shared. They
    are kept in float32 where the policy has fewer bits, in which a small step would be rounded away.

    Example:
        >>> policy = nn.Linear(1, 1, bias=False)
        >>> average = MovingAverage(policy)
        >>> with torch.no_grad():
        ...     _ = average.weights["weight"].fill_(0.0), policy.weight.fill_(1.0)
        >>> average.update(0.25)
        >>> with average.active() as teacher:
        ...     teacher.weight.item()
        0.25
        >>> policy.weight.item()
        1.0
    """

    def __init__(self, policy: nn.Module) -> None:
        super().__init__(policy)
        self._trained = {name: weight for name, weight in policy.named_parameters() if weight.requires_grad}
        self.weights = {
            name: weight.detach().to(torch.promote_types(weight.dtype, torch.float32), copy=True)
            for name, weight in self._trained.items()
        }

    @contextlib.contextmanager
    def active(self) -> Iterator[nn.Module]:
        students = {name: weight.data for name, weight in self._trained.items()}
        try:
            for name, weight in self._trained.items():
                weight.data = self.weights[name].to(weight)
            with super().active() as policy:
                yield policy
        finally:
            for name, weight in self._trained.items():
                weight.data = students[name]

    @torch.no_grad()
    def update(self, rate: float) -> None:
        """``average = (1 - rate) * average + rate * policy``."""
        for name, weight in self._trained.items():
            average = self.weights[name]
            average.lerp_(weight.to(average), rate)

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """
        Raises:
            ConfigurationError: they are of another model, or of other trained parameters.
        """
        different = sorted(set(weights) ^ set(self.weights))
        if different:
            raise ConfigurationError(
                f"the checkpoint's teacher has other trained parameters than the model, {different[0]!r} among them; "
                "resume with the model and adapters that it was written with"
            )
        for name, average in self.weights.items():
            average.copy_(weights[name])


@dataclass(slots=True)
class Diagnostics:
    """Warns of rounds that teach nothing: at the first in a row, and every ``interval`` of them."""

    interval: int
    """0: never"""
    tolerance: float
    """a deviation or share up to this counts as none"""
    counts: dict[str, int] = field(default_factory=dict)

    def observe(self, groups: Sequence[Group], metrics: Mapping[str, float]) -> None:
        rewards = [group.scored_rewards for group in groups if group.scored_rewards]
        every = [reward for of_group in rewards for reward in of_group]
        flat = not every or (pstdev(every) <= self.tolerance and all(pstdev(r) <= self.tolerance for r in rewards))
        self._count(flat, "all rewards of the round are equal: check that the task can be both solved and failed")
        self._count(
            metrics["self_distillation/reprompt_sample_fraction"] <= self.tolerance,
            "no sample has a teacher: no episode reached success_reward_threshold, and there was no feedback",
        )
        self._count(
            metrics["self_distillation/success_group_fraction"] <= self.tolerance,
            "no episode reached success_reward_threshold: lower it, or make tasks easier",
        )

    def _count(self, degenerate: bool, message: str) -> None:
        self.counts[message] = self.counts.get(message, 0) + 1 if degenerate else 0
        count = self.counts[message]
        if self.interval and degenerate and (count == 1 or count % self.interval == 0):
            logger.warning("self-distillation: %s (rounds in a row: %d)", message, count)


class Teacher(TrainerCallback):
    """One trainer's teacher.

    Args:
        plan: What the algorithm asks for.
        policy: The model that is trained, not wrapped, with a policy forward.
        renderer: Renders the teacher's prompts.
        temperature: Of sampling; the teacher's distribution has it too.
        autocast: The precision that the student's forward has.
    """

    def __init__(
        self,
        plan: TeacherPlan,
        policy: nn.Module,
        *,
        renderer: Renderer,
        temperature: float,
        autocast: Autocast = contextlib.nullcontext,
    ) -> None:
        self.plan = plan
        self.renderer = renderer
        self.temperature = temperature
        self._autocast = autocast
        self.average = MovingAverage(policy) if plan.kind == "ema" else None
        self._weights: TeacherWeights
        if self.average is not None:
            self._weights = self.average
        else:
            self._weights = Reference(policy) if plan.kind == "base" else Live(policy)
        with self._weights.active() as teacher:
            # Now: accelerate will wrap it for training, and a second one would go around its autocast.
            self._forward = install_policy_forward(base_model(teacher))
        self._max_context = longest_row(base_model(policy))
        self._diagnostics = Diagnostics(plan.warning_interval, plan.flat_tolerance)

    def reprompt(self, groups: Sequence[Group], samples: Sequence[TrainingSample]) -> Reprompted:
        """A round's samples with their teachers' prompts."""
        reprompted = self.plan.reprompting.apply(groups, samples, self.renderer, self._max_context)
        self._diagnostics.observe(groups, reprompted.metrics)
        return reprompted

    @torch.no_grad()
    def signal(self, packed: MicroBatch) -> TeacherSignal | None:
        """What the divergence of ``packed``'s tokens reads of the teacher; None where no sample has one.

        One forward of the teacher's rows. Not to be called inside autocast, which would keep the teacher's weights for
        the student.
        """
        if packed.teacher is None:
            return None
        divergence, rows, index = self.plan.divergence, packed.teacher.rows, packed.teacher.index
        with self._weights.active() as model, self._autocast():
            if not divergence.reads_distributions:
                logprobs = policy_logprobs(model, rows, temperature=self.temperature).logprobs
                return TeacherSignal(divergence=divergence, index=index, logprobs=logprobs)
            states = predicting_states(model, rows, temperature=self.temperature)
            temperature = self.temperature if rows.temperature is None else rows.temperature
            logits = self._head(states, temperature)
        return TeacherSignal(divergence=divergence, index=index, logits=logits)

    def _head(self, states: Tensor, temperature: float) -> Callable[[int, int], Tensor]:
        """The teacher's logits from its states, in pieces."""
        forward = self._forward
        if forward.path == "head":
            states = states.to(next(forward.head.parameters()).dtype)  # accelerate makes outputs float32
        if forward.path == "head" and isinstance(forward.head, nn.Linear) and is_plain(forward.head):
            weight = forward.head.weight.detach()  # the teacher's, also when the student's are back
            bias = None if forward.head.bias is None else forward.head.bias.detach()
            return lambda first, last: linear(states[first:last], weight, bias).float() / temperature

        def logits(first: int, last: int) -> Tensor:
            device = states.device.type
            # Autocast remembers casts of weights, and these change under it.
            cast = torch.autocast(device, enabled=torch.is_autocast_enabled(device), cache_enabled=False)
            with torch.no_grad(), self._weights.active(), cast:
                return forward.state_logits(states[first:last], temperature=temperature)

        return logits

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.average is not None and state.global_step % self.plan.sync_steps == 0:
            self.average.update(self.plan.update_rate)

    def extra_weights(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint keeps of the teacher."""
        return {} if self.average is None else {TEACHER_NAME: self.average.weights}

    def load(self, checkpoint: str | Path) -> None:
        """Go on with the teacher that ``checkpoint`` holds.

        Raises:
            ConfigurationError: it holds none, or another model's.
        """
        from safetensors.torch import load_file

        if self.average is None:
            return
        path = Path(checkpoint) / f"{TEACHER_NAME}.safetensors"
        if not path.exists():
            raise ConfigurationError(
                f"teacher_model_kind='ema', but {path} is missing: the checkpoint was written without a moving "
                "average; resume with the kind that it was written with"
            )
        self.average.load(load_file(path))


def longest_row(model: PreTrainedModel) -> int | None:
    """The most tokens that ``model`` has positions for; None if it does not say."""
    limit = getattr(text_config(model), "max_position_embeddings", None)
    return limit if isinstance(limit, int) else None
