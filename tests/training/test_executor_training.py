"""Training with instances in processes of their own: the same as in threads, on every trainer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from envgrad.environments.contract import StepResult
from envgrad.errors import ConfigurationError, EnvironmentContractError
from helpers.models import flat, tiny_llama
from helpers.trainers import NAMES, Kind, logged
from helpers.zygote import gone


class Parity:
    """Draws its word from the global generator; paid by the share of letters of one parity, which it has drawn."""

    def reset(self) -> str:
        self.parity, self.hits = random.randrange(2), 0
        return f"Write {random.randrange(100)}."

    def step(self, message: str) -> StepResult:
        self.hits = sum(ord(letter) % 2 == self.parity for letter in message)
        return StepResult("ok", reward=self.hits / max(1, len(message)), done=True)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_threads(tmp_path: Path, name: str) -> None:
    seen: list[int] = []

    class Parity_(Parity):  # no other process could import it
        pass

    def bonus(environments: Any, **kwargs: Any) -> list[float]:
        seen.extend(one.hits for one in environments)
        return [0.01 * one.hits for one in environments]

    weights, rewards, pids = [], [], []
    for executor in ("thread", "process"):
        trainer = Kind(name).make(
            tmp_path / executor, model=tiny_llama(), environment_factory=Parity_, reward_funcs=bonus,
            options={"environment_executor": executor, "deterministic": True, "max_completion_length": 24},
        )  # fmt: skip
        pids += [factory.pid for factory in trainer.rollouts._processes]
        trainer.train()
        weights.append(flat(trainer.model))
        rewards.append(logged(trainer, "reward"))
        assert trainer.rollouts.tally.is_clean
    assert rewards[0] == rewards[1] and len(rewards[0]) == 2
    assert torch.equal(*weights)
    half = len(seen) // 2
    assert any(seen) and sorted(seen[:half]) == sorted(seen[half:])
    assert len(pids) == 1 and gone(pids[0]), "the server has ended with the training"


def test_what_cannot_act_or_cross_is_refused_at_construction(tmp_path: Path) -> None:
    process = {"environment_executor": "process"}
    with pytest.raises(ConfigurationError, match="environment_executor='process' cannot act: there is no environment"):
        Kind("GRPO").make(
            tmp_path, train_dataset=[{"prompt": "x"}], reward_funcs=lambda completions, **_: [0.0 for _ in completions],
            options=process,
        )  # fmt: skip

    class Judged(Parity):
        @classmethod
        def group_reward(cls, environments: Any) -> list[float]:
            return [0.0 for _ in environments]

    with pytest.raises(EnvironmentContractError, match="Judged has group_reward"):
        Kind("RLOO").make(tmp_path, environment_factory=Judged, options=process)


def test_a_trainer_that_is_evaluated_behind_its_training_starts_its_processes_anew(tmp_path: Path) -> None:
    class Local(Parity):
        pass

    trainer = Kind("GRPO").make(
        tmp_path, model=tiny_llama(), environment_factory=Local,
        options={"environment_executor": "process", "max_completion_length": 8, "eval_tasks": 2, "max_steps": 1},
    )  # fmt: skip
    trainer.train()
    assert "eval_reward" in trainer.evaluate()
    (factory,) = trainer.rollouts._processes
    assert factory.pid is None
