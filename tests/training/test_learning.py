"""Runs whose reward must rise: the demo's, from an environment alone."""

from __future__ import annotations

from statistics import fmean

import pytest
import torch

from envgrad import GRPOTrainer
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
