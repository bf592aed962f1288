"""Configurations of GRPO and RLOO: each field reaches the algorithm, or is refused."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from envgrad.algorithms.grpo import GRPO
from envgrad.algorithms.rloo import RLOO
from envgrad.config import GRPOConfig, RLOOConfig
from envgrad.errors import ConfigurationError


def grpo(tmp_path: Path, **changes: object) -> GRPOConfig:
    return GRPOConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", **changes)  # type: ignore[arg-type]


def rloo(tmp_path: Path, **changes: object) -> RLOOConfig:
    return RLOOConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", **changes)  # type: ignore[arg-type]


def test_every_field_of_the_algorithm_is_a_field_of_the_configuration(tmp_path: Path) -> None:
    for algorithm, config in ((GRPO, grpo(tmp_path)), (RLOO, rloo(tmp_path))):
        names = {field.name: field.default for field in fields(algorithm) if field.init}
        if algorithm is GRPO:
            names["credit"] = names.pop("credit_level")
        for name, default in names.items():
            if name != "max_completion_length":
                assert getattr(config, name) == default, name
    assert grpo(tmp_path).algorithm() == GRPO(max_completion_length=512)
    assert rloo(tmp_path).algorithm() == RLOO()


def test_fields_reach_the_algorithm(tmp_path: Path) -> None:
    config = grpo(
        tmp_path, credit="turn", turn_discount=0.5, loss_type="sapo", sapo_temperature_neg=2.0, scale_rewards=False,
        off_policy_mask_threshold=0.5, top_entropy_quantile=0.2, use_adaptive_entropy=True, entropy_target=1.5,
        reward_weights={"turns": 2.0}, max_completion_length=64,
    )  # fmt: skip
    assert config.algorithm() == GRPO(
        credit_level="turn", turn_discount=0.5, loss_type="sapo", sapo_temperature_neg=2.0, scale_rewards="none",
        off_policy_mask_threshold=0.5, top_entropy_quantile=0.2, use_adaptive_entropy=True, entropy_target=1.5,
        reward_weights={"turns": 2.0}, max_completion_length=64,
    )  # fmt: skip
    assert config.algorithm().controller is not config.algorithm().controller
    found = rloo(tmp_path, beta=0.0, reward_clip_range=[-1, 1], normalize_advantages=True, epsilon_high=0.3).algorithm()
    assert found == RLOO(beta=0.0, reward_clip_range=(-1.0, 1.0), normalize_advantages=True, epsilon_high=0.3)


def test_reward_weights_that_the_rollout_applies_are_not_the_algorithms(tmp_path: Path) -> None:
    assert grpo(tmp_path, reward_weights={"style": 2.0}).algorithm().reward_weights is None
    by_position = grpo(tmp_path, reward_weights=[2.0], multi_objective_aggregation="normalize_then_sum")
    assert by_position.algorithm().reward_weights is None  # until the trainer knows the functions' names


def test_the_samplers_ratio(tmp_path: Path) -> None:
    assert grpo(tmp_path).correction_mode() == "token_truncate"
    assert rloo(tmp_path).correction_mode() == "sequence_truncate"
    assert grpo(tmp_path, sampler_ratio_mode="none").correction_mode() is None
    named_by_trl = grpo(tmp_path, vllm_importance_sampling_mode="sequence_mask", vllm_importance_sampling_clip_min=0.5)
    assert (named_by_trl.sampler_ratio_mode, named_by_trl.sampler_ratio_min) == ("sequence_mask", 0.5)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (grpo, {"sampler_ratio_mode": "token"}, "sampler_ratio_mode='token' is not known"),
        (grpo, {"sampler_ratio_cap": 0.5}, "sampler_ratio_cap=0.5 must be at least 1"),
        (grpo, {"sampler_ratio_min": 1.0}, r"sampler_ratio_min=1.0 must be in \[0, 1\)"),
        (grpo, {"sampler_ratio_cap": None}, "sampler_ratio_mode='token_truncate' truncates to nothing"),
        (grpo, {"sampler_ratio_mode": "none", "sampler_ratio_min": 0.5}, "sampler_ratio_min=0.5 cannot act"),
        (grpo, {"sampler_ratio_mode": "sequence_mask", "loss_type": "vespo"}, "cannot act in loss_type='vespo'"),
        (grpo, {"num_generations": 1}, "num_generations=1 must be at least 2"),
        (grpo, {"credit": "token"}, "credit='token' must be one of episode, turn"),
        (rloo, {"sampler_ratio_mode": "token_mask"}, "sampler_ratio_mode='token_mask' cannot act in RLOO"),
        (rloo, {"num_generations": 1}, "num_generations=1 must be at least 2"),
        (rloo, {"reward_clip_range": 3.0}, "reward_clip_range=3.0 must be two numbers"),
        (rloo, {"reward_clip_range": (3.0, 1.0)}, r"must be \(low, high\) with low < high"),
    ],
)
def test_what_cannot_work_is_named(tmp_path: Path, config, changes: dict[str, object], message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError, match=message):
        config(tmp_path, **changes)
