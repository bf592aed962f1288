"""What an algorithm is: credit, weights and a loss. Everything else is the same for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

from envgrad.logprobs import EntropyMode
from envgrad.losses import LossInputs, LossOutputs
from envgrad.packing import StepTotals
from envgrad.types import Group, TrainingSample

EpisodeKey: TypeAlias = tuple[str, int]
"""``(task.key, sibling)``"""

ReferenceLogprobs: TypeAlias = Mapping[EpisodeKey, tuple[float, ...]]
"""The reference model's log-probs of each episode's sampled tokens, in order."""


class Algorithm(Protocol):
    """Groups -> samples with credit -> loss weights -> loss.

    In a training step::

        samples = algorithm.credit(groups, reference)           # reference: None unless credit_reads_reference
        totals = algorithm.totals(samples)                      # of the whole step
        batch = pack(samples, algorithm.weights(samples, totals), totals=totals,
            skip_zero_advantages=algorithm.skips_zero_advantages)   # empty: nothing to learn, no backward
        for micro_batch in batch.micro_batches:
            outputs = policy_logprobs(model, micro_batch, entropy=algorithm.entropy)
            algorithm.loss(LossInputs.of(micro_batch, outputs)).loss.backward()
    """

    @property
    def needs_reference(self) -> bool:
        """Whether ``loss`` reads a reference model's log-probs."""
        ...

    @property
    def credit_reads_reference(self) -> bool:
        """Whether ``credit`` reads the reference's log-probs too: a KL in the reward, as in RLOO."""
        ...

    @property
    def entropy(self) -> EntropyMode:
        """How ``loss`` uses entropies."""
        ...

    @property
    def skips_zero_advantages(self) -> bool:
        """Whether samples whose advantages are all 0 add nothing to the loss's gradient, so that none is forwarded."""
        ...

    def credit(self, groups: Sequence[Group], reference: ReferenceLogprobs | None = None) -> list[TrainingSample]:
        """A sample for each episode that can be scored, with an advantage on each of its sampled tokens."""
        ...

    def totals(self, samples: Sequence[TrainingSample]) -> StepTotals:
        """The denominators that ``samples`` contribute."""
        ...

    def weights(self, samples: Sequence[TrainingSample], totals: StepTotals | None = None) -> list[float]:
        """Each sample's loss weight, given the whole step's totals (these samples' own if None)."""
        ...

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """A micro-batch's share of the step's loss."""
        ...
