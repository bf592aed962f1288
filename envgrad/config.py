"""Configuration: ``transformers.TrainingArguments`` plus what rollouts and policy gradients need.

Names and meanings follow ``trl`` and ``TrainingArguments`` wherever those have one. Every value is checked on
construction; a field that cannot act here is an error when set (``REFUSED``), never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from transformers import TrainingArguments

from envgrad.algorithms.grpo import GRPO
from envgrad.errors import ConfigurationError

REFUSED: dict[str, str] = {
    "auto_find_batch_size": "a smaller batch would break groups apart; lower max_tokens_per_microbatch instead",
    "average_tokens_across_devices": "loss denominators are always global here; leave it at True",
    "bf16_full_eval": "evaluation samples as training does, in the precision of bf16; set that",
    "batch_eval_metrics": "evaluation plays episodes and has no prediction batches; remove it",
    "data_seed": "tasks are drawn by `seed`; set that",
    "dataloader_drop_last": "there is no dataloader of rows; remove it",
    "dataloader_in_order": "there is no dataloader of rows; remove it",
    "dataloader_multiprocessing_context": "there is no dataloader of rows; remove it",
    "dataloader_num_workers": "there is no dataloader of rows; environments run concurrently by themselves",
    "dataloader_persistent_workers": "there is no dataloader of rows; remove it",
    "dataloader_pin_memory": "there is no dataloader of rows; remove it",
    "dataloader_prefetch_factor": "there is no dataloader of rows; remove it",
    "eval_accumulation_steps": "evaluation plays episodes and keeps no predictions; remove it",
    "eval_do_concat_batches": "evaluation plays episodes and keeps no predictions; remove it",
    "eval_use_gather_object": "evaluation plays episodes and keeps no predictions; remove it",
    "deepspeed": "this version trains in one process, without it; remove it",
    "fp16_full_eval": "evaluation samples as training does, in the precision of fp16; set that",
    "fsdp": "this version trains in one process, without it; remove it",
    "include_for_metrics": "evaluation plays episodes and has no compute_metrics; remove it",
    "include_num_input_tokens_seen": "token counts are logged every step as tokens/*; remove it",
    "label_names": "there are no labels in policy gradients; remove it",
    "label_smoothing_factor": "there are no labels in policy gradients; leave it at 0",
    "length_column_name": "rows are packed by their token counts; remove it",
    "liger_kernel_config": "it replaces the model's forward, which computes the log-probs here; remove it",
    "neftune_noise_alpha": "noise in the embeddings would change the log-probs that were sampled; leave it unset",
    "parallelism_config": "context and sequence parallelism are not supported; remove it",
    "per_device_eval_batch_size": "evaluation plays eval_tasks tasks of num_generations_eval episodes at once, as many "
    "as max_concurrent_episodes lets; set those",
    "prediction_loss_only": "evaluation plays episodes; remove it",
    "remove_unused_columns": "all columns go to reset and the reward functions; leave it at False",
    "torch_empty_cache_steps": "rows are packed to a token budget; lower max_tokens_per_microbatch instead",
    "torch_compile": "packed rows change shape every step; leave it off",
    "train_sampling_strategy": "tasks come from the task stream, in its order; leave it unset",
    "use_cache": "the sampler keeps keys and values by itself, and training needs none; remove it",
    "use_liger_kernel": "it replaces the model's forward, which computes the log-probs here; leave it off",
}
"""Fields of ``TrainingArguments`` that cannot act here, with the reason and the fix."""


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigurationError(f"{name}={value!r} is not known; choose one of {', '.join(allowed)}")


def _at_least(name: str, value: float | None, least: float, *, why: str = "") -> None:
    if value is not None and value < least:
        raise ConfigurationError(f"{name}={value} must be at least {least}{'; ' + why if why else ''}")


def _at_most_concurrent(name: str, siblings: int | None, limit: int | None) -> None:
    if siblings is not None and limit is not None and siblings > limit:
        raise ConfigurationError(
            f"max_concurrent_episodes={limit} must be at least {name}={siblings}: groups are played whole; raise it"
        )


@dataclass
class RolloutConfig(TrainingArguments):
    """What every algorithm shares: groups, limits of an episode, sampling, failures, packing.

    Batch sizes count episodes: an optimizer step trains ``per_device_train_batch_size * gradient_accumulation_steps``
    episodes per process; ``generation_batch_size`` episodes are played at once, in groups of ``num_generations``.

    Raises:
        ConfigurationError: a value that cannot work, named with the rule and the fix.

    Example:
        >>> config = GRPOConfig(output_dir="runs/doc", max_steps=5, per_device_train_batch_size=16, num_generations=4)
        >>> config.generation_batch_size
        16
    """

    learning_rate: float = 1e-6
    logging_steps: float = 10
    bf16: bool | None = None
    remove_unused_columns: bool | None = False
    # -- the model
    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Keyword arguments for from_pretrained when `model` is a name or path."}
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Run model code that comes from the Hub."})
    disable_dropout: bool = field(default=False, metadata={"help": "Set every dropout of the policy to 0."})
    chat_template: str | None = field(
        default=None, metadata={"help": "Jinja chat template instead of the tokenizer's."}
    )
    chat_template_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Passed to every rendering, for example {'enable_thinking': False}."}
    )
    tool_parser: str | None = field(
        default=None, metadata={"help": "How tool calls are read; by default found from the chat template."}
    )
    # -- groups and batches
    num_generations: int = field(default=8, metadata={"help": "Episodes per group (siblings of one task)."})
    num_generations_eval: int | None = field(default=None, metadata={"help": "Episodes per task in evaluation; 1."})
    generation_batch_size: int | None = field(default=None, metadata={"help": "Episodes played at once."})
    steps_per_generation: int | None = field(
        default=None, metadata={"help": "Micro-steps of per_device_train_batch_size fed by one round of rollouts."}
    )
    num_iterations: int = field(default=1, metadata={"help": "Passes over each round of rollouts (mu in GRPO)."})
    max_tokens_per_microbatch: int | None = field(
        default=16384, metadata={"help": "Token budget of one packed forward; never changes what is learned."}
    )
    eval_tasks: int = field(default=100, metadata={"help": "Tasks drawn from split='eval' by evaluate()."})
    environment_weights: dict[str, float] | str | None = field(
        default=None, metadata={"help": "Share of each named environment in a mixture; equal by default."}
    )
    group_consistency: str = field(
        default="auto", metadata={"help": "Siblings that start differently: auto (warn), require (error), off."}
    )
    # -- sampling
    temperature: float = field(default=1.0, metadata={"help": "Sampling temperature; the loss uses it too."})
    top_p: float = field(default=1.0, metadata={"help": "Nucleus sampling; below 1 the gradient is biased."})
    top_k: int = field(default=0, metadata={"help": "Keep the k likeliest tokens; 0 keeps all; biases the gradient."})
    min_p: float | None = field(default=None, metadata={"help": "Drop tokens below min_p times the likeliest one."})
    repetition_penalty: float = field(default=1.0, metadata={"help": "Above 1 discourages repeats; biases gradients."})
    stop_strings: list[str] | None = field(default=None, metadata={"help": "Strings that end a turn."})
    max_context: int | None = field(default=None, metadata={"help": "Longest row in tokens; the model's by default."})
    max_kv_tokens: int | None = field(
        default=None,
        metadata={"help": "Cap on tokens of kept keys and values; idle episodes are recomputed beyond it."},
    )
    # -- limits of an episode
    max_completion_length: int = field(
        default=512, metadata={"help": "Tokens of the whole episode after its prompt, tool results included."}
    )
    max_turns: int | None = field(
        default=None, metadata={"help": "Turns of an episode; the last one's calls do not run."}
    )
    max_tool_calling_iterations: int | None = field(
        default=None, metadata={"help": "Rounds of tool calls: n is max_turns=n+1."}
    )
    max_turn_tokens: int | None = field(default=None, metadata={"help": "Tokens of one turn; more ends the episode."})
    episode_timeout: float | None = field(default=None, metadata={"help": "Seconds; ends the episode as truncated."})
    tool_timeout: float | None = field(default=60.0, metadata={"help": "Seconds of one tool call."})
    reset_timeout: float | None = field(default=300.0, metadata={"help": "Seconds of reset; beyond is a failure."})
    reward_timeout: float | None = field(
        default=300.0, metadata={"help": "Seconds of get_reward; beyond is a failure."}
    )
    close_timeout: float = field(default=10.0, metadata={"help": "Seconds of close()."})
    # -- failures
    max_concurrent_episodes: int | None = field(
        default=None, metadata={"help": "Episodes in flight, and instances per environment; a whole round by default."}
    )
    max_episode_retries: int = field(default=2, metadata={"help": "Retries of a failed episode, on a fresh instance."})
    max_consecutive_failed_groups: int = field(
        default=16, metadata={"help": "Groups dropped in a row before the run stops with TooManyFailures."}
    )
    # -- reproducibility and logs
    deterministic: bool = field(
        default=False, metadata={"help": "Bit-equal runs: one process, local sampler, no clock in the schedule."}
    )
    log_episodes: bool = field(default=True, metadata={"help": "Write every episode under output_dir/episodes."})

    def __post_init__(self) -> None:
        self._read_mappings()
        if self.bf16 is None:
            on_gpu = torch.cuda.is_available() and not self.use_cpu
            self.bf16 = bool(on_gpu and torch.cuda.is_bf16_supported() and not self.fp16)
        super().__post_init__()
        self._refuse_fields()
        self._check_rollout()
        self._resolve_batches()

    def _read_mappings(self) -> None:
        """Mappings may come as JSON text from the command line."""
        import json

        for name in ("model_init_kwargs", "chat_template_kwargs", "environment_weights"):
            value = getattr(self, name)
            if isinstance(value, str):
                try:
                    value = json.loads(value)
                except json.JSONDecodeError as error:
                    raise ConfigurationError(f"{name}={value!r} is not JSON ({error}); write it as {{...}}") from error
                setattr(self, name, value)
            if value is not None and not isinstance(value, Mapping):
                raise ConfigurationError(f"{name}={value!r} must be a mapping")

    def mapping(self, name: str) -> dict[str, Any] | None:
        """A copy of a field that may come as JSON text, as the mapping that it is."""
        value = getattr(self, name)
        return None if value is None else dict(value)

    def _refuse_fields(self) -> None:
        defaults: dict[str, object] = {f.name: f.default for f in fields(TrainingArguments)}
        # Some defaults are resolved to another spelling by TrainingArguments itself.
        unset: dict[str, tuple[object, ...]] = {
            "deepspeed": (None, ""),
            "fsdp": (None, False, "", []),
            "dataloader_pin_memory": (True, not self.use_cpu),
            "include_for_metrics": ([],),
            "include_num_input_tokens_seen": (False, "no"),
            "remove_unused_columns": (False, None),
        }
        for name, reason in REFUSED.items():
            value = getattr(self, name)
            if value not in unset.get(name, (defaults[name],)):
                raise ConfigurationError(f"{name}={value!r} cannot act in envgrad: {reason}")

    def _check_rollout(self) -> None:
        _at_least("num_generations", self.num_generations, 1)
        _at_least("num_generations_eval", self.num_generations_eval, 1)
        _at_least("num_iterations", self.num_iterations, 1)
        _at_least("max_completion_length", self.max_completion_length, 1)
        _at_least("max_turns", self.max_turns, 1, why="one turn is the least an episode has")
        _at_least("max_turn_tokens", self.max_turn_tokens, 1)
        _at_least("max_tool_calling_iterations", self.max_tool_calling_iterations, 0)
        _at_least("max_tokens_per_microbatch", self.max_tokens_per_microbatch, 1)
        _at_least("max_concurrent_episodes", self.max_concurrent_episodes, 1)
        for name in ("num_generations", "num_generations_eval"):
            _at_most_concurrent(name, getattr(self, name), self.max_concurrent_episodes)
        _at_least("max_episode_retries", self.max_episode_retries, 0)
        _at_least("max_consecutive_failed_groups", self.max_consecutive_failed_groups, 1)
        _at_least("eval_tasks", self.eval_tasks, 1)
        _at_least("max_context", self.max_context, 2)
        _at_least("max_kv_tokens", self.max_kv_tokens, 1)
        for name in ("episode_timeout", "tool_timeout", "reset_timeout", "reward_timeout", "close_timeout"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigurationError(f"{name}={value} must be above 0 seconds; use None for no limit")
        if self.temperature <= 0:
            raise ConfigurationError(f"temperature={self.temperature} must be above 0: a greedy policy cannot explore")
        if not 0 < self.top_p <= 1:
            raise ConfigurationError(f"top_p={self.top_p} must be in (0, 1]")
        _at_least("top_k", self.top_k, 0)
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ConfigurationError(f"min_p={self.min_p} must be in [0, 1]")
        if self.repetition_penalty <= 0:
            raise ConfigurationError(f"repetition_penalty={self.repetition_penalty} must be above 0; 1 is none")
        _choice("group_consistency", self.group_consistency, ("auto", "require", "off"))
        if self.max_tool_calling_iterations is not None:
            if self.max_turns not in (None, self.max_tool_calling_iterations + 1):
                raise ConfigurationError(
                    f"max_tool_calling_iterations={self.max_tool_calling_iterations} and max_turns={self.max_turns} "
                    "contradict each other; set one (n rounds of calls are n+1 turns)"
                )
            self.max_turns = self.max_tool_calling_iterations + 1
        if self.deterministic and self.world_size > 1:
            raise ConfigurationError("deterministic=True is promised for one process only; start one, or turn it off")

    def _resolve_batches(self) -> None:
        _at_least("per_device_train_batch_size", self.per_device_train_batch_size, 1)
        _at_least("gradient_accumulation_steps", self.gradient_accumulation_steps, 1)
        _at_least("generation_batch_size", self.generation_batch_size, 1)
        _at_least("steps_per_generation", self.steps_per_generation, 1)
        per_micro_step = self.per_device_train_batch_size * self.world_size
        if self.generation_batch_size is not None and self.steps_per_generation is not None:
            raise ConfigurationError("generation_batch_size and steps_per_generation say the same thing; set one")
        if self.generation_batch_size is not None:
            if self.generation_batch_size % per_micro_step:
                raise ConfigurationError(
                    f"generation_batch_size={self.generation_batch_size} must be a multiple of "
                    f"per_device_train_batch_size * processes = {per_micro_step}"
                )
            self.steps_per_generation = self.generation_batch_size // per_micro_step
        else:
            self.steps_per_generation = self.steps_per_generation or self.gradient_accumulation_steps
            self.generation_batch_size = per_micro_step * self.steps_per_generation
        if self.steps_per_generation % self.gradient_accumulation_steps:
            raise ConfigurationError(
                f"steps_per_generation={self.steps_per_generation} must be a multiple of gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps}, so that a round of rollouts is a whole number of optimizer steps"
            )
        if self.generation_batch_size % self.num_generations:
            raise ConfigurationError(
                f"a round of rollouts has {self.generation_batch_size} episodes, which must be whole groups of "
                f"num_generations={self.num_generations}; change per_device_train_batch_size or num_generations"
            )

    @property
    def episodes_per_step(self) -> int:
        """Episodes that one optimizer step trains, over all processes."""
        episodes: int = self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size
        return episodes


def round_size(config: RolloutConfig) -> int:
    """Episodes of one round of rollouts (``generation_batch_size`` after it was resolved)."""
    if config.generation_batch_size is None:
        raise AssertionError("generation_batch_size is resolved on construction")
    return config.generation_batch_size


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
        _at_least("num_generations", self.num_generations, 2, why="a group needs a sibling to compare with")
        _at_least("sampler_ratio_cap", self.sampler_ratio_cap, 1)
        self.algorithm()

    def algorithm(self) -> GRPO:
        """The algorithm that these fields describe; it checks them."""
        return GRPO(**{f.name: getattr(self, f.name) for f in fields(GRPO)})
