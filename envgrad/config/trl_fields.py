"""Every field of trl 1.16.0's configurations: its default there, and what becomes of it here.

One table for three readers: the checks at construction, ``docs/from_trl.md``, and the test that compares the names and
defaults with trl where it is installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

TRL_VERSION = "1.16.0"

Status: TypeAlias = Literal["same", "renamed", "not supported"]

_SHARED_DEFAULTS: dict[str, object] = {
    "learning_rate": 1e-6, "bf16": None, "gradient_checkpointing": True, "logging_steps": 10,
    "remove_unused_columns": False, "model_init_kwargs": None, "trust_remote_code": False,
    "router_aux_loss_coef": None, "disable_dropout": False, "num_generations_eval": None,
    "max_completion_length": 512, "ds3_gather_for_generation": True, "shuffle_dataset": True,
    "pad_to_multiple_of": "auto", "generation_batch_size": None, "steps_per_generation": None, "temperature": 1.0,
    "top_p": 1.0, "top_k": 0, "min_p": None, "generation_kwargs": None, "chat_template_kwargs": None,
    "repetition_penalty": 1.0, "cache_implementation": None, "use_vllm": False, "vllm_mode": "colocate",
    "vllm_model_impl": "vllm", "vllm_enable_sleep_mode": False, "vllm_structured_outputs_regex": None,
    "vllm_server_base_url": None, "vllm_server_host": "0.0.0.0", "vllm_server_port": 8000,
    "vllm_server_timeout": 240.0, "vllm_group_port": 51216, "vllm_gpu_memory_utilization": 0.3,
    "vllm_max_model_length": None, "vllm_tensor_parallel_size": 1, "num_iterations": 1, "epsilon": 0.2,
    "epsilon_high": None, "reward_weights": None, "mask_truncated_completions": False, "sync_ref_model": False,
    "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512, "log_completions": False, "log_multimodal": True,
    "num_completions_to_print": None, "log_unique_prompts": False, "use_transformers_continuous_batching": False,
    "transformers_continuous_batching_config": None, "use_transformers_paged": False,
}  # fmt: skip

_NOT_IN_SDPO = {
    "router_aux_loss_coef", "pad_to_multiple_of", "vllm_structured_outputs_regex", "sync_ref_model",
    "ref_model_mixup_alpha", "ref_model_sync_steps", "log_completions", "log_multimodal", "num_completions_to_print",
    "log_unique_prompts", "use_transformers_continuous_batching", "transformers_continuous_batching_config",
    "use_transformers_paged",
}  # fmt: skip

TRL_DEFAULTS: dict[str, dict[str, object]] = {
    "GRPOConfig": _SHARED_DEFAULTS
    | {
        "num_generations": 8, "beta": 0.0, "cast_lm_head_to_fp32": False, "delta": None, "sapo_temperature_neg": 1.05,
        "sapo_temperature_pos": 1.0, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0, "importance_sampling_level": "token",
        "multi_objective_aggregation": "sum_then_normalize", "scale_rewards": "group", "loss_type": "dapo",
        "top_entropy_quantile": 1.0, "entropy_coef": 0.0, "use_adaptive_entropy": False, "entropy_coef_min": 0.0,
        "entropy_coef_max": 1.0, "entropy_coef_delta": 0.005, "entropy_target": 0.2,
        "max_tool_calling_iterations": None, "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 3.0,
        "vllm_importance_sampling_clip_min": None, "vllm_importance_sampling_cap": None,
        "off_policy_mask_threshold": None, "use_bias_correction_kl": True, "log_completions_hub_repo": None,
    },
    "RLOOConfig": _SHARED_DEFAULTS
    | {"num_generations": 2, "beta": 0.05, "normalize_advantages": False, "reward_clip_range": None},
    "SDPOConfig": {name: value for name, value in _SHARED_DEFAULTS.items() if name not in _NOT_IN_SDPO}
    | {
        "learning_rate": 5e-5, "disable_dropout": True, "max_completion_length": 256, "max_prompt_length": 512,
        "num_generations": 8, "use_teacher_server": False, "loss_type": "dapo", "dont_reprompt_on_self_success": True,
        "beta": 0.0, "importance_sampling_level": "token", "scale_rewards": "group", "distillation_alpha": 1.0,
        "distillation_mode": "sampled_token", "distillation_topk": None, "distillation_is_clip": 2.0,
        "distillation_add_tail": False, "distillation_weight": 1.0, "teacher_model_kind": "ema",
        "teacher_update_rate": 0.05, "teacher_sync_steps": 1, "max_reprompt_len": 10240,
        "use_successful_as_teacher": True, "success_reward_threshold": 1.0,
        "reprompt_template": "{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n",
        "solution_template": "\nCorrect solution:\n\n{successful_previous_attempt}\n\n",
        "feedback_template": "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback_raw}"
        "\n\n",
        "include_environment_feedback": False, "environment_feedback_only_without_solution": False,
        "remove_thinking_from_demonstration": False, "diagnostics_warning_interval": 10,
        "diagnostics_flat_tolerance": 1e-8,
    },
    "AsyncGRPOConfig": {
        "model_init_kwargs": None, "dtype": "float32", "trust_remote_code": False, "router_aux_loss_coef": None,
        "learning_rate": 1e-6, "logging_steps": 1, "lr_scheduler_type": "constant", "ignore_data_skip": True,
        "bf16": None, "gradient_checkpointing": True, "num_generations": 8, "max_completion_length": 2048,
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0,
        "chat_template_kwargs": None, "max_tool_calling_iterations": None, "fork_threshold_tokens": 1024,
        "vllm_server_base_url": "http://localhost:8000", "vllm_server_timeout": 240.0, "request_timeout": 600,
        "weight_sync_timeout": 1800, "epsilon": 0.2, "epsilon_high": None, "token_budget": None,
        "max_inflight_tasks": -1, "max_staleness": 4, "queue_maxsize": 1024, "weight_sync_steps": 1,
        "heartbeat_stale_after_s": 300.0, "log_completions": False, "num_completions_to_print": None,
    },
}  # fmt: skip
"""What each class of trl declares itself, with its defaults; all else is ``transformers.TrainingArguments``."""

_SERVERS_OWN = "it is an option of the vLLM server, which runs in a process of its own; give it to `envgrad vllm-serve`"

TRL_REFUSED: dict[str, str] = {
    "cache_implementation": "the local sampler keeps keys and values in slots of its own; remove it, or bound "
    "them with max_kv_tokens",
    "cast_lm_head_to_fp32": "the head runs in the model's precision, and log-probs are normalised in float32; for a "
    "head in float32 leave the model in float32 (dtype in model_init_kwargs) and set bf16=False",
    "ds3_gather_for_generation": "this version trains in one process, without DeepSpeed; remove it",
    "log_completions_hub_repo": "episodes are written to output_dir/episodes; upload that folder with "
    "huggingface_hub.upload_folder",
    "log_multimodal": "episodes are text only; remove it",
    "pad_to_multiple_of": "rows are packed without padding; remove it",
    "router_aux_loss_coef": "the loss has no load-balancing term for mixtures of experts; set it to 0.0 or remove it",
    "transformers_continuous_batching_config": "the local sampler always batches continuously; remove it, or bound it "
    "with max_concurrent_episodes and max_kv_tokens",
    "use_transformers_continuous_batching": "the local sampler always batches continuously; remove it",
    "use_transformers_paged": "the local sampler always batches continuously; remove it",
    "vllm_enable_sleep_mode": "the vLLM server runs beside the trainer and never hands memory to it; remove it",
    "vllm_gpu_memory_utilization": _SERVERS_OWN + " as --gpu-memory-utilization",
    "vllm_max_model_length": _SERVERS_OWN + " as --max-model-len",
    "vllm_model_impl": _SERVERS_OWN + " as --model-impl",
    "vllm_structured_outputs_regex": "sampling is not constrained by a grammar; score the form with a reward function",
    "vllm_tensor_parallel_size": _SERVERS_OWN + " as --tensor-parallel-size",
}
"""Fields of trl that cannot act here, with the reason and the fix."""

TRL_RENAMED: dict[str, str] = {
    "vllm_importance_sampling_correction": "sampler_ratio_mode",
    "vllm_importance_sampling_mode": "sampler_ratio_mode",
    "vllm_importance_sampling_clip_max": "sampler_ratio_cap",
    "vllm_importance_sampling_clip_min": "sampler_ratio_min",
    "vllm_importance_sampling_cap": "sampler_ratio_cap",
}
"""Fields of trl that are accepted and set another one."""

TRL_NOTES: dict[str, str] = {
    "dtype": "The key `dtype` of `model_init_kwargs`, which wins; not for a loaded model.",
    "max_inflight_tasks": "-1: all that `max_staleness` admits (trl: `max_staleness` optimizer steps of samples).",
    "max_staleness": "Of a sample's oldest token; 1 by default in the other configurations, with `asynchronous=True`.",
    "token_budget": "Unset: 16384 (trl: the server's longest row). A longer row has a forward of its own, it is never "
    "dropped.",
    "weight_sync_steps": "n is `steps_per_generation = n * gradient_accumulation_steps`.",
    "bf16": "Unset: on where a GPU can, off on a CPU (trl: on everywhere unless fp16 is set).",
    "disable_dropout": "With dropout left on, old log-probs are computed by one more pass (trl lets them differ).",
    "epsilon_high": 'With `loss_type="cispo"` the cap is 5.0 if unset, as its paper has it (trl: `epsilon`, 0.2).',
    "generation_kwargs": "Keys that are sampling options here: temperature, top_p, top_k, min_p, repetition_penalty, "
    "max_new_tokens, stop_strings, and do_sample=True; any other key is an error.",
    "gradient_checkpointing": "Off unless set.",
    "log_completions": "A table on the console and a Parquet file under `output_dir/completions`, at each log.",
    "log_unique_prompts": "One completion of each prompt, on the console too (trl: in the reporters' tables only).",
    "max_completion_length": "A number: None, which trl hands on as no limit of its own, is an error.",
    "max_tool_calling_iterations": "n is `max_turns=n + 1`; calls of the last turn do not run.",
    "num_completions_to_print": "Needs `log_completions=True`.",
    "num_generations_eval": "Unset: one episode of each task (trl: `num_generations`).",
    "ref_model_mixup_alpha": "Needs `sync_ref_model=True`.",
    "ref_model_sync_steps": "Needs `sync_ref_model=True`.",
    "remove_unused_columns": "True is an error: all columns go to `reset` and the reward functions.",
    "reward_weights": "Also a mapping by name, which covers environments and their components.",
    "sync_ref_model": "The mixed reference is saved in checkpoints (trl starts from the first weights again).",
    "use_vllm": 'Needs `vllm_mode="server"` (or `sampler="vllm"`), and a server that `envgrad vllm-serve` starts.',
    "vllm_group_port": 'Needs `vllm_sync="nccl"`: weights go as files by default.',
    "vllm_importance_sampling_correction": 'False is `sampler_ratio_mode="none"`.',
    "vllm_mode": "`colocate`, the default, is an error with `use_vllm=True`: vLLM runs in an environment of its own.",
    "vllm_server_base_url": "Also a list: episodes are spread over several servers. `envgrad vllm-serve`, not trl's.",
    "vllm_server_host": "0.0.0.0 is this machine.",
}
"""What a user of trl should know of a field that is accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlField:
    """What becomes of one field of trl's.

    Example:
        >>> trl_field("vllm_importance_sampling_mode").instead
        'sampler_ratio_mode'
        >>> trl_field("vllm_enable_sleep_mode").status
        'not supported'
    """

    name: str
    status: Status
    instead: str = ""
    """our field's name, or the reason and the fix"""
    note: str = ""


def trl_field(name: str) -> TrlField:
    """The table's row of the field ``name``."""
    from envgrad.config.async_grpo import ASYNC_REFUSED, ASYNC_RENAMED
    from envgrad.config.sdpo import SDPO_REFUSED

    note = TRL_NOTES.get(name, "")
    own = SDPO_REFUSED | ASYNC_REFUSED
    refused = TRL_REFUSED | {field: reason for field, (_, reason) in own.items()}
    renamed = TRL_RENAMED | ASYNC_RENAMED
    if name in refused:
        return TrlField(name=name, status="not supported", instead=refused[name], note=note)
    if name in renamed:
        return TrlField(name=name, status="renamed", instead=renamed[name], note=note)
    return TrlField(name=name, status="same", note=note)


def trl_fields() -> tuple[TrlField, ...]:
    """All rows, by name."""
    return tuple(trl_field(name) for name in sorted(set().union(*TRL_DEFAULTS.values())))
