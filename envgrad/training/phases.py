"""Where a step's time goes, and how much of it the model's own work is.

A step lasts from the moment when its item is asked for until all callbacks have seen its end. Its wall clock is cut, so
that phases add up to it and shares to 1::

    publish | reset, prefill, decode, tools, reward | packing | logprobs | forward_backward | optimizer     rest: idle

While a round is played the main thread waits, and the time is cut by what it waits for (``rollout.activity``): a moment
in which the sampler's model runs is ``prefill`` or ``decode``, whatever environments do beside it; any other moment is
shared by the episodes that are in ``reset``, ``tools`` or ``reward``. So ``time/tools`` is what tools cost the run, and
``episode_seconds/tools`` is what they took, summed over episodes. ``logprobs`` are passes without gradient for old and
reference log-probs. ``optimizer`` holds gradient clipping too. ``idle`` is all else: logs of episodes, callbacks,
chat templates, threads that wake each other. What is done between two steps (evaluation, checkpoints, logging) is
``time/between``, and no part of the step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from envgrad.rollout.activity import ROLLOUT_PHASES
from envgrad.rollout.runner import Round
from envgrad.training.flops import ModelCost, Work, matmul_rate, wait_for

if TYPE_CHECKING:
    from envgrad.training.stream import StepItem

PHASES = ("publish", *ROLLOUT_PHASES, "packing", "logprobs", "forward_backward", "optimizer", "idle")


class Laps:
    """Cuts time into phases: each lap is the time since the last one.

    Example:
        >>> now = iter([0.0, 2.0, 3.0, 7.0])
        >>> laps = Laps(clock=lambda: next(now))
        >>> laps.lap("packing"); laps.lap("idle"); laps.lap("packing")
        >>> laps.seconds
        {'packing': 6.0, 'idle': 1.0}
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._mark = clock()

    @property
    def mark(self) -> float:
        """When the last lap ended."""
        return self._mark

    def lap(self, phase: str) -> None:
        """The time since the last lap was ``phase``."""
        self.split({}, rest=phase)

    def split(self, parts: Mapping[str, float], *, rest: str) -> None:
        """The time since the last lap was ``parts``, and what is left of it ``rest``."""
        now = self._clock()
        left = now - self._mark - math.fsum(parts.values())
        self._mark = now
        for phase, seconds in (*parts.items(), (rest, max(0.0, left))):
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds


def phase_shares(metrics: Mapping[str, float]) -> dict[str, float]:
    """``share/<phase>`` of averaged ``time/<phase>``: what each phase had of all the time that is averaged over.

    Example:
        >>> phase_shares({"time/decode": 3.0, "time/idle": 1.0, "time/rollout": 3.5})
        {'share/decode': 0.75, 'share/idle': 0.25}
    """
    seconds = {phase: metrics[f"time/{phase}"] for phase in PHASES if f"time/{phase}" in metrics}
    total = math.fsum(seconds.values())
    return {f"share/{phase}": value / total for phase, value in seconds.items()} if total > 0 else {}


def rollout_tokens(played: Round, cost: ModelCost | None, rate: float | None) -> dict[str, float]:
    """How many tokens a round sampled and forwarded, how many it had to, and how fast.

    ``tokens/rollout_unique`` counts a group's prompt once and every other token of its rows once, if an answer follows
    it. Rounds that the sampler's model had no part in have no such numbers.
    """
    forwarded = played.activity.forwarded_tokens
    if not forwarded or played.seconds <= 0:
        return {}
    groups = (*played.groups, *played.filtered, *played.dropped)
    work = Work.of_groups(groups)
    episodes = [episode for group in groups for whole in group.episodes for episode in (whole, *whole.parts)]
    sampled = sum(episode.num_sampled_tokens for episode in episodes)
    metrics = {
        "tokens/rollout_forwarded": float(forwarded),
        "tokens/rollout_unique": float(work.tokens),
        "tokens_per_second/sampled": sampled / played.seconds,
        "tokens_per_second/rollout_forwarded": forwarded / played.seconds,
    }
    if work.tokens:
        metrics["tokens/rollout_forwarded_ratio"] = forwarded / work.tokens
    if cost is not None and rate is not None:
        metrics["mfu/rollout"] = cost.forward(work) / (played.seconds * rate)
    return metrics


