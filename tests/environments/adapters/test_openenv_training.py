"""The starter model is trained through servers: five steps of GRPO each, and both kinds in one mixture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from envgrad import GRPOConfig, GRPOTrainer
from envgrad.environments.adapters import OpenEnvEnvironment, OpenRewardEnvironment
from envgrad.environments.adapters.openenv_server import Server

TESTS = str(Path(__file__).parents[2])


def train(folder: Path, environments: object, **options: object) -> GRPOTrainer:
    given: dict[str, object] = {
        "output_dir": str(folder), "max_steps": 5, "per_device_train_batch_size": 8, "num_generations": 4,
        "max_completion_length": 160, "max_turns": 4, "report_to": "none", "save_strategy": "no",
        "disable_tqdm": True, "use_cpu": True, "max_concurrent_episodes": 8, "logging_steps": 1,
    }  # fmt: skip
    args = GRPOConfig(**(given | options))  # type: ignore[arg-type]
    trainer = GRPOTrainer("starter", args=args, environment_factory=environments)  # type: ignore[arg-type]
    trainer.train()
    assert trainer.state.global_step == 5
    return trainer


def test_openenv(tmp_path: Path) -> None:
    factory = OpenEnvEnvironment(
        start="helpers.openenv_apps:guess", folder=TESTS, prompt="Guess the number.", reward="sum"
    )
    trainer = train(tmp_path, factory)
    records = list(trainer.episode_log.read())  # type: ignore[union-attr]
    assert len(records) == 40 and {record["reward"] for record in records} <= {0.0, 1.0}
    assert any(record["turns"] for record in records)


def test_a_mixture_with_openreward(tmp_path: Path) -> None:
    pytest.importorskip("openreward")
    server = Server("helpers.openreward_apps:sums", python=None, folder=TESTS, timeout=60)
    try:
        words: Callable[[], object] = OpenEnvEnvironment(
            start="helpers.openenv_apps:guess", folder=TESTS, prompt="Guess."
        )
        trainer = train(tmp_path, {"guess": words, "sums": OpenRewardEnvironment("sums", server.url)})
    finally:
        server.stop()
    played = Counter(record["environment"] for record in trainer.episode_log.read())  # type: ignore[union-attr]
    assert played == {"guess": 20, "sums": 20}
