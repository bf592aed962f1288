"""A run beside its rollouts whose reward must rise to what the demo's reaches."""

from __future__ import annotations

from dataclasses import fields
from statistics import fmean

import pytest
import torch

from envgrad import AsyncGRPOTrainer, GRPOConfig
from envgrad.cli.demo import DEFAULT_STEPS, demo_config
from envgrad.starter.compass import Compass


@pytest.mark.slow
def test_the_starter_learns_to_read_the_compass_beside_its_rollouts(tmp_path):
    torch.set_num_threads(1)
    # What is sampled with which weights depends on the clock, and the demo's reward is still rising at its end.
    demo = demo_config(tmp_path, seed=0, steps=DEFAULT_STEPS * 3 // 2)
    given = {f.name: getattr(demo, f.name) for f in fields(GRPOConfig) if f.init}
    given |= {"asynchronous": True, "max_staleness": 1, "deterministic": False}
    trainer = AsyncGRPOTrainer("starter", args=GRPOConfig(**given), environment_factory=Compass)
    trainer.train()
    history = trainer.state.log_history
    rewards = [entry["reward"] for entry in history if "reward" in entry]
    assert rewards[0] <= 0.3 and fmean(rewards[-5:]) >= 0.85
    ages = [entry["async/staleness_mean"] for entry in history if "async/staleness_mean" in entry]
    assert max(ages) <= 1 and fmean(ages) > 0.3, "it did train on samples of older weights"
