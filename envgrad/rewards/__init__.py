"""Reward sources beside the environment, and ready reward functions.

``accuracy_reward``, ``reasoning_accuracy_reward``, ``think_format_reward``, and the functions that
``get_cosine_scaled_reward``, ``get_repetition_penalty_reward`` and ``get_soft_overlong_punishment`` make, go into
``reward_funcs`` like one's own.
Names are imported when they are first used; only reward models load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from envgrad.rewards.accuracy import accuracy_reward, get_cosine_scaled_reward, reasoning_accuracy_reward
    from envgrad.rewards.build import build_reward_sources
    from envgrad.rewards.functions import RewardFunction
    from envgrad.rewards.models import RewardModel, RewardModelOptions
    from envgrad.rewards.shaping import (
        get_repetition_penalty_reward,
        get_soft_overlong_punishment,
        think_format_reward,
    )

_HOME = {
    "RewardFunction": "functions",
    "RewardModel": "models",
    "RewardModelOptions": "models",
    "accuracy_reward": "accuracy",
    "build_reward_sources": "build",
    "get_cosine_scaled_reward": "accuracy",
    "get_repetition_penalty_reward": "shaping",
    "get_soft_overlong_punishment": "shaping",
    "reasoning_accuracy_reward": "accuracy",
    "think_format_reward": "shaping",
}

__all__ = [
    "RewardFunction",
    "RewardModel",
    "RewardModelOptions",
    "accuracy_reward",
    "build_reward_sources",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "reasoning_accuracy_reward",
    "think_format_reward",
]


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'envgrad.rewards' has no attribute {name!r}")
    value: object = getattr(import_module(f"envgrad.rewards.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
