"""What an algorithm is: credit, weights and a loss. Everything else is the same for all of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from envgrad.algorithms.demonstrations import Reprompting
from envgrad.divergence import Divergence
from envgrad.logprobs import EntropyMode
from envgrad.losses import LossInputs, LossOutputs
from envgrad.packing import StepTotals
from envgrad.types import Group, TrainingSample

EpisodeKey: TypeAlias = tuple[str, int]
"""``Episode.key``"""

ReferenceLogprobs: TypeAlias = Mapping[EpisodeKey, tuple[float, ...]]
"""The reference model's log-probs of each episode's sampled tokens, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherPlan:
    """The teacher that an algorithm distils from: the policy itself, told more than the student."""

    kind: Literal["live", "ema", "base"]
    """the policy's weights of now, a moving average of them, or the first ones"""
    update_rate: float
    """of the moving average"""
    sync_steps: int
    divergence: Divergence
    reprompting: Reprompting
    warning_interval: int
    """rounds in a row that teach nothing between two warnings; 0 warns of none"""
    flat_tolerance: float
    """up to this, a deviation of rewards or a share of samples counts as none"""


@runtime_checkable
class Algorithm(Protocol):
    """Groups -> samples with credit -> loss weights -> loss.

    Subclass it: four methods have to be written (``credit``, ``totals``, ``weights``, ``loss``); all else has defaults.
    In a training step::

        samples = algorithm.credit(groups, reference)           # reference: None unless credit_reads_reference
        totals = algorithm.totals(samples)                      # of the whole step
        batch = pack(samples, algorithm.weights(samples, totals), totals=totals,
            skip_zero_advantages=algorithm.skips_zero_advantages)   # empty: nothing to learn, no backward
        for micro_batch in batch.micro_batches:
            outputs = policy_logprobs(model, micro_batch, entropy=algorithm.entropy)
            algorithm.loss(LossInputs.of(micro_batch, outputs)).loss.backward()
        algorithm.after_step(metrics)
    """

    __slots__ = ()

    @property
    def compares_siblings(self) -> bool:
        """Whether ``credit`` takes the siblings of a group for episodes of one task, as all baselines of a group do."""
        return True

    @property
    def needs_reference(self) -> bool:
        """Whether ``loss`` reads a reference model's log-probs."""
        return False

    @property
    def credit_reads_reference(self) -> bool:
        """Whether ``credit`` reads the reference's log-probs too: a KL in the reward, as in RLOO."""
        return False

    @property
    def entropy(self) -> EntropyMode:
        """How ``loss`` uses entropies."""
        return "metric"

    @property
    def skips_zero_advantages(self) -> bool:
        """Whether samples whose advantages are all 0 add nothing to the loss's gradient, so that none is forwarded."""
        return False

    @property
    def top_entropy_quantile(self) -> float:
        """Share of a step's tokens, those of the highest entropy, whose surrogate counts; below 1 they are
        ``LossInputs.selected``."""
        return 1.0

    @property
    def teacher(self) -> TeacherPlan | None:
        """The teacher whose divergence ``loss`` reads (``LossInputs.distillation``); None without one."""
        return None

    @abstractmethod
    def credit(self, groups: Sequence[Group], reference: ReferenceLogprobs | None = None) -> list[TrainingSample]:
        """A sample for each episode that can be scored, with an advantage on each of its sampled tokens."""
        ...

    @abstractmethod
    def totals(self, samples: Sequence[TrainingSample]) -> StepTotals:
        """The denominators that ``samples`` contribute."""
        ...

    @abstractmethod
    def weights(self, samples: Sequence[TrainingSample], totals: StepTotals | None = None) -> list[float]:
        """Each sample's loss weight, given the whole step's totals (these samples' own if None)."""
        ...

    @abstractmethod
    def loss(self, inputs: LossInputs) -> LossOutputs:
        """A micro-batch's share of the step's loss."""
        ...

    def with_reward_weights(self, weights: Mapping[str, float]) -> Algorithm:
        """This algorithm, told what each reward component weighs by name (1 where none is given).

        ``Episode.reward`` is weighted already; only a credit that reads components or turn rewards needs them.
        """
        return self

    def after_step(self, metrics: Mapping[str, float]) -> None:
        """Called after each optimizer step that had a backward, with the step's merged loss metrics."""
        return None

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint must keep of the algorithm itself."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Take up what ``state_dict`` gave."""
        return None
