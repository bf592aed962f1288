"""Training from several sampler processes, which share the groups."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from envgrad import ConfigurationError
from envgrad.sampling.replicas import ReplicaSampler
from envgrad.training.rollouts import Rollouts
from helpers.models import Letters, flat, tiny_llama
from helpers.trainers import Kind, logged

OPTIONS = {
    "max_steps": 3, "deterministic": True, "per_device_train_batch_size": 8, "num_generations": 2,
    "max_completion_length": 24, "learning_rate": 0.02,
}  # fmt: skip


def test_two_processes_train_what_one_local_sampler_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samplers: list[object] = []
    make_sampler = Rollouts._make_sampler
    monkeypatch.setattr(
        Rollouts, "_make_sampler", lambda self, most: samplers.append(made := make_sampler(self, most)) or made
    )
    weights, rewards = [], []
    for name, own in (("local", {}), ("two", {"sampler": "process", "sampler_processes": 2, "sampler_threads": 1})):
        trainer = Kind("GRPO").make(
            tmp_path / name, tiny_llama(), environment_factory=Letters, options=OPTIONS | own
        )  # fmt: skip
        trainer.train()
        weights.append(flat(trainer.model))
        rewards.append(logged(trainer, "reward"))
    assert isinstance(samplers[1], ReplicaSampler) and not isinstance(samplers[0], ReplicaSampler)
    assert rewards[0] == pytest.approx(rewards[1], abs=1e-6) and max(rewards[0]) > 0
    assert torch.allclose(*weights, atol=1e-4), "draws do not depend on who is sampled beside whom"


def test_processes_that_nobody_would_start_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="sampler_processes=2 acts only with sampler='process'"):
        Kind("GRPO").config(tmp_path, sampler_processes=2)
    with pytest.raises(ConfigurationError, match="sampler_processes"):
        Kind("GRPO").config(tmp_path, sampler="process", sampler_processes=0)
