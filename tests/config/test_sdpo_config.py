from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from envgrad.algorithms.demonstrations import Reprompting
from envgrad.algorithms.grpo import GRPO
from envgrad.algorithms.sdpo import SDPO
from envgrad.config import SDPOConfig
from envgrad.divergence import Divergence
from envgrad.errors import ConfigurationError


def config(tmp_path: Path, **changes: Any) -> SDPOConfig:
    return SDPOConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", **changes)


def test_the_defaults_are_the_algorithms(tmp_path: Path) -> None:
    found = config(tmp_path)
    assert found.algorithm() == SDPO(policy=GRPO(max_completion_length=256))
    assert found.disable_dropout and found.num_generations == 8


def test_every_field_reaches_the_algorithm(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "distillation_weight": 0.5, "distillation_is_clip": None, "teacher_update_rate": 0.2, "teacher_sync_steps": 3,
        "diagnostics_warning_interval": 0, "diagnostics_flat_tolerance": 0.1,
    }  # fmt: skip
    shown: dict[str, Any] = {
        "success_reward_threshold": 0.5, "dont_reprompt_on_self_success": False, "include_environment_feedback": True,
        "environment_feedback_only_without_solution": True, "remove_thinking_from_demonstration": True,
        "max_reprompt_len": 99, "reprompt_template": "{feedback}{solution}{prompt}",
        "solution_template": "s {successful_previous_attempt}", "feedback_template": "f {feedback_raw}",
    }  # fmt: skip
    policy: dict[str, Any] = {
        "loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.3, "importance_sampling_level": "sequence",
        "beta": 0.2, "mask_truncated_completions": True, "max_completion_length": 64,
    }  # fmt: skip
    found = config(
        tmp_path, distillation_mode="topk_logits", distillation_topk=7, distillation_alpha=0.5,
        distillation_add_tail=True, scale_rewards=False, **given, **shown, **policy,
    )  # fmt: skip
    assert found.algorithm() == SDPO(
        policy=GRPO(scale_rewards="none", **policy),
        divergence=Divergence(mode="topk_logits", topk=7, alpha=0.5, add_tail=True),
        reprompting=Reprompting(**shown),
        **given,
    )
    assert config(tmp_path, teacher_model_kind="base").algorithm().teacher_model_kind == "base"
    assert (
        not config(tmp_path, use_successful_as_teacher=False, include_environment_feedback=True)
        .algorithm()
        .reprompting.use_successful_as_teacher
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_prompt_length": 512}, "max_prompt_length=512 cannot act in envgrad: .*set max_context"),
        ({"use_teacher_server": True}, "use_teacher_server=True cannot act"),
        ({"num_generations": 1}, "num_generations=1 must be at least 2"),
        ({"distillation_mode": "topk_logits"}, "distillation_topk=None"),
        ({"beta": 0.1}, "beta=0.1 cannot act: distillation_weight=1.0"),
        ({"use_vllm": True}, "use_vllm=True"),
    ],
)
def test_options_that_cannot_work_are_errors(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        config(tmp_path, **options)
