"""Policy gradients from environments.

Names are imported when they are first used, so ``import envgrad`` is instant and loads neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from envgrad.algorithms.base import Algorithm
    from envgrad.algorithms.grpo import GRPO
    from envgrad.config import GRPOConfig
    from envgrad.environments.contract import Environment, StepResult, ToolResult, tool
    from envgrad.errors import (
        ConfigurationError,
        EnvgradError,
        EnvironmentContractError,
        EnvironmentFailure,
        EpisodeDone,
        TooManyFailures,
    )
    from envgrad.training.trainer import RolloutTrainer
    from envgrad.training.trainers import GRPOTrainer
    from envgrad.types import Episode, Group, StopReason, Task, TrainingSample

__version__ = "0.1.0"

_HOME = {
    "Algorithm": "envgrad.algorithms.base",
    "ConfigurationError": "envgrad.errors",
    "EnvgradError": "envgrad.errors",
    "Environment": "envgrad.environments.contract",
    "EnvironmentContractError": "envgrad.errors",
    "EnvironmentFailure": "envgrad.errors",
    "Episode": "envgrad.types",
    "EpisodeDone": "envgrad.errors",
    "GRPO": "envgrad.algorithms.grpo",
    "GRPOConfig": "envgrad.config",
    "GRPOTrainer": "envgrad.training.trainers",
    "Group": "envgrad.types",
    "RolloutTrainer": "envgrad.training.trainer",
    "StepResult": "envgrad.environments.contract",
    "StopReason": "envgrad.types",
    "Task": "envgrad.types",
    "TooManyFailures": "envgrad.errors",
    "ToolResult": "envgrad.environments.contract",
    "TrainingSample": "envgrad.types",
    "tool": "envgrad.environments.contract",
}

__all__ = [
    "GRPO",
    "Algorithm",
    "ConfigurationError",
    "EnvgradError",
    "Environment",
    "EnvironmentContractError",
    "EnvironmentFailure",
    "Episode",
    "EpisodeDone",
    "GRPOConfig",
    "GRPOTrainer",
    "Group",
    "RolloutTrainer",
    "StepResult",
    "StopReason",
    "Task",
    "TooManyFailures",
    "ToolResult",
    "TrainingSample",
    "tool",
]


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'envgrad' has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
