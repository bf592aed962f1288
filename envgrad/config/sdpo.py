"""The configuration of SDPO."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from envgrad.algorithms.demonstrations import (
    FEEDBACK_TEMPLATE,
    REPROMPT_TEMPLATE,
    SOLUTION_TEMPLATE,
    Reprompting,
)
from envgrad.algorithms.grpo import GRPO
from envgrad.algorithms.sdpo import SDPO
from envgrad.config.checks import at_least, scale_name
from envgrad.config.rollout import RolloutConfig
from envgrad.divergence import Divergence
from envgrad.errors import ConfigurationError

SDPO_REFUSED: dict[str, tuple[object, str]] = {
    "max_prompt_length": (
        None,
        "cutting the beginning of a prompt would change what was asked; set max_context, which drops an episode that "
        "does not fit",
    ),
    "use_teacher_server": (False, "the teacher runs in the trainer's process; remove it"),
}
"""trl's fields that cannot act here: the value that asks for nothing, and what to do instead."""


@dataclass
class SDPOConfig(RolloutConfig):
    """Self-distillation policy optimization (https://arxiv.org/abs/2601.20802). Names and defaults are trl's.

    Feedback comes from the environment: ``get_feedback()``, else the row's ``privileged_context``, else what the tools
    answered to a failed attempt.

    Raises:
        ConfigurationError: a value that cannot work, named with the rule and the fix.

    Example:
        >>> SDPOConfig(output_dir="runs/doc", distillation_mode="topk_logits")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        envgrad.errors.ConfigurationError: distillation_topk=None must be at least 1 for ...
    """

    max_completion_length: int = field(
        default=256, metadata={"help": "Tokens of the whole episode after its prompt, tool results included."}
    )
    disable_dropout: bool = field(default=True, metadata={"help": "Set every dropout of the policy to 0."})
    # -- distillation
    distillation_weight: float = field(
        default=1.0, metadata={"help": "Share of the distillation in the loss; the rest is the policy's (GRPO)."}
    )
    distillation_mode: str = field(
        default="sampled_token", metadata={"help": "Divergence over: sampled_token, full_logits or topk_logits."}
    )
    distillation_alpha: float = field(
        default=1.0, metadata={"help": "0 forward KL, 1 reverse KL, between them a generalized Jensen-Shannon."}
    )
    distillation_topk: int | None = field(
        default=None, metadata={"help": "Tokens of topk_logits: those likeliest under the student."}
    )
    distillation_add_tail: bool = field(
        default=False, metadata={"help": "One more bucket for all other tokens in topk_logits."}
    )
    distillation_is_clip: float | None = field(
        default=2.0, metadata={"help": "Cap on the ratio to the policy that sampled; None leaves the ratio out."}
    )
    # -- the teacher
    teacher_model_kind: str = field(
        default="ema", metadata={"help": "live (weights of now), ema (moving average) or base (first weights)."}
    )
    teacher_update_rate: float = field(default=0.05, metadata={"help": "Share of the student in an ema update."})
    teacher_sync_steps: int = field(default=1, metadata={"help": "Optimizer steps between two ema updates."})
    # -- what the teacher sees
    use_successful_as_teacher: bool = field(default=True, metadata={"help": "Show a solved sibling's transcript."})
    success_reward_threshold: float = field(default=1.0, metadata={"help": "Least reward of a solved sibling."})
    dont_reprompt_on_self_success: bool = field(
        default=True, metadata={"help": "An episode is not shown to itself as the solution."}
    )
    include_environment_feedback: bool = field(
        default=False, metadata={"help": "Show what the environment says of the attempt."}
    )
    environment_feedback_only_without_solution: bool = field(
        default=False, metadata={"help": "Show feedback only where no sibling solved the task."}
    )
    remove_thinking_from_demonstration: bool = field(
        default=False, metadata={"help": "Leave reasoning out of the shown transcript."}
    )
    max_reprompt_len: int = field(
        default=10240, metadata={"help": "Tokens of the teacher's prompt; a longer one loses its beginning."}
    )
    reprompt_template: str = field(
        default=REPROMPT_TEMPLATE, metadata={"help": "Of {prompt}, {solution} and {feedback}."}
    )
    solution_template: str = field(default=SOLUTION_TEMPLATE, metadata={"help": "Of {successful_previous_attempt}."})
    feedback_template: str = field(default=FEEDBACK_TEMPLATE, metadata={"help": "Of {feedback_raw}."})
    diagnostics_warning_interval: int = field(
        default=10, metadata={"help": "Rounds in a row that teach nothing between two warnings; 0 warns of none."}
    )
    diagnostics_flat_tolerance: float = field(
        default=1e-8, metadata={"help": "Up to this, a deviation of rewards or a share of samples counts as none."}
    )
    # -- the policy's part of the loss
    beta: float = field(default=0.0, metadata={"help": "Weight of the KL to the reference; 0 loads no reference."})
    epsilon: float = field(default=0.2, metadata={"help": "Lower clip of the ratio: 1 - epsilon."})
    epsilon_high: float | None = field(
        default=None, metadata={"help": "Upper clip: 1 + epsilon_high; epsilon if None."}
    )
    importance_sampling_level: str = field(default="token", metadata={"help": "token (GRPO) or sequence (GSPO)."})
    scale_rewards: str = field(
        default="group", metadata={"help": "Divide advantages by the std of: group, batch, none."}
    )
    loss_type: str = field(default="dapo", metadata={"help": "The policy's loss: grpo, bnpo, dapo or dr_grpo."})
    mask_truncated_completions: bool = field(
        default=False, metadata={"help": "Leave truncated episodes out of the loss."}
    )
    # -- trl's, which cannot act
    max_prompt_length: int | None = field(default=None, metadata={"help": "Not supported: set max_context."})
    use_teacher_server: bool = field(default=False, metadata={"help": "Not supported: the teacher is local."})

    def __post_init__(self) -> None:
        self.scale_rewards = scale_name(self.scale_rewards)
        super().__post_init__()
        for name, (nothing, instead) in SDPO_REFUSED.items():
            if getattr(self, name) != nothing:
                raise ConfigurationError(f"{name}={getattr(self, name)!r} cannot act in envgrad: {instead}")
        at_least("num_generations", self.num_generations, 2, why="a group needs a sibling to learn from")
        self.algorithm()

    def algorithm(self) -> SDPO:
        """The algorithm that these fields describe; it checks them."""
        policy = (
            "loss_type", "scale_rewards", "epsilon", "epsilon_high", "importance_sampling_level", "beta",
            "mask_truncated_completions", "max_completion_length",
        )  # fmt: skip
        own = {f.name for f in fields(SDPO)} - {"policy", "divergence", "reprompting"}
        return SDPO(
            policy=GRPO(**{name: getattr(self, name) for name in policy}),
            divergence=Divergence(
                **{f.name: getattr(self, f"distillation_{f.name}") for f in fields(Divergence)}
            ),
            reprompting=Reprompting(**{f.name: getattr(self, f.name) for f in fields(Reprompting)}),
            **{name: getattr(self, name) for name in own},
        )  # fmt: skip
