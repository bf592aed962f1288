"""Every field of trl's configurations acts as there, or is refused with what to do instead."""

from __future__ import annotations

from dataclasses import fields

import pytest
from transformers import TrainingArguments

from envgrad.config import REFUSED, AsyncGRPOConfig, GRPOConfig, RLOOConfig, RolloutConfig, SDPOConfig
from envgrad.config.trl_fields import TRL_DEFAULTS, TRL_NOTES, TRL_REFUSED, TRL_RENAMED, trl_field, trl_fields
from envgrad.errors import ConfigurationError

CONFIGS: dict[str, type[RolloutConfig]] = {
    "GRPOConfig": GRPOConfig,
    "RLOOConfig": RLOOConfig,
    "SDPOConfig": SDPOConfig,
    "AsyncGRPOConfig": AsyncGRPOConfig,
}

OTHER_VALUES = {
    "cache_implementation": "static",
    "cast_lm_head_to_fp32": True,
    "ds3_gather_for_generation": False,
    "log_completions_hub_repo": "me/completions",
    "log_multimodal": False,
    "pad_to_multiple_of": 8,
    "router_aux_loss_coef": 0.01,
    "transformers_continuous_batching_config": {"block_size": 32},
    "use_transformers_continuous_batching": True,
    "use_transformers_paged": True,
    "vllm_enable_sleep_mode": True,
    "vllm_gpu_memory_utilization": 0.5,
    "vllm_max_model_length": 100,
    "vllm_model_impl": "transformers",
    "vllm_structured_outputs_regex": "a+",
    "vllm_tensor_parallel_size": 2,
}


def make(tmp_path, config=GRPOConfig, **changes):
    return config(output_dir=str(tmp_path), max_steps=1, report_to="none", use_cpu=True, **changes)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_trl_has_by_default_is_accepted_in_words(tmp_path, name):
    given = {field: value for field, value in TRL_DEFAULTS[name].items() if field != "max_prompt_length"}
    config = make(tmp_path, CONFIGS[name], **given)
    assert config.gradient_checkpointing and config.num_generations == TRL_DEFAULTS[name]["num_generations"]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_field_of_trl_is_a_field_here(name):
    here = {f.name for f in fields(CONFIGS[name])}
    assert not set(TRL_DEFAULTS[name]) - here


@pytest.mark.parametrize("name", CONFIGS)
def test_names_and_defaults_are_those_of_trl_where_it_is_installed(name):
    trl = pytest.importorskip("trl")
    experimental = {"SDPOConfig": "trl.experimental.sdpo", "AsyncGRPOConfig": "trl.experimental.async_grpo"}
    theirs = getattr(pytest.importorskip(experimental[name]) if name in experimental else trl, name)
    plain = {f.name: repr(f.default) for f in fields(TrainingArguments)}
    own = {
        f.name: f.default
        for f in fields(theirs)
        if plain.get(f.name) != repr(f.default) or f.name in TRL_DEFAULTS[name]
    }
    assert own == TRL_DEFAULTS[name]


def test_every_refused_field_has_a_value_that_is_refused():
    assert set(OTHER_VALUES) == set(TRL_REFUSED)


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_a_field_that_cannot_act_is_refused_with_the_fix(tmp_path, name):
    with pytest.raises(ConfigurationError) as caught:
        make(tmp_path, **{name: OTHER_VALUES[name]})
    message = str(caught.value)
    assert message.startswith(f"{name}={OTHER_VALUES[name]!r}") and TRL_REFUSED[name] in message
    assert any(word in message for word in ("remove", "set", "upload", "score", "leave", "give"))


