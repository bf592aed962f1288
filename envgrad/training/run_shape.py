"""What a resumed run must share with the run that wrote its checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from envgrad.config import RolloutConfig, round_size
from envgrad.errors import CheckpointError

logger = logging.getLogger(__name__)

Shape: TypeAlias = Mapping[str, int | float | str]
"""what decides how rounds are cut into optimizer steps, by name"""

ALWAYS = ("algorithm", "num_generations")
"""what has to be the same in any case, the others only where a round, or a part of one, is in hand"""

_RULES = {
    "algorithm": "its state is that of another algorithm",
    "num_generations": "its groups have another size",
    "episodes per optimizer step": "the round in hand is cut into steps of that size",
    "episodes per round": "groups that wait were played for rounds of that size",
    "num_iterations": "the round in hand is trained in that many passes",
}
_LEARNING_RATE = "learning_rate"


def run_shape(config: RolloutConfig, algorithm: object) -> Shape:
    """How a run's rounds are cut; how an optimizer step is split into micro-batches is no part of it."""
    return {
        "algorithm": type(algorithm).__name__,
        "num_generations": config.num_generations,
        "episodes per optimizer step": config.episodes_per_step,
        "episodes per round": round_size(config),
        "num_iterations": config.num_iterations,
        _LEARNING_RATE: config.learning_rate,
    }


def check_shape(saved: Shape, shape: Shape, *, in_hand: bool, checkpoint: Path) -> None:
    """What would break the promise of a resumed run is an error; a learning rate that does not act is told.

    Args:
        saved: Of the run that wrote the checkpoint.
        shape: Of the run that is resumed.
        in_hand: The checkpoint was written within a round, or holds groups that no round has taken.
        checkpoint: Where it lies.

    Raises:
        CheckpointError: they differ in something that would break what a resumed run promises.

    Example:
        >>> check_shape({"num_generations": 4}, {"num_generations": 8}, in_hand=False, checkpoint=Path("last"))
        Traceback (most recent call last):
        envgrad.errors.CheckpointError: last was written with num_generations=4, and this run has 8: its groups have \
another size. Resume with 4, or begin a new run with model='last'
    """
    for name in _RULES if in_hand else ALWAYS:
        if name in saved and name in shape and saved[name] != shape[name]:
            raise CheckpointError(
                f"{checkpoint} was written with {name}={saved[name]}, and this run has {shape[name]}: {_RULES[name]}. "
                f"Resume with {saved[name]}, or begin a new run with model='{checkpoint}'"
            )
    before, now = saved.get(_LEARNING_RATE), shape.get(_LEARNING_RATE)
    if before is not None and before != now:
        logger.warning(
            "learning_rate=%s does not act: the optimizer and its schedule go on as they were saved, with %s. To train "
            "with another, begin a new run with model='%s'",
            now, before, checkpoint,
        )  # fmt: skip
