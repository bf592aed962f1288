"""How many steps a run has, and what ``state.epoch`` says: real passes over finite data, else steps of max_steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from envgrad.config import RolloutConfig
from envgrad.environments.tasks import TaskStream
from envgrad.errors import ConfigurationError


def planned_steps(config: RolloutConfig, epoch_length: int | None) -> int:
    """Optimizer steps of the whole run; ``epoch_length`` is the number of distinct tasks, None if endless.

    Where ``max_steps`` does not say it, the most that epochs allow: tasks that replace dropped or filtered ones count
    as drawn, so a run with such groups ends earlier.

    Raises:
        ConfigurationError: no ``max_steps``, and data without a known end.
    """
    max_steps: int = config.max_steps
    if max_steps > 0:
        return max_steps
    if epoch_length is None:
        raise ConfigurationError(
            "max_steps is not set, and the tasks have no known end (an environment without num_tasks(split), a "
            "streaming dataset, or a curriculum, whose passes are not known in advance): set max_steps > 0"
        )
    episodes = _epoch_groups(config, epoch_length) * config.num_generations
    return math.ceil(episodes / config.episodes_per_step) * config.num_iterations


def planned_groups(config: RolloutConfig, epoch_length: int | None) -> int | None:
    """Groups that epochs allow; None where ``max_steps`` decides."""
    if config.max_steps > 0 or epoch_length is None:
        return None
    return _epoch_groups(config, epoch_length)


def _epoch_groups(config: RolloutConfig, epoch_length: int) -> int:
    groups: int = math.ceil(config.num_train_epochs * epoch_length)
    return groups


class ClockCallback(TrainerCallback):
    """Sets ``state.epoch`` before other callbacks see a step, and acts where a pass over finite data ends.

    Args:
        tasks: What is drawn.
        unused: How many tasks were drawn and are in no round yet: they count when they are trained.
        agree: What all processes take for the epoch, of what this one found.
    """

    def __init__(
        self,
        tasks: TaskStream,
        unused: Callable[[], int] = lambda: 0,
        agree: Callable[[float], float] = lambda epoch: epoch,
    ) -> None:
        self._tasks = tasks
        self._unused = unused
        self._agree = agree
        self._passes = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._passes = math.floor(self._tasks.passes)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        length = self._tasks.epoch_length
        if length is None:
            state.epoch = state.global_step / state.max_steps
            return
        state.epoch = self._agree((round(self._tasks.passes * length) - self._unused()) / length)
        # At the run's end the loop's own epoch ends too, and acts by itself.
        if math.floor(state.epoch) > self._passes and state.global_step < state.max_steps:
            self._passes = math.floor(state.epoch)
            control.should_log |= args.logging_strategy == IntervalStrategy.EPOCH
            control.should_evaluate |= args.eval_strategy == IntervalStrategy.EPOCH
            control.should_save |= args.save_strategy == SaveStrategy.EPOCH
