"""The configuration of GRPO and its losses."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from envgrad.algorithms.grpo import GRPO
from envgrad.config.checks import at_least
from envgrad.config.rollout import RolloutConfig


@dataclass
class GRPOConfig(RolloutConfig):
    """Group Relative Policy Optimization (https://arxiv.org/abs/2402.03300) and its losses.

    Raises:
        ConfigurationError: a value that cannot work, named with the rule and the fix.

    Example:
        >>> GRPOConfig(output_dir="runs/doc", num_generations=1)
        Traceback (most recent call last):
        envgrad.errors.ConfigurationError: num_generations=1 must be at least 2; a group needs a sibling to compare with
    """

    beta: float = field(default=0.0, metadata={"help": "Weight of the KL to the reference; 0 loads no reference."})
    use_bias_correction_kl: bool = field(
        default=True,
        metadata={"help": "Multiply the KL estimate by the importance ratio, which unbiases its gradient."},
    )
    epsilon: float = field(default=0.2, metadata={"help": "Lower clip of the ratio: 1 - epsilon."})
    epsilon_high: float | None = field(
        default=None, metadata={"help": "Upper clip: 1 + epsilon_high; epsilon if None."}
    )
    delta: float | None = field(default=None, metadata={"help": "Cap on the ratio in the unclipped term (two-sided)."})
    importance_sampling_level: str = field(default="token", metadata={"help": "token (GRPO) or sequence (GSPO)."})
    scale_rewards: str | bool = field(
        default="group", metadata={"help": "Divide advantages by the std of: group, batch, none."}
    )
    loss_type: str = field(default="dapo", metadata={"help": "grpo, dapo, bnpo, dr_grpo or cispo."})
    mask_truncated_completions: bool = field(
        default=False, metadata={"help": "Leave truncated episodes out of the loss."}
    )
    entropy_coef: float = field(default=0.0, metadata={"help": "Weight of the entropy bonus."})
    sampler_ratio_cap: float = field(
        default=3.0, metadata={"help": "Truncation of old/sampler where the sampler's log-probs are not exact."}
    )

    def __post_init__(self) -> None:
        if isinstance(self.scale_rewards, bool):
            self.scale_rewards = "group" if self.scale_rewards else "none"
        super().__post_init__()
        at_least("num_generations", self.num_generations, 2, why="a group needs a sibling to compare with")
        at_least("sampler_ratio_cap", self.sampler_ratio_cap, 1)
        self.algorithm()

    def algorithm(self) -> GRPO:
        """The algorithm that these fields describe; it checks them."""
        return GRPO(**{f.name: getattr(self, f.name) for f in fields(GRPO)})
