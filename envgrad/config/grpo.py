"""The configuration of GRPO and its losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from envgrad.algorithms.grpo import GRPO
from envgrad.config.checks import at_least, check_baseline, scale_name
from envgrad.config.rollout import RolloutConfig
from envgrad.errors import ConfigurationError


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

    # -- the KL to the reference
    beta: float = field(default=0.0, metadata={"help": "Weight of the KL to the reference; 0 loads no reference."})
    use_bias_correction_kl: bool = field(
        default=True,
        metadata={"help": "Multiply the KL estimate by the importance ratio, which unbiases its gradient."},
    )
    # -- credit
    scale_rewards: str = field(
        default="group", metadata={"help": "Divide advantages by the std of: group, batch, none."}
    )
    baseline: str = field(
        default="group",
        metadata={"help": "Compare an episode with its group, or its batch: where siblings do not share a task."},
    )
    multi_objective_aggregation: str = field(
        default="sum_then_normalize",
        metadata={"help": "sum_then_normalize, or normalize_then_sum: each reward by itself in its group (GDPO)."},
    )
    credit: str = field(
        default="episode", metadata={"help": "One advantage per episode, or turn: one per turn, from its return."}
    )
    turn_discount: float = field(
        default=1.0, metadata={"help": "What a turn's return counts of the next turn's, with credit='turn'."}
    )
    # -- the loss
    loss_type: str = field(default="dapo", metadata={"help": "grpo, dapo, bnpo, dr_grpo, cispo, sapo, luspo or vespo."})
    epsilon: float = field(default=0.2, metadata={"help": "Lower clip of the ratio: 1 - epsilon."})
    epsilon_high: float | None = field(
        default=None, metadata={"help": "Upper clip: 1 + epsilon_high; epsilon if None. For cispo the bound itself."}
    )
    delta: float | None = field(default=None, metadata={"help": "Cap on the ratio in the unclipped term (two-sided)."})
    importance_sampling_level: str = field(default="token", metadata={"help": "token (GRPO) or sequence (GSPO)."})
    sapo_temperature_pos: float = field(default=1.0, metadata={"help": "SAPO's gate where the advantage is positive."})
    sapo_temperature_neg: float = field(default=1.05, metadata={"help": "SAPO's gate elsewhere."})
    vespo_k_pos: float = field(default=2.0, metadata={"help": "VESPO's power of the ratio, advantage >= 0."})
    vespo_lambda_pos: float = field(default=3.0, metadata={"help": "VESPO's decay of the ratio, advantage >= 0."})
    vespo_k_neg: float = field(default=3.0, metadata={"help": "VESPO's power of the ratio, advantage < 0."})
    vespo_lambda_neg: float = field(default=2.0, metadata={"help": "VESPO's decay of the ratio, advantage < 0."})
    # -- which tokens learn
    mask_truncated_completions: bool = field(
        default=False, metadata={"help": "Leave truncated episodes out of the loss."}
    )
    off_policy_mask_threshold: float | None = field(
        default=None,
        metadata={
            "help": "Drop bad episodes that the policy has left by more than this mean log-prob; none by default."
        },
    )
    top_entropy_quantile: float = field(
        default=1.0, metadata={"help": "Share of a step's tokens that learn, those of the highest entropy; 1 is all."}
    )
    # -- entropy
    entropy_coef: float = field(default=0.0, metadata={"help": "Weight of the entropy bonus."})
    use_adaptive_entropy: bool = field(
        default=False, metadata={"help": "Move entropy_coef, so that the entropy stays above entropy_target."}
    )
    entropy_coef_min: float = field(default=0.0, metadata={"help": "Least adaptive entropy_coef."})
    entropy_coef_max: float = field(default=1.0, metadata={"help": "Largest adaptive entropy_coef."})
    entropy_coef_delta: float = field(default=0.005, metadata={"help": "Step of the adaptive entropy_coef."})
    entropy_target: float = field(
        default=0.2, metadata={"help": "Entropy per token, in nats, below which the adaptive bonus acts."}
    )

    def __post_init__(self) -> None:
        self.scale_rewards = scale_name(self.scale_rewards)
        super().__post_init__()
        at_least("num_generations", self.num_generations, 2, why="a group needs a sibling to compare with")
        check_baseline(self.baseline, self.dynamic_sampling)
        if self.loss_type == "vespo" and self.sampler_ratio_mode.startswith("sequence"):
            raise ConfigurationError(
                f"sampler_ratio_mode={self.sampler_ratio_mode!r} cannot act in loss_type='vespo', which multiplies the "
                "ratios of a sequence's tokens by itself; use token_truncate, token_mask or none"
            )
        self.algorithm()

    def algorithm(self) -> GRPO:
        """The algorithm that these fields describe; it checks them."""
        named = {f.name: getattr(self, f.name) for f in fields(GRPO) if f.init and f.name in _SHARED}
        algorithm = GRPO(**named, credit_level=self.credit)  # type: ignore[arg-type]
        # By position they are known once the reward functions are; the trainer tells them then.
        return algorithm.with_reward_weights(self.reward_weights if isinstance(self.reward_weights, Mapping) else {})


_SHARED = {f.name for f in fields(GRPOConfig)} - {"reward_weights"}
