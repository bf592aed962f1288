"""Algorithms and their options through whole runs of a trainer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from envgrad import GRPOTrainer
from envgrad.algorithms.custom import custom
from envgrad.config import RLOOConfig
from envgrad.losses import LossInputs
from envgrad.training.trainers import RLOOTrainer
from helpers.models import Constant, Letters, config, flat, tiny_llama, tokenizer_of


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def run(tmp_path: Path, environment: type = Letters, algorithm: object = None, model: Any = None, **changes: object):  # type: ignore[no-untyped-def]
    trainer = GRPOTrainer(
        tiny_llama() if model is None else model, args=config(tmp_path, **changes), environment_factory=environment,
        processing_class=tokenizer_of(), algorithm=algorithm,
    )  # fmt: skip
    trainer.train()
    return trainer


def moved(trainer: Any) -> bool:
    after = flat(trainer.model)
    return bool(torch.isfinite(after).all()) and not torch.equal(after, flat(tiny_llama()))


def rloo_config(tmp_path: Path, **changes: object) -> RLOOConfig:
    options: dict[str, object] = {
        "output_dir": str(tmp_path), "max_steps": 2, "per_device_train_batch_size": 8, "num_generations": 4,
        "max_completion_length": 12, "learning_rate": 0.05, "lr_scheduler_type": "constant", "logging_steps": 1,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True,
    }  # fmt: skip
    return RLOOConfig(**(options | changes))  # type: ignore[arg-type]


def run_rloo(tmp_path: Path, environment: type = Letters, **changes: object) -> RLOOTrainer:
    trainer = RLOOTrainer(
        tiny_llama(), args=rloo_config(tmp_path, **changes), environment_factory=environment,
        processing_class=tokenizer_of(),
    )  # fmt: skip
    trainer.train()
    return trainer


def test_rloo_trains_with_the_kl_in_the_reward(tmp_path: Path) -> None:
    trainer = run_rloo(tmp_path)
    assert moved(trainer)
    kl = logged(trainer, "kl")
    assert kl[0] == pytest.approx(0.0, abs=1e-5) and abs(kl[1]) > 1e-3, "the reference is the policy as it began"
    assert logged(trainer, "ratio/max")[0] == pytest.approx(1.0, abs=1e-4)
    for name in ("clip_ratio/low_mean", "clip_ratio/high_max", "clip_ratio/region_mean", "entropy", "reward"):
        assert len(logged(trainer, name)) == 2, name
    assert logged(trainer, "loss") != [0.0, 0.0]


def test_rloo_moves_nothing_where_rewards_are_equal_and_the_policy_is_the_reference(tmp_path: Path) -> None:
    trainer = run_rloo(tmp_path, environment=Constant)
    assert not moved(trainer) and logged(trainer, "loss") == [0.0, 0.0]


def test_rloo_without_a_reference(tmp_path: Path) -> None:
    trainer = run_rloo(tmp_path, beta=0.0, normalize_advantages=True, reward_clip_range=(0.0, 0.75), num_iterations=2)
    assert trainer.preparation.reference is None and moved(trainer) and not logged(trainer, "kl")


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_type": "sapo"},
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"loss_type": "vespo", "beta": 0.1},
        {"top_entropy_quantile": 0.3, "entropy_coef": 0.01},
        {"off_policy_mask_threshold": 0.01},
    ],
)
def test_options_train_over_two_passes(tmp_path: Path, changes: dict[str, object]) -> None:
    trainer = run(tmp_path, num_iterations=2, max_tokens_per_microbatch=64, **changes)
    assert moved(trainer) and all(math.isfinite(loss) for loss in logged(trainer, "loss"))
    if "off_policy_mask_threshold" in changes:
        shares = logged(trainer, "off_policy_mask_ratio")
        assert shares[0] == 0.0 and shares[1] > 0.0, "the second pass finds a policy that has moved"
    if "top_entropy_quantile" in changes:
        assert all(
            high > mean
            for high, mean in zip(logged(trainer, "entropy/selected"), logged(trainer, "entropy"), strict=True)
        )


def test_how_a_step_is_packed_changes_nothing_with_selected_tokens(tmp_path: Path) -> None:
    weights = [
        flat(run(tmp_path / str(budget), max_steps=1, max_tokens_per_microbatch=budget, top_entropy_quantile=0.3).model)
        for budget in (16384, 40)
    ]
    assert torch.allclose(*weights, atol=1e-3)  # Adam's first step is of the sign


class Paid(Letters):
    """Two turns: the first is paid at once, and an answer in the end."""

    def __init__(self) -> None:
        self.count = 0

    def reset(self, seed: int) -> str:
        self.count = 0
        return super().reset(seed)

    def step(self, message: str):  # type: ignore[no-untyped-def]
        result = super().step(message)
        self.count += 1
        return type(result)("go on", reward=result.reward, done=self.count == 2)

    def get_reward(self) -> dict[str, float]:
        return {"even": float(self.count), "short": 1.0}


def test_turns_have_advantages_of_their_own(tmp_path: Path) -> None:
    trainer = run(tmp_path, environment=Paid, credit="turn", max_steps=1, max_completion_length=60, max_turn_tokens=8)
    assert moved(trainer) and trainer.last_round is not None
    samples = trainer.algorithm.credit(trainer.last_round.groups)
    apart = [
        sample
        for sample in samples
        if sample.episode is not None and len({a for a, m in zip(sample.advantages, sample.mask, strict=True) if m}) > 1
    ]
    assert apart, "no episode had turns of different credit"


def test_components_are_normalised_apart_and_weighted_by_the_configuration(tmp_path: Path) -> None:
    weights = {"turns": 2.0, "even": 0.5}
    trainer = run(
        tmp_path,
        environment=Paid,
        multi_objective_aggregation="normalize_then_sum",
        reward_weights=weights,
        max_steps=1,
    )
    assert moved(trainer) and trainer.algorithm.reward_weights == weights  # type: ignore[attr-defined]


def test_a_loss_and_advantages_of_ones_own_train(tmp_path: Path) -> None:
    def reinforce(inputs: LossInputs) -> Tensor:
        return -inputs.advantages * inputs.logprobs

    def centred(rewards: list[list[float | None]]) -> list[list[float]]:
        return [[(r or 0.0) - sum(x or 0.0 for x in group) / len(group) for r in group] for group in rewards]

    trainer = run(tmp_path, algorithm=reinforce)
    assert moved(trainer) and logged(trainer, "ratio/max")[0] == pytest.approx(1.0, abs=1e-4)
    both = run(tmp_path, algorithm=custom(advantages=centred, loss=reinforce))
    assert moved(both) and not torch.equal(flat(both.model), flat(trainer.model))


def test_a_run_resumed_goes_on_with_the_adapted_coefficient(tmp_path: Path) -> None:
    changes: dict[str, object] = {
        "use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_coef_delta": 0.05, "entropy_target": 100.0,
        "save_strategy": "steps", "save_steps": 1, "deterministic": True, "max_steps": 3,
    }  # fmt: skip
    whole = run(tmp_path / "whole", **changes)
    assert logged(whole, "entropy_coef") == pytest.approx([0.1, 0.15, 0.2])
    run(tmp_path / "cut", **(changes | {"max_steps": 1}))
    trainer = GRPOTrainer(
        tiny_llama(), args=config(tmp_path / "cut", **changes), environment_factory=Letters,
        processing_class=tokenizer_of(),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=True)
    assert torch.equal(flat(whole.model), flat(trainer.model))
    assert trainer.algorithm.state_dict() == whole.algorithm.state_dict()
