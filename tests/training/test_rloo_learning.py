"""A run of RLOO, with its KL in the reward, whose reward must rise."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Literal

import pytest
import torch

from envgrad.config import RLOOConfig
from envgrad.training.trainers import RLOOTrainer


class Favourite:
    """One of four directions pays; the task does not say which."""

    def reset(self) -> str:
        self.moved = ""
        return "Choose a direction."

    def move(self, direction: Literal["north", "south", "east", "west"]) -> str:
        """
        Choose.

        Args:
            direction: Which one.
        """
        self.moved = direction
        return "done"

    @property
    def done(self) -> bool:
        return bool(self.moved)

    def get_reward(self) -> float:
        return float(self.moved == "west")


@pytest.mark.slow
def test_the_starter_finds_the_direction_that_pays(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    args = RLOOConfig(
        output_dir=str(tmp_path), max_steps=20, per_device_train_batch_size=64, num_generations=8,
        max_completion_length=48, learning_rate=2e-3, beta=0.02, lr_scheduler_type="constant", logging_steps=1,
        report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True, log_episodes=False, seed=0,
    )  # fmt: skip
    trainer = RLOOTrainer("starter", args=args, environment_factory=Favourite)
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert fmean(rewards[:3]) < 0.6 and fmean(rewards[-3:]) > 0.85, rewards
    assert max(entry["kl"] for entry in trainer.state.log_history if "kl" in entry) > 0.01
