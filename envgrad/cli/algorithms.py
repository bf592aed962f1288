"""The algorithms that ``envgrad train --algorithm`` knows: their configurations, read when they are needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envgrad.cli.flags import nearest
from envgrad.errors import ConfigurationError

if TYPE_CHECKING:
    from envgrad.config import RolloutConfig
    from envgrad.training.trainers import NamedTrainer

ALGORITHMS = ("grpo", "rloo", "sdpo")


def config_class(algorithm: str) -> type[RolloutConfig]:
    """The configuration of ``algorithm``.

    Raises:
        ConfigurationError: an unknown name.
    """
    from envgrad.config import GRPOConfig, RLOOConfig, SDPOConfig

    classes: dict[str, type[RolloutConfig]] = {"grpo": GRPOConfig, "rloo": RLOOConfig, "sdpo": SDPOConfig}
    found = classes.get(algorithm.lower())
    if found is None:
        hint = nearest(algorithm.lower(), ALGORITHMS)
        raise ConfigurationError(f"--algorithm {algorithm!r} is not known{hint}; choose one of {', '.join(ALGORITHMS)}")
    return found


def trainer_class(config: RolloutConfig) -> type[NamedTrainer]:
    """The trainer that takes ``config``."""
    from envgrad.training.trainers import GRPOTrainer, RLOOTrainer, SDPOTrainer

    return next(trainer for trainer in (GRPOTrainer, RLOOTrainer, SDPOTrainer) if type(config) is trainer.config_class)
