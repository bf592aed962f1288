"""The step stream: what a dataloader is elsewhere. Each item is one whole optimizer step.

::

    tasks --rounds--> Round --credit--> samples --split--> one optimizer step's samples --pack--> Batch

Consumes rounds, played inline or beside the training (``rounds``, ``producer``); produces one ``StepItem`` per
optimizer step; waits for the rollouts. ``num_iterations`` passes are made over each round before the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from envgrad.algorithms.base import Algorithm, EpisodeKey, ReferenceLogprobs
from envgrad.algorithms.credit import with_parts
from envgrad.algorithms.demonstrations import Reprompted
from envgrad.distributed.dealing import limit_for
from envgrad.packing import Batch, PackMode, pack
from envgrad.rollout.group import GroupPolicy
from envgrad.rollout.runner import Round
from envgrad.training.phases import Laps
from envgrad.training.prepare import Preparation
from envgrad.training.rounds import RoundSource, RoundsState
from envgrad.types import Group, TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class StepItem:
    """One optimizer step: its packed samples, and the round it came from if this step is the round's first."""

    batch: Batch
    played: Round | None
    iteration: int
    """0 on the first pass over the round's samples"""
    seconds: dict[str, float]
    """wall-clock seconds of the round's phases (``phases.PHASES``), on its first step"""
    metrics: dict[str, float] = field(default_factory=dict)
    """what the round's credit tells, on its first step"""


@dataclass(slots=True, kw_only=True)
class StepStream:
    """Yields ``StepItem``s for ever, or until the tasks end. Iterating waits for rollouts."""

    rounds: RoundSource
    """plays rounds, each with the weights of now or of few publishes ago"""
    policy: GroupPolicy
    algorithm: Algorithm
    episodes_per_step: int
    num_iterations: int
    max_tokens: int | None
    pack_mode: PackMode
    prepare: Preparation
    """what a round's batches need before its first update: old and reference log-probs"""
    preferred_tokens: int | None = None
    """what ``pack`` gathers groups up to"""
    ranks: int = 1
    """processes that share a step's micro-batches"""
    temperatures: Mapping[str, float] = field(default_factory=dict)
    """environments that are sampled at a temperature of their own"""
    reprompt: Callable[[Sequence[Group], Sequence[TrainingSample]], Reprompted] | None = None
    """gives samples the prompts that a teacher reads"""
    metrics: dict[str, float] = field(default_factory=dict)
    """what the last round's credit told"""
    pending: deque[StepItem] = field(default_factory=deque)
    """what is left of the round that was played last; a checkpoint within a round carries it"""

    def __iter__(self) -> Iterator[StepItem]:
        while self.fill():
            yield self.pending.popleft()

    def fill(self) -> bool:
        """Wait for a round if none is in hand; False where the tasks have ended."""
        if self.pending:
            return True
        got = self._next_round()
        self.rounds.keep()
        return got

    def state(self) -> RoundsState:
        """From where a resumed run goes on. A round that is not in hand yet is not given out yet, all of it."""
        if self.pending:
            self.rounds.keep()
        return self.rounds.state()

    def _next_round(self) -> bool:
        """Fill ``pending`` from a new round, at once; whether there was one."""
        laps = Laps()
        played = self.rounds.next(laps)
        if not played.groups:
            return False
        hot = {group.task.key: self.temperatures.get(group.task.environment) for group in played.groups}
        reference = self._reference_logprobs(played)
        laps.lap("logprobs")
        batches = []
        for samples in self._steps(played, reference):
            packed = self._pack(samples, hot)
            laps.lap("packing")
            batches.append(self.prepare.batch(packed))
            laps.lap("logprobs")
        items = []
        for iteration in range(self.num_iterations):
            for index, batch in enumerate(batches):
                first = iteration == index == 0
                items.append(
                    StepItem(
                        batch=batch,
                        played=played if first else None,
                        iteration=iteration,
                        seconds=laps.seconds if first else {},
                        metrics=self.metrics | dict(self.rounds.metrics) if first else {},
                    )
                )
        self.pending.extend(items)
        return True

    def _reference_logprobs(self, played: Round) -> ReferenceLogprobs | None:
        """What the credit reads of the reference; None if it reads nothing."""
        if not self.algorithm.credit_reads_reference:
            return None
        reference: dict[EpisodeKey, tuple[float, ...]] = {}
        for temperature in {self.temperatures.get(group.task.environment): None for group in played.groups}:
            own = [one for one in played.groups if self.temperatures.get(one.task.environment) == temperature]
            reference |= self.prepare.reference_logprobs(with_parts(own), self.pack_mode, self.max_tokens, temperature)
        return reference

    def _steps(self, played: Round, reference: ReferenceLogprobs | None) -> list[list[TrainingSample]]:
        samples = self.algorithm.credit(with_parts(played.groups), reference)
        if self.reprompt is not None:
            reprompted = self.reprompt(played.groups, samples)
            samples, self.metrics = reprompted.samples, dict(reprompted.metrics)
        return split_round(played.groups, samples, self.episodes_per_step, self.policy)

    def _pack(self, samples: Sequence[TrainingSample], temperatures: Mapping[str, float | None]) -> Batch:
        """One step's samples; those of one temperature (by group, None for the run's) share micro-batches."""
        totals = self.algorithm.totals(samples)
        weights = self.algorithm.weights(samples, totals)
        own = [temperatures[sample.group] for sample in samples]
        limit, preferred = self.max_tokens, self.preferred_tokens
        if self.ranks > 1:
            limit = limit_for(samples, self.ranks, limit)
            preferred = limit if preferred is None else min(preferred, limit)
        parts = []
        for temperature in dict.fromkeys(own) or (None,):
            part = pack(
                samples,
                # Weight 0 leaves a sample out, and keeps its number.
                [weight if at == temperature else 0.0 for weight, at in zip(weights, own, strict=True)],
                totals=totals,
                max_tokens=limit,
                preferred_tokens=preferred,
                mode=self.pack_mode,
                skip_zero_advantages=self.algorithm.skips_zero_advantages,
            )
            if temperature is not None:
                part = replace(part, micro_batches=tuple(one.at_temperature(temperature) for one in part.micro_batches))
            parts.append(part)
        return replace(
            parts[0],
            micro_batches=tuple(one for part in parts for one in part.micro_batches),
            num_required_tokens=sum(part.num_required_tokens for part in parts),
        )


def split_round(
    groups: Sequence[Group], samples: Sequence[TrainingSample], episodes_per_step: int, policy: GroupPolicy
) -> list[list[TrainingSample]]:
    """Cut a round's samples into optimizer steps of ``episodes_per_step`` episodes, in group order.

    Places are counted by group and sibling, so that a dropped episode leaves its step smaller and shifts no other. A
    step that lost all its samples is kept, empty: the step counts. Where environments have group sizes of their own,
    every group counts as ``num_generations`` episodes, and a step holds whole groups.
    """
    if not groups:
        return []
    place = {group.task.key: index * policy.num_generations for index, group in enumerate(groups)}
    total = len(groups) * policy.num_generations
    steps: list[list[TrainingSample]] = [[] for _ in range(-(-total // episodes_per_step))]
    for sample in samples:
        sibling = sample.episode.sibling if sample.episode is not None and not policy.sizes else 0
        steps[(place[sample.group] + sibling) // episodes_per_step].append(sample)
    return steps
