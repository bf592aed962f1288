"""Configuration: ``transformers.TrainingArguments`` plus what rollouts and policy gradients need.

Names and meanings follow ``trl`` and ``TrainingArguments`` wherever those have one. Every value is checked on
construction; a field that cannot act here is an error when set (``REFUSED``), never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from transformers import TrainingArguments

from envgrad.algorithms.base import Algorithm
from envgrad.config.asynchronous import AsynchronousFields, check_asynchronous
from envgrad.config.checks import at_least, at_most_concurrent, choice, given
from envgrad.config.executors import ExecutorFields, check_executors
from envgrad.config.mixture import MixtureFields, check_mixture
from envgrad.config.packing import PackingFields, check_packing
from envgrad.config.refused import REFUSED
from envgrad.config.reporting import ReportingFields, check_reporters, resolve_reporting
from envgrad.config.sampler_ratio import SamplerRatioFields, check_sampler_ratio
from envgrad.config.trl_names import TrlNames
from envgrad.config.vllm import VLLMFields, resolve_vllm
from envgrad.environments.isolation import MODES as ISOLATION_MODES
from envgrad.errors import ConfigurationError


@dataclass
class RolloutConfig(
    AsynchronousFields,
    ExecutorFields,
    MixtureFields,
    PackingFields,
    SamplerRatioFields,
    VLLMFields,
    TrlNames,
    ReportingFields,
    TrainingArguments,
):
    """What every algorithm shares: groups, limits of an episode, sampling, failures, packing.

    Batch sizes count episodes: an optimizer step trains ``per_device_train_batch_size * gradient_accumulation_steps``
    episodes per process; ``generation_batch_size`` episodes are played at once, in groups of ``num_generations``. Where
    ``environment_options`` give an environment groups of another size, each of its groups counts as
    ``num_generations`` episodes here, and an optimizer step holds whole groups.

    Raises:
        ConfigurationError: a value that cannot work, named with the rule and the fix.

    Example:
        >>> config = RolloutConfig(output_dir="runs/doc", max_steps=5, per_device_train_batch_size=16)
        >>> config.generation_batch_size
        16
    """

    learning_rate: float = 1e-6
    logging_steps: float = 10
    bf16: bool | None = None
    remove_unused_columns: bool | None = False
    per_device_eval_batch_size: int | None = field(
        default=None, metadata={"help": "Episodes that evaluation plays at once; as many as training by default."}
    )
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
    eval_tasks: int = field(default=100, metadata={"help": "Tasks drawn from split='eval' by evaluate(), at most."})
    eval_success_reward: float = field(
        default=1.0, metadata={"help": "Least reward of an episode that counts as a success in pass@k."}
    )
    shuffle_dataset: bool = field(
        default=True, metadata={"help": "Draw finite tasks (rows, num_tasks) in a new order each epoch."}
    )
    environment_weights: dict[str, float] | str | None = field(
        default=None, metadata={"help": "Share of each named environment in a mixture; equal by default."}
    )
    group_consistency: str = field(
        default="auto", metadata={"help": "Siblings that start differently: auto (warn), require (error), off."}
    )
    isolate_generators: str = field(
        default="auto",
        metadata={"help": "Instances get their own global random generators: auto (if reset draws), always, off."},
    )
    reward_weights: list[float] | str | dict[str, float] | None = field(
        default=None,
        metadata={"help": "Weights of reward_funcs in order, or of any reward component by name; 1 by default."},
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
        default=None, metadata={"help": "Episodes in flight; a whole round by default."}
    )
    max_episode_retries: int = field(default=2, metadata={"help": "Retries of a failed episode, on a fresh instance."})
    on_nonfinite: str = field(
        default="skip",
        metadata={
            "help": "A NaN or infinity in a reward, log-prob, loss or gradient: skip (drop the episode, or skip the "
            "whole update), raise (end the run)."
        },
    )
    max_consecutive_failed_groups: int = field(
        default=16, metadata={"help": "Groups dropped in a row before the run stops with TooManyFailures."}
    )
    # -- the reference model, where beta asks for one
    sync_ref_model: bool = field(
        default=False, metadata={"help": "Move the reference towards the policy every ref_model_sync_steps steps."}
    )
    ref_model_mixup_alpha: float = field(
        default=0.6, metadata={"help": "Share of the policy in the mixed reference (alpha of TR-DPO)."}
    )
    ref_model_sync_steps: int = field(default=512, metadata={"help": "Steps between two mixes (tau of TR-DPO)."})
    # -- reproducibility and logs
    deterministic: bool = field(
        default=False, metadata={"help": "Bit-equal runs: same processes, local sampler, no clock in the schedule."}
    )
    log_episodes: bool = field(default=True, metadata={"help": "Write every episode under output_dir/episodes."})
    episode_log_gb: float | None = field(
        default=10.0,
        metadata={
            "help": "Most that the episode log may take, in GB; beyond it the oldest are dropped; None: no limit."
        },
    )
    log_completions: bool = field(
        default=False, metadata={"help": "Show a table of completions at each log, and keep it under output_dir."}
    )
    num_completions_to_print: int | None = field(
        default=None, metadata={"help": "Completions in the table on the console, drawn at random; all by default."}
    )
    log_unique_prompts: bool = field(
        default=False, metadata={"help": "Show one completion of each prompt in the table on the console."}
    )

    def __post_init__(self) -> None:
        self._read_mappings()
        self._apply_trl_names()
        if self.bf16 is None:
            on_gpu = torch.cuda.is_available() and not self.use_cpu
            self.bf16 = bool(on_gpu and torch.cuda.is_bf16_supported() and not self.fp16)
        resolve_reporting(self)  # before transformers, which takes all but losses to be better where higher
        super().__post_init__()
        check_reporters(self)
        self._refuse_fields()
        self._check_rollout()
        self._resolve_batches()
        check_mixture(self)
        check_packing(self)
        check_sampler_ratio(self)
        check_asynchronous(self)
        resolve_vllm(self)

    def _read_mappings(self) -> None:
        """Mappings may come as JSON text from the command line."""
        import json

        names = ("model_init_kwargs", "generation_kwargs", "chat_template_kwargs", "environment_weights")
        for name in (*names, "environment_options", "environment_resources"):
            value = getattr(self, name)
            if isinstance(value, str):
                try:
                    value = json.loads(value)
                except json.JSONDecodeError as error:
                    raise ConfigurationError(f"{name}={value!r} is not JSON ({error}); write it as {{...}}") from error
                setattr(self, name, value)
            if value is not None and not isinstance(value, Mapping):
                raise ConfigurationError(f"{name}={value!r} must be a mapping")
        if isinstance(self.reward_weights, str):
            try:
                self.reward_weights = json.loads(self.reward_weights)
            except json.JSONDecodeError as error:
                raise ConfigurationError(
                    f"reward_weights={self.reward_weights!r} is not JSON ({error}); write [1, 0.5] or a mapping by name"
                ) from error

    def _apply_trl_names(self) -> None:
        """Set the fields that trl's other names for them set."""
        self.refused_by_trl_names()
        known = {f.name: f.default for f in fields(self)}
        for ours, (theirs, value) in self.set_by_trl_names().items():
            if ours not in known:
                raise ConfigurationError(
                    f"{theirs}={value!r} cannot act: {type(self).__name__} has no {ours}; remove it"
                )
            if not theirs.startswith("generation_kwargs") and getattr(self, ours) not in (known[ours], value):
                raise ConfigurationError(
                    f"{theirs}={value!r} is another name for {ours}={getattr(self, ours)!r}, and they contradict each "
                    "other; set one"
                )
            setattr(self, ours, value)

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

    def _check_temperature(self) -> None:
        if self.temperature <= 0:
            raise ConfigurationError(f"temperature={self.temperature} must be above 0: a greedy policy cannot explore")

    def _check_rollout(self) -> None:
        for name in ("num_generations", "max_completion_length", "num_iterations"):
            given(name, getattr(self, name))
        at_least("num_generations", self.num_generations, 1)
        at_least("num_generations_eval", self.num_generations_eval, 1)
        at_least("num_iterations", self.num_iterations, 1)
        at_least("max_completion_length", self.max_completion_length, 1)
        at_least("max_turns", self.max_turns, 1, why="one turn is the least an episode has")
        at_least("max_turn_tokens", self.max_turn_tokens, 1)
        at_least("max_tool_calling_iterations", self.max_tool_calling_iterations, 0)
        at_least("max_tokens_per_microbatch", self.max_tokens_per_microbatch, 1)
        at_least("max_concurrent_episodes", self.max_concurrent_episodes, 1)
        for name in ("num_generations", "num_generations_eval"):
            at_most_concurrent(name, getattr(self, name), self.max_concurrent_episodes)
        at_least("per_device_eval_batch_size", self.per_device_eval_batch_size, 1)
        if self.per_device_eval_batch_size is not None:
            at_least(
                "per_device_eval_batch_size", self.per_device_eval_batch_size, self.num_generations_eval or 1,
                why="the episodes of one task (num_generations_eval) are played together",
            )  # fmt: skip
        at_least("max_episode_retries", self.max_episode_retries, 0)
        at_least("max_consecutive_failed_groups", self.max_consecutive_failed_groups, 1)
        at_least("eval_tasks", self.eval_tasks, 1)
        if not math.isfinite(self.eval_success_reward):
            raise ConfigurationError(f"eval_success_reward={self.eval_success_reward} must be a finite number")
        at_least("max_context", self.max_context, 2)
        at_least("max_kv_tokens", self.max_kv_tokens, 1)
        for name in ("episode_timeout", "tool_timeout", "reset_timeout", "reward_timeout", "close_timeout"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigurationError(f"{name}={value} must be above 0 seconds; use None for no limit")
        self._check_temperature()
        if not 0 < self.top_p <= 1:
            raise ConfigurationError(f"top_p={self.top_p} must be in (0, 1]")
        at_least("top_k", self.top_k, 0)
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ConfigurationError(f"min_p={self.min_p} must be in [0, 1]")
        if self.repetition_penalty <= 0:
            raise ConfigurationError(f"repetition_penalty={self.repetition_penalty} must be above 0; 1 is none")
        self._check_reference_and_logs()
        choice("on_nonfinite", self.on_nonfinite, ("skip", "raise"))
        choice("group_consistency", self.group_consistency, ("auto", "require", "off"))
        check_executors(self)
        choice("isolate_generators", self.isolate_generators, ISOLATION_MODES)
        if self.max_tool_calling_iterations is not None:
            if self.max_turns not in (None, self.max_tool_calling_iterations + 1):
                raise ConfigurationError(
                    f"max_tool_calling_iterations={self.max_tool_calling_iterations} and max_turns={self.max_turns} "
                    "contradict each other; set one (n rounds of calls are n+1 turns)"
                )
            self.max_turns = self.max_tool_calling_iterations + 1

    def _check_reference_and_logs(self) -> None:
        if not 0 < self.ref_model_mixup_alpha <= 1:
            raise ConfigurationError(f"ref_model_mixup_alpha={self.ref_model_mixup_alpha} must be in (0, 1]")
        at_least("ref_model_sync_steps", self.ref_model_sync_steps, 1)
        at_least("num_completions_to_print", self.num_completions_to_print, 1)
        if self.episode_log_gb is not None and not self.episode_log_gb > 0:
            raise ConfigurationError(f"episode_log_gb={self.episode_log_gb} must be above 0; None is no limit")
        needed = {
            "ref_model_mixup_alpha": "sync_ref_model",
            "ref_model_sync_steps": "sync_ref_model",
            "num_completions_to_print": "log_completions",
            "log_unique_prompts": "log_completions",
        }
        defaults = {f.name: f.default for f in fields(self)}
        for name, switch in needed.items():
            if getattr(self, name) != defaults[name] and not getattr(self, switch):
                raise ConfigurationError(f"{name}={getattr(self, name)!r} acts only with {switch}=True; set that too")

    def _resolve_batches(self) -> None:
        at_least("per_device_train_batch_size", self.per_device_train_batch_size, 1)
        at_least("gradient_accumulation_steps", self.gradient_accumulation_steps, 1)
        at_least("generation_batch_size", self.generation_batch_size, 1)
        at_least("steps_per_generation", self.steps_per_generation, 1)
        per_micro_step = self.per_device_train_batch_size * self.world_size
        both = self.generation_batch_size, self.steps_per_generation
        if None not in both and both[0] != per_micro_step * (both[1] or 1):  # a resolved copy has both
            raise ConfigurationError(
                f"generation_batch_size={both[0]} and steps_per_generation={both[1]} contradict each other: a round "
                f"of {both[1]} micro-steps has {per_micro_step * (both[1] or 1)} episodes; set one"
            )
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

    def algorithm(self) -> Algorithm:
        """The algorithm that these fields describe; ``GRPOConfig`` and its kin have one.

        Raises:
            ConfigurationError: this class describes none.
        """
        raise ConfigurationError(f"{type(self).__name__} describes no algorithm; use GRPOConfig or one of its kin")

    @property
    def eval_batch_size(self) -> int:
        """Episodes that evaluation plays at once (``TrainingArguments`` shows it in summaries)."""
        return self.per_device_eval_batch_size or round_size(self)

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
