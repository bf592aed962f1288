"""The step stream: what a dataloader is elsewhere. Each item is one whole optimizer step.

::

    tasks --play--> Round --credit--> samples --split--> one optimizer step's samples --pack--> Batch

Consumes the task stream and the policy as it is when the item is asked for; produces one ``StepItem`` per optimizer
step; waits for the rollouts. ``num_iterations`` passes are made over each round before the next is played.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from envgrad.algorithms.base import Algorithm
from envgrad.environments.tasks import TaskStream
from envgrad.packing import Batch, PackMode, pack
from envgrad.rollout.group import GroupPolicy
from envgrad.rollout.runner import RolloutRunner, Round
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
    prepare: Callable[[Batch], Batch]
    """called on each of a round's batches before its first update: old and reference log-probs"""
    publish: Callable[[], None]
    """called before each round, so that the sampler serves the weights of now"""
    group_limit: int | None = None
    """groups of the whole run, where epochs bound it"""

    def __iter__(self) -> Iterator[StepItem]:
        while True:
            began = time.perf_counter()
            self.publish()
            played = self._play()
            if not played.groups:
                return
            seconds = {"rollout": time.perf_counter() - began}
            began = time.perf_counter()
            batches = [self.prepare(self._pack(samples)) for samples in self._steps(played)]
            seconds["pack"] = time.perf_counter() - began
            for iteration in range(self.num_iterations):
                for index, batch in enumerate(batches):
                    first = iteration == index == 0
                    yield StepItem(
                        batch=batch,
                        played=played if first else None,
                        iteration=iteration,
                        seconds=seconds if first else {},
                    )

    def _play(self) -> Round:
        count = self.episodes_per_round // self.policy.num_generations
        if self.group_limit is not None:
            count = min(count, self.group_limit - self.tasks.position)
        return self.runner.play(self.tasks, count, self.policy) if count > 0 else Round(groups=())

    def _steps(self, played: Round) -> list[list[TrainingSample]]:
        samples = self.algorithm.credit(played.groups)
        return split_round(played.groups, samples, self.episodes_per_step, self.policy.num_generations)

    def _pack(self, samples: Sequence[TrainingSample]) -> Batch:
        return pack(
            samples,
            self.algorithm.weights(samples),
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
