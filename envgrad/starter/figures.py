"""What the starter can do before any training by reward: how often its turns are well-formed calls, and its success."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from envgrad.config import GRPOConfig
from envgrad.training.trainers import GRPOTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Means over episodes that were sampled at temperature 1, one for each task."""

    environment: str
    episodes: int
    success: float
    """mean reward"""
    well_formed: float
    """share of turns whose calls all name a tool, fit its schema and run without an error"""

    def __str__(self) -> str:
        return (
            f"{self.environment}: success {self.success:.3f}, well-formed turns {self.well_formed:.3f}, "
            f"over {self.episodes} episodes"
        )


def measure(model: Path, name: str, factory: Callable[[], object], *, tasks: int, seed: int = 0) -> Figures:
    """Play ``tasks`` tasks of an environment with the model in the folder ``model``.

    Raises:
        ConfigurationError: the model or the environment cannot be used.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            max_steps=1,
            eval_tasks=tasks,
            max_completion_length=256,
            max_turns=8,
            max_concurrent_episodes=128,
            seed=seed,
            log_episodes=False,
            report_to="none",
        )
        trainer = GRPOTrainer(model, args=config, environment_factory=factory)
        try:
            groups = trainer.play_eval().groups
        finally:
            trainer.close()
    episodes = [episode for group in groups for episode in group.episodes]
    turns = [turn for episode in episodes for turn in episode.turns]
    formed = [bool(turn.outcomes) and all(outcome.ok for outcome in turn.outcomes) for turn in turns]
    return Figures(
        environment=name,
        episodes=len(episodes),
        success=sum(episode.reward or 0.0 for episode in episodes) / len(episodes),
        well_formed=sum(formed) / len(formed),
    )
