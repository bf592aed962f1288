"""The configuration of RLOO."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from envgrad.algorithms.rloo import RLOO
from envgrad.config.checks import at_least, check_baseline
from envgrad.config.rollout import RolloutConfig
from envgrad.errors import ConfigurationError


@dataclass
class RLOOConfig(RolloutConfig):
    """REINFORCE with a leave-one-out baseline (https://arxiv.org/abs/2402.14740).

    Raises:
        ConfigurationError: a value that cannot work, named with the rule and the fix.

    Example:
        >>> RLOOConfig(output_dir="runs/doc", max_steps=5, reward_clip_range=(-1, 1)).algorithm().beta
        0.05
    """

    num_generations: int = field(default=2, metadata={"help": "Episodes per group (siblings of one task)."})
    beta: float = field(
        default=0.05, metadata={"help": "Weight of the KL to the reference in the reward; 0 loads no reference."}
    )
    epsilon: float = field(default=0.2, metadata={"help": "Lower clip of the sequence's ratio: 1 - epsilon."})
    epsilon_high: float | None = field(
        default=None, metadata={"help": "Upper clip: 1 + epsilon_high; epsilon if None."}
    )
    normalize_advantages: bool = field(
        default=False, metadata={"help": "Standardise advantages over each round of rollouts."}
    )
    reward_clip_range: tuple[float, float] | None = field(
        default=None, metadata={"help": "Clip rewards to (low, high) before the KL is taken off."}
    )
    baseline: str = field(
        default="group",
        metadata={"help": "Leave one out of its group, or its batch: where siblings do not share a task."},
    )
    mask_truncated_completions: bool = field(
        default=False, metadata={"help": "Leave truncated episodes out of the loss."}
    )
    sampler_ratio_mode: str = field(
        default="sequence_truncate",
        metadata={"help": "sequence_truncate or sequence_mask of old/sampler; none corrects nothing."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("num_generations", self.num_generations, 2, why="the baseline is the mean of the siblings")
        check_baseline(self.baseline, self.dynamic_sampling)
        if self.sampler_ratio_mode.startswith("token"):
            raise ConfigurationError(
                f"sampler_ratio_mode={self.sampler_ratio_mode!r} cannot act in RLOO, whose ratio is of whole "
                "sequences; use sequence_truncate, sequence_mask or none"
            )
        if self.reward_clip_range is not None:
            self.reward_clip_range = _pair(self.reward_clip_range)
        self.algorithm()

    def algorithm(self) -> RLOO:
        """The algorithm that these fields describe; it checks them."""
        return RLOO(**{f.name: getattr(self, f.name) for f in fields(RLOO)})


def _pair(value: Any) -> tuple[float, float]:
    """From a tuple or list, as the command line and YAML give one."""
    try:
        low, high = (float(bound) for bound in value)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"reward_clip_range={value!r} must be two numbers (low, high)") from error
    return low, high
