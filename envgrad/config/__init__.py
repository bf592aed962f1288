"""Configurations: ``RolloutConfig`` is what all share; one more file for each algorithm."""

from envgrad.config.grpo import GRPOConfig
from envgrad.config.refused import REFUSED
from envgrad.config.rollout import RolloutConfig, round_size

__all__ = ["REFUSED", "GRPOConfig", "RolloutConfig", "round_size"]
