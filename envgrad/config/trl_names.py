"""Fields that configurations have for scripts written for trl: they set one of ours, or are refused when set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from envgrad.config.trl_fields import TRL_REFUSED, TRL_RENAMED
from envgrad.errors import ConfigurationError

GENERATION_KEYS: dict[str, str] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_turn_tokens",
    "max_tokens": "max_turn_tokens",
    "stop_strings": "stop_strings",
    "stop": "stop_strings",
}
"""keys of ``generation_kwargs``, as ``GenerationConfig`` and vLLM's ``SamplingParams`` have them -> the fields set"""

FIXED_KEYS: dict[str, object] = {"do_sample": True, "num_beams": 1, "num_return_sequences": 1, "n": 1}
"""keys of ``generation_kwargs`` that can only be what they are here"""


def _refused(name: str) -> dict[str, str]:
    return {"help": f"Not supported: {TRL_REFUSED[name]}."}


def _renamed(name: str) -> dict[str, str]:
    return {"help": f"Name that trl has for {TRL_RENAMED[name]}."}


@dataclass
class TrlNames:
    """The names. ``TRL_DEFAULTS`` has the defaults that they are compared with."""

    generation_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Sampling options as generate() spells them; they win over the fields here."}
    )
    router_aux_loss_coef: float | None = field(default=None, metadata=_refused("router_aux_loss_coef"))
    cast_lm_head_to_fp32: bool = field(default=False, metadata=_refused("cast_lm_head_to_fp32"))
    ds3_gather_for_generation: bool = field(default=True, metadata=_refused("ds3_gather_for_generation"))
    pad_to_multiple_of: int | str | None = field(default=None, metadata=_refused("pad_to_multiple_of"))
    cache_implementation: str | None = field(default=None, metadata=_refused("cache_implementation"))
    use_transformers_continuous_batching: bool = field(
        default=False, metadata=_refused("use_transformers_continuous_batching")
    )
    transformers_continuous_batching_config: dict[str, Any] | str | None = field(
        default=None, metadata=_refused("transformers_continuous_batching_config")
    )
    use_transformers_paged: bool = field(default=False, metadata=_refused("use_transformers_paged"))
    log_multimodal: bool = field(default=True, metadata=_refused("log_multimodal"))
    log_completions_hub_repo: str | None = field(default=None, metadata=_refused("log_completions_hub_repo"))
    vllm_model_impl: str = field(default="vllm", metadata=_refused("vllm_model_impl"))
    vllm_enable_sleep_mode: bool = field(default=False, metadata=_refused("vllm_enable_sleep_mode"))
    vllm_structured_outputs_regex: str | None = field(default=None, metadata=_refused("vllm_structured_outputs_regex"))
    vllm_gpu_memory_utilization: float = field(default=0.3, metadata=_refused("vllm_gpu_memory_utilization"))
    vllm_max_model_length: int | None = field(default=None, metadata=_refused("vllm_max_model_length"))
    vllm_tensor_parallel_size: int = field(default=1, metadata=_refused("vllm_tensor_parallel_size"))
    vllm_importance_sampling_correction: bool | None = field(
        default=None, metadata=_renamed("vllm_importance_sampling_correction")
    )
    vllm_importance_sampling_mode: str | None = field(default=None, metadata=_renamed("vllm_importance_sampling_mode"))
    vllm_importance_sampling_clip_max: float | None = field(
        default=None, metadata=_renamed("vllm_importance_sampling_clip_max")
    )
    vllm_importance_sampling_clip_min: float | None = field(
        default=None, metadata=_renamed("vllm_importance_sampling_clip_min")
    )
    vllm_importance_sampling_cap: float | None = field(default=None, metadata=_renamed("vllm_importance_sampling_cap"))

    def refused_by_trl_names(self) -> None:
        """
        Raises:
            ConfigurationError: a field of trl is set that cannot act here, with what to do instead.
        """
        allowed: dict[str, tuple[object, ...]] = {
            "router_aux_loss_coef": (None, 0.0),
            "pad_to_multiple_of": (None, "auto"),
        }
        for name, reason in TRL_REFUSED.items():
            value = getattr(self, name)
            if value not in allowed.get(name, (TrlNames.__dataclass_fields__[name].default,)):
                raise ConfigurationError(f"{name}={value!r} is an option of trl that cannot act in envgrad: {reason}")

    def set_by_trl_names(self) -> dict[str, tuple[str, object]]:
        """Our fields that trl's names set: ``{ours: (name that sets it, value)}``.

        Raises:
            ConfigurationError: a key of ``generation_kwargs`` that sampling does not have here.
        """
        found: dict[str, tuple[str, object]] = {}
        values = self.generation_kwargs if isinstance(self.generation_kwargs, Mapping) else {}
        for key, value in values.items():
            if key in GENERATION_KEYS:
                stop_list = GENERATION_KEYS[key] == "stop_strings" and isinstance(value, str)
                found[GENERATION_KEYS[key]] = (f"generation_kwargs[{key!r}]", [value] if stop_list else value)
            elif key not in FIXED_KEYS or FIXED_KEYS[key] != value:
                rule = f"it must be {FIXED_KEYS[key]!r}" if key in FIXED_KEYS else "sampling has no such option here"
                raise ConfigurationError(
                    f"generation_kwargs={dict(values)!r}: {key}={value!r} cannot act, {rule}; the keys are "
                    f"{', '.join(GENERATION_KEYS)}"
                )
        for name, ours in TRL_RENAMED.items():
            value = getattr(self, name)
            if value is None:
                continue
            if name == "vllm_importance_sampling_correction":
                if value is False:
                    found[ours] = (name, "none")
            elif found.get(ours, (name, None))[1] != "none":
                found[ours] = (name, value)
        return found