def test_the_table_knows_each_field_once_and_says_what_becomes_of_it():
    rows = trl_fields()
    assert len({row.name for row in rows}) == len(rows)
    assert set(TRL_NOTES) | set(TRL_RENAMED) | set(TRL_REFUSED) <= {row.name for row in rows}
    assert not set(TRL_REFUSED) & set(REFUSED)
    assert trl_field("max_prompt_length").status == "not supported"
    assert trl_field("temperature").status == "same"
    assert all(row.instead for row in rows if row.status != "same")


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"vllm_importance_sampling_mode": "token_mask"}, "sampler_ratio_mode", "token_mask"),
        ({"vllm_importance_sampling_clip_max": 2.0}, "sampler_ratio_cap", 2.0),
        ({"vllm_importance_sampling_cap": 5.0}, "sampler_ratio_cap", 5.0),
        ({"vllm_importance_sampling_clip_min": 0.5}, "sampler_ratio_min", 0.5),
        ({"vllm_importance_sampling_correction": False}, "sampler_ratio_mode", "none"),
        (
            {"vllm_importance_sampling_correction": False, "vllm_importance_sampling_mode": "token_mask"},
            "sampler_ratio_mode",
            "none",
        ),
        ({"max_tool_calling_iterations": 2}, "max_turns", 3),
    ],
)
def test_a_renamed_field_sets_ours(tmp_path, given, field, value):
    assert getattr(make(tmp_path, **given), field) == value


def test_two_names_of_one_field_must_agree(tmp_path):
    with pytest.raises(ConfigurationError, match=r"another name for sampler_ratio_cap=4.0"):
        make(tmp_path, vllm_importance_sampling_clip_max=2.0, sampler_ratio_cap=4.0)
    assert make(tmp_path, vllm_importance_sampling_clip_max=2.0, sampler_ratio_cap=2.0).sampler_ratio_cap == 2.0


def test_generation_kwargs_win_over_the_fields(tmp_path):
    config = make(
        tmp_path, temperature=0.7, top_k=3,
        generation_kwargs='{"temperature": 0.5, "max_new_tokens": 9, "stop": "END", "do_sample": true}',
    )  # fmt: skip
    assert (config.temperature, config.top_k, config.max_turn_tokens, config.stop_strings) == (0.5, 3, 9, ["END"])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"suppress_tokens": [1]}, "no such option"),
        ({"num_beams": 4}, "must be 1"),
        ({"do_sample": False}, "must be True"),
        ({"temperature": 0.0}, "temperature=0.0 must be above 0"),
    ],
)
def test_generation_kwargs_that_cannot_act_are_refused(tmp_path, given, words):
    with pytest.raises(ConfigurationError, match=words):
        make(tmp_path, generation_kwargs=given)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_completions_to_print": 3}, "acts only with log_completions=True"),
        ({"log_unique_prompts": True}, "acts only with log_completions=True"),
        ({"ref_model_sync_steps": 8}, "acts only with sync_ref_model=True"),
        ({"ref_model_mixup_alpha": 0.5}, "acts only with sync_ref_model=True"),
        ({"sync_ref_model": True, "ref_model_mixup_alpha": 1.5}, r"must be in \(0, 1\]"),
        ({"sync_ref_model": True, "ref_model_sync_steps": 0}, "at least 1"),
        ({"max_completion_length": None}, "max_completion_length=None"),
        ({"num_generations": None}, "num_generations=None"),
        ({"per_device_eval_batch_size": 3, "num_generations_eval": 4}, "must be at least 4"),
    ],
)
def test_what_cannot_work_names_the_rule(tmp_path, changes, words):
    with pytest.raises(ConfigurationError, match=words):
        make(tmp_path, **changes)


def test_summaries_show_a_batch_size_of_evaluation(tmp_path):
    assert make(tmp_path).eval_batch_size == 8
    assert make(tmp_path, per_device_eval_batch_size=5).to_sanitized_dict()["eval_batch_size"] == 5


def test_saved_arguments_can_be_read_again(tmp_path):
    config = make(tmp_path, generation_kwargs={"top_k": 4}, vllm_importance_sampling_clip_max=2.0)
    again = GRPOConfig(**{f.name: getattr(config, f.name) for f in fields(GRPOConfig) if f.init} | {
        "generation_batch_size": None, "steps_per_generation": None})  # fmt: skip
    assert (again.top_k, again.sampler_ratio_cap) == (4, 2.0)
