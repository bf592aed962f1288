"""Scripted episodes through adapters, played as the rollout plays them, without a model."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envgrad.environments.isolation import Stream
from envgrad.environments.sources import hash63

if TYPE_CHECKING:
    from envgrad import GRPOTrainer

WHOLE = os.environ.get("ENVGRAD_ECOSYSTEMS") == "whole"
"""whether all of an ecosystem is played, or a fixed part of it"""


@dataclass(slots=True)
class Sibling:
    """One sibling of a group in an environment that reads free text; its generators are its own."""

    episode: Any
    group: int
    player: Callable[[list[str], random.Random], str]
    """what was read so far -> the answer"""
    log: list[object] = field(default_factory=list)
    read: list[str] = field(default_factory=list)
    over: bool = False

    def __post_init__(self) -> None:
        self._stream = Stream(hash63("generators", self.group))
        self._random = random.Random(7)

    _stream: Stream = field(init=False)
    _random: random.Random = field(init=False)

    def start(self) -> None:
        opening = self._stream.run(lambda: self.episode.reset(seed=self.group))
        self.read.append(opening[-1]["content"])
        self.log.append(opening)
        self.over = self.episode.done

    def turn(self) -> None:
        if self.over:
            return
        answer = self.player(self.read, self._random)
        result = self._stream.run(lambda: self.episode.step(answer))
        self.read.append(result.observation)
        self.log.append((answer, result.observation, result.done))
        self.over = result.done

    @property
    def reward(self) -> float | None:
        return self._stream.run(self.episode.get_reward)

    @property
    def turns(self) -> int:
        return len(self.log) - 1


def play_together(siblings: list[Sibling], most_turns: int) -> None:
    """Turn by turn, so that each one's calls stand between those of the others."""
    for sibling in siblings:
        sibling.start()
    for _ in range(most_turns):
        for sibling in siblings:
            sibling.turn()


def five_steps(folder: Path, environments: object, **changes: object) -> GRPOTrainer:
    """Five steps of GRPO with the starter model, which all succeed; the trainer, whose episode log is whole."""
    from envgrad import GRPOConfig, GRPOTrainer

    options: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 5, "per_device_train_batch_size": 8, "num_generations": 4,
        "max_completion_length": 160, "max_turn_tokens": 12, "max_turns": 3, "report_to": "none", "use_cpu": True,
        "logging_steps": 1, "disable_tqdm": True, "save_strategy": "no",
    }  # fmt: skip
    config = GRPOConfig(**(options | changes))
    trainer = GRPOTrainer("starter", args=config, environment_factory=environments)  # type: ignore[arg-type]
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert trainer.state.global_step == 5 and len(logs) == 5
    assert all(math.isfinite(entry["reward"]) for entry in logs)
    assert not any(entry.get("group/start_mismatch") for entry in logs)
    # Other seats of the policy's are further records of the same episodes.
    records = [record for record in trainer.episode_log.read() if not record.get("part")]  # type: ignore[union-attr]
    assert len(records) == 5 * config.per_device_train_batch_size
    assert all(record["reward"] is not None for record in records)
    return trainer
