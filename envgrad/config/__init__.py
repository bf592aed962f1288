"""Configurations: ``RolloutConfig`` is what all share; one more file for each algorithm."""

from envgrad.config.async_grpo import AsyncGRPOConfig
from envgrad.config.grpo import GRPOConfig
from envgrad.config.refused import REFUSED
from envgrad.config.rloo import RLOOConfig
from envgrad.config.rollout import RolloutConfig, round_size
from envgrad.config.sdpo import SDPOConfig
from envgrad.config.trl_fields import TRL_REFUSED

__all__ = [
    "REFUSED",
    "TRL_REFUSED",
    "AsyncGRPOConfig",
    "GRPOConfig",
    "RLOOConfig",
    "RolloutConfig",
    "SDPOConfig",
    "round_size",
]
