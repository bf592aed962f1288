"""The configuration of an evaluation without training."""

from __future__ import annotations

from dataclasses import dataclass, field

from envgrad.config.checks import at_least, at_most_concurrent
from envgrad.config.rollout import RolloutConfig


@dataclass
class EvalConfig(RolloutConfig):
    """``RolloutConfig`` for evaluation: nothing is trained, so ``temperature=0`` (the likeliest token) is fine.

    ``num_generations_eval`` episodes of each task are played; the options of training are left alone.

    Raises:
        ConfigurationError: a value that cannot work.

    Example:
        >>> EvalConfig(output_dir="runs/doc", num_generations_eval=4, temperature=0).num_generations
        4
    """

    num_generations_eval: int | None = field(default=1, metadata={"help": "Episodes per task."})
    eval_tasks: int = field(default=200, metadata={"help": "Tasks to play."})
    shuffle_dataset: bool = field(default=False, metadata={"help": "Draw finite tasks in a new order each epoch."})

    def __post_init__(self) -> None:
        at_least("num_generations_eval", self.num_generations_eval, 1)
        at_most_concurrent("num_generations_eval", self.num_generations_eval, self.max_concurrent_episodes)
        siblings = self.num_generations_eval or 1
        # A group of training is a group of evaluation here, so that limits on either are limits on both.
        self.num_generations = self.per_device_train_batch_size = siblings
        self.per_device_eval_batch_size = max(self.per_device_eval_batch_size or 0, siblings)
        super().__post_init__()

    def _check_temperature(self) -> None:
        at_least("temperature", self.temperature, 0)
