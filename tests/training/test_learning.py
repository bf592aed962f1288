"""Runs whose reward must rise: the demo's, from an environment alone."""

from __future__ import annotations

from statistics import fmean

import pytest
import torch

from envgrad import GRPOTrainer, RLOOConfig, RLOOTrainer
from envgrad.cli.demo import DEFAULT_STEPS, demo_config
from envgrad.starter.compass import Compass, baselines


@pytest.mark.slow
def test_the_starter_learns_to_read_the_compass(tmp_path):
    torch.set_num_threads(1)
    config = demo_config(tmp_path, seed=0, steps=DEFAULT_STEPS)
    trainer = GRPOTrainer("starter", args=config, environment_factory=Compass)
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert rewards[0] <= 0.3 and fmean(rewards[-5:]) >= 0.9
    played = trainer.play_eval()
    success = fmean(group.episodes[0].reward for group in played.groups)
    blind = baselines([group.task.seed for group in played.groups], "eval").reply_blind
    assert len(played.groups) == 200 and success > blind + 0.3


@pytest.mark.slow
def test_rloo_learns_the_same(tmp_path):
    torch.set_num_threads(1)
    config = RLOOConfig(
        output_dir=str(tmp_path), max_steps=44, seed=0, per_device_train_batch_size=256, num_generations=16,
        max_completion_length=128, max_turns=8, learning_rate=1e-3, lr_scheduler_type="constant", adam_beta2=0.99,
        beta=0.0, normalize_advantages=True, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
        use_cpu=True, bf16=False, log_episodes=False, deterministic=True,
    )  # fmt: skip
    trainer = RLOOTrainer("starter", args=config, environment_factory=Compass)
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert rewards[0] <= 0.3 and fmean(rewards[-3:]) >= 0.5
