"""The step stream: what a dataloader is elsewhere. Each item is one whole optimizer step.

::

    tasks --play--> Round --credit--> samples --split--> one optimizer step's samples --pack--> Batch

Consumes the task stream and the policy as it is when the item is asked for; produces one ``StepItem`` per optimizer
step; waits for the rollouts. ``num_iterations`` passes are made over each round before the next is played.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from envgrad.algorithms.base import Algorithm
from envgrad.environments.tasks import TaskStream
from envgrad.errors import TooManyFailures
from envgrad.packing import Batch, PackMode, pack
from envgrad.rollout.group import GroupPolicy
from envgrad.rollout.runner import RolloutRunner, Round
from envgrad.training.prepare import Preparation
from envgrad.types import Group, TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class StepItem:
    """One optimizer step: its packed samples, and the round it came from if this step is the round's first."""

    batch: Batch
    played: Round | None
    iteration: int
    """0 on the first pass over the round's samples"""
    seconds: dict[str, float]
    """wall-clock seconds that the round took, on its first step: rollout, pack"""

    def without_episodes(self) -> StepItem:
        """The same step as tensors and numbers only."""
        samples = tuple(replace(sample, episode=None) for sample in self.batch.samples)
        return replace(self, batch=replace(self.batch, samples=samples), played=None)


@dataclass(slots=True, kw_only=True)
class StepStream:
    """Yields ``StepItem``s for ever, or until the tasks end. Iterating plays rollouts in the caller's thread."""

    tasks: TaskStream
    runner: RolloutRunner
    policy: GroupPolicy
    algorithm: Algorithm
    episodes_per_round: int
    episodes_per_step: int
    num_iterations: int
    max_tokens: int | None
    pack_mode: PackMode
    prepare: Preparation
    """what a round's batches need before its first update: old and reference log-probs"""
    publish: Callable[[], None]
    """called before each round, so that the sampler serves the weights of now"""
    group_limit: int | None = None
    """tasks drawn in the whole run, where epochs bound it"""
    pending: deque[StepItem] = field(default_factory=deque)
    """what is left of the round that was played last; a checkpoint within a round carries it"""

    def __iter__(self) -> Iterator[StepItem]:
        while self.pending or self._play_round():
            yield self.pending.popleft()

    def _play_round(self) -> bool:
        """Fill ``pending`` from a new round; whether there was one."""
        began = time.perf_counter()
        self.publish()
        before = self.tasks.state_dict()
        try:
            played = self._play()
        except TooManyFailures:
            self.tasks.load_state_dict(before)  # a checkpoint saved now, and resumed, plays this round anew
            raise
        if not played.groups:
            return False
        seconds = {"rollout": time.perf_counter() - began}
        began = time.perf_counter()
        batches = [self.prepare.batch(self._pack(samples)) for samples in self._steps(played)]
        seconds["pack"] = time.perf_counter() - began
        for iteration in range(self.num_iterations):
            for index, batch in enumerate(batches):
                first = iteration == index == 0
                self.pending.append(
                    StepItem(
                        batch=batch,
                        played=played if first else None,
                        iteration=iteration,
                        seconds=seconds if first else {},
                    )
                )
        return True

    def _play(self) -> Round:
        count = self.episodes_per_round // self.policy.num_generations
        if self.group_limit is not None:
            left = self.group_limit - self.tasks.position
            return self.runner.play(self.tasks, min(count, left), self.policy, left) if left > 0 else Round(groups=())
        return self.runner.play(self.tasks, count, self.policy)

    def _steps(self, played: Round) -> list[list[TrainingSample]]:
        reference = None
        if self.algorithm.credit_reads_reference:
            reference = self.prepare.reference_logprobs(played.groups, self.pack_mode, self.max_tokens)
        samples = self.algorithm.credit(played.groups, reference)
        return split_round(played.groups, samples, self.episodes_per_step, self.policy.num_generations)

    def _pack(self, samples: Sequence[TrainingSample]) -> Batch:
        totals = self.algorithm.totals(samples)
        return pack(
            samples,
            self.algorithm.weights(samples, totals),
            totals=totals,
            max_tokens=self.max_tokens,
            mode=self.pack_mode,
            skip_zero_advantages=self.algorithm.skips_zero_advantages,
        )


def split_round(
    groups: Sequence[Group], samples: Sequence[TrainingSample], episodes_per_step: int, num_generations: int
) -> list[list[TrainingSample]]:
    """Cut a round's samples into optimizer steps of ``episodes_per_step`` episodes, in group order.

    Places are counted by group and sibling, so that a dropped episode leaves its step smaller and shifts no other. A
    step that lost all its samples is kept, empty: the step counts.
    """
    if not groups:
        return []
    place = {group.task.key: index * num_generations for index, group in enumerate(groups)}
    total = len(groups) * num_generations
    steps: list[list[TrainingSample]] = [[] for _ in range(-(-total // episodes_per_step))]
    for sample in samples:
        sibling = sample.episode.sibling if sample.episode is not None else 0
        steps[(place[sample.group] + sibling) // episodes_per_step].append(sample)
    return steps