def training_flops(item: StepItem, cost: ModelCost) -> int:
    """Operations of a step's forward and backward, the teacher's forwards included."""
    teachers = [packed.teacher.rows for packed in item.batch.micro_batches if packed.teacher is not None]
    read = sum((Work.of_packed(rows) for rows in teachers), Work())
    return cost.training(Work.of_batch(item.batch)) + cost.forward(read)


def training_tokens(item: StepItem, seconds: float, cost: ModelCost | None, rate: float | None) -> dict[str, float]:
    """How many tokens a step trained and forwarded in ``seconds``, and how many it had to.

    ``tokens/unique`` counts a group's prompt once and every other token of its rows once, if a trained token follows.
    """
    batch = item.batch
    unique, forwarded = Work.of_batch(batch).tokens, batch.num_forwarded_tokens
    metrics = {
        "tokens/trained": float(batch.num_tokens),
        "tokens/forwarded": float(forwarded),
        "tokens/unique": float(unique),
    }
    if unique:
        metrics["tokens/forwarded_ratio"] = forwarded / unique
    if unique and seconds > 0:
        metrics["tokens_per_second/forwarded"] = forwarded / seconds
        if cost is not None and rate is not None:
            metrics["mfu/train"] = training_flops(item, cost) / (seconds * rate)
    return metrics


class PhaseReport(TrainerCallback):
    """Times the steps of a training loop and tells ``record`` each step's numbers.

    Args:
        record: Is given a step's metrics when it has ended.
        cost: The model's, for utilization; None leaves that out.
        device: Where it runs.
        dtype: What its matrix products are computed in.
        devices: How many share a step.
        clock: Seconds, always growing.
    """

    def __init__(
        self,
        record: Callable[[dict[str, float]], None],
        *,
        cost: ModelCost | None,
        device: torch.device,
        dtype: torch.dtype,
        devices: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.cost = cost
        self._devices = devices
        self._record = record
        self._device = device
        self._dtype = dtype
        self._clock = clock
        self._laps = Laps(clock=clock)
        self._ended: float | None = None
        self._between = 0.0
        self._item: StepItem | None = None

    def begin(self) -> None:
        """The step's item is asked for."""
        self._laps = Laps(clock=self._clock)
        self._between = 0.0 if self._ended is None else self._laps.mark - self._ended
        self._item = None

    def fetched(self, item: StepItem) -> None:
        """The item is there."""
        self._item = item
        self._laps.split(item.seconds, rest="idle")

    def recorded(self) -> None:
        """The round has been logged; forward and backward begin."""
        self._laps.lap("idle")

    def trained(self) -> None:
        """Forward and backward are done."""
        wait_for(self._device)
        self._laps.lap("forward_backward")

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._ended = None

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        wait_for(self._device)
        self._laps.lap("optimizer")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._laps.lap("idle")
        if self._item is not None:
            self._record(self._metrics(self._item))
        self._item = None
        self._ended = self._laps.mark

    def _metrics(self, item: StepItem) -> dict[str, float]:
        seconds = dict.fromkeys(PHASES, 0.0) | self._laps.seconds
        rate = None if self.cost is None else self._devices * matmul_rate(self._device, self._dtype)
        metrics = {f"time/{phase}": value for phase, value in seconds.items()}
        metrics["time/step"] = math.fsum(seconds.values())
        metrics["time/between"] = self._between
        metrics |= training_tokens(item, seconds["forward_backward"], self.cost, rate)
        if item.played is not None:
            metrics["time/rollout"] = item.played.seconds
            metrics |= {
                f"episode_seconds/{kind}": value for kind, value in item.played.activity.episode_seconds.items()
            }
            metrics |= rollout_tokens(item.played, self.cost, rate)
        return metrics


def phase_report(
    model: PreTrainedModel, args: TrainingArguments, record: Callable[[dict[str, float]], None]
) -> PhaseReport:
    """The report of a run that trains ``model``, which is on its device, with its adapters."""
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else model.dtype
    return PhaseReport(
        record, cost=ModelCost.of(model), device=args.device, dtype=dtype, devices=max(1, args.world_size)
    )
