"""Policy gradients from environments.

Names are imported when they are first used, so ``import envgrad`` is instant and loads neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from envgrad.agents.checking import check_environment
    from envgrad.algorithms.base import Algorithm
    from envgrad.algorithms.custom import custom
    from envgrad.algorithms.grpo import GRPO
    from envgrad.algorithms.rloo import RLOO
    from envgrad.algorithms.sdpo import SDPO
    from envgrad.compat.datasets_config import DatasetMixtureConfig, ScriptArguments, get_dataset
    from envgrad.compat.model_config import ModelConfig, get_peft_config, get_quantization_config
    from envgrad.compat.parser import TrlParser, init_zero_verbose
    from envgrad.compat.progress import RichProgressCallback
    from envgrad.config import AsyncGRPOConfig, GRPOConfig, RLOOConfig, SDPOConfig
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
    from envgrad.training.trainers import AsyncGRPOTrainer, GRPOTrainer, RLOOTrainer, SDPOTrainer
    from envgrad.training.warm_start import export_episodes, warm_start
    from envgrad.types import Episode, Group, StopReason, Task, TrainingSample

__version__ = "0.1.0"

_HOME = {
    "Algorithm": "envgrad.algorithms.base",
    "AsyncGRPOConfig": "envgrad.config",
    "AsyncGRPOTrainer": "envgrad.training.trainers",
    "ConfigurationError": "envgrad.errors",
    "DatasetMixtureConfig": "envgrad.compat.datasets_config",
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
    "ModelConfig": "envgrad.compat.model_config",
    "RLOO": "envgrad.algorithms.rloo",
    "RLOOConfig": "envgrad.config",
    "RLOOTrainer": "envgrad.training.trainers",
    "RichProgressCallback": "envgrad.compat.progress",
    "RolloutTrainer": "envgrad.training.trainer",
    "SDPO": "envgrad.algorithms.sdpo",
    "SDPOConfig": "envgrad.config",
    "SDPOTrainer": "envgrad.training.trainers",
    "ScriptArguments": "envgrad.compat.datasets_config",
    "StepResult": "envgrad.environments.contract",
    "StopReason": "envgrad.types",
    "Task": "envgrad.types",
    "TooManyFailures": "envgrad.errors",
    "ToolResult": "envgrad.environments.contract",
    "TrainingSample": "envgrad.types",
    "TrlParser": "envgrad.compat.parser",
    "check_environment": "envgrad.agents.checking",
    "custom": "envgrad.algorithms.custom",
    "export_episodes": "envgrad.training.warm_start",
    "get_dataset": "envgrad.compat.datasets_config",
    "get_peft_config": "envgrad.compat.model_config",
    "get_quantization_config": "envgrad.compat.model_config",
    "init_zero_verbose": "envgrad.compat.parser",
    "tool": "envgrad.environments.contract",
    "warm_start": "envgrad.training.warm_start",
}

__all__ = [
    "GRPO",
    "RLOO",
    "SDPO",
    "Algorithm",
    "AsyncGRPOConfig",
    "AsyncGRPOTrainer",
    "ConfigurationError",
    "DatasetMixtureConfig",
    "EnvgradError",
    "Environment",
    "EnvironmentContractError",
    "EnvironmentFailure",
    "Episode",
    "EpisodeDone",
    "GRPOConfig",
    "GRPOTrainer",
    "Group",
    "ModelConfig",
    "RLOOConfig",
    "RLOOTrainer",
    "RichProgressCallback",
    "RolloutTrainer",
    "SDPOConfig",
    "SDPOTrainer",
    "ScriptArguments",
    "StepResult",
    "StopReason",
    "Task",
    "TooManyFailures",
    "ToolResult",
    "TrainingSample",
    "TrlParser",
    "check_environment",
    "custom",
    "export_episodes",
    "get_dataset",
    "get_peft_config",
    "get_quantization_config",
    "init_zero_verbose",
    "tool",
    "warm_start",
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
