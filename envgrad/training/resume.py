"""What checkpoints hold of a trainer's rollouts, and how a resumed run takes it up, before its first task is drawn."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import GenerationConfig

from envgrad.algorithms.base import Algorithm
from envgrad.config import RolloutConfig
from envgrad.distributed.gathering import gather_lists
from envgrad.environments.tasks import TaskStream
from envgrad.rollout.runner import Round
from envgrad.training.checkpoint import AtomicCheckpoints
from envgrad.training.metrics import MetricAverages
from envgrad.training.reference import REFERENCE_NAME, SyncReference
from envgrad.training.rollouts import Rollouts
from envgrad.training.rounds import RoundsState
from envgrad.training.run_shape import run_shape
from envgrad.training.saved import RolloutState, read_state
from envgrad.training.stream import StepItem, StepStream
from envgrad.training.teacher import Teacher
from envgrad.training.together import one_plays


class ResumingTrainer(AtomicCheckpoints):
    """``Trainer`` whose checkpoints know the tasks, the round in hand and what was played ahead of it."""

    args: RolloutConfig
    algorithm: Algorithm
    user_args: RolloutConfig
    rollouts: Rollouts
    teacher: Teacher | None
    _tasks: TaskStream
    _stream: StepStream | None
    _sync_reference: SyncReference | None
    _beginning: RolloutState
    _averages: MetricAverages
    _saved_step: int | None

    def rollout_state(self) -> RolloutState:
        """What a checkpoint holds of the rollouts. Steps in hand go without their episodes, which are in the log."""
        stream = self._stream
        return RolloutState(
            rounds=RoundsState(tasks=self._tasks.state_dict()) if stream is None else stream.state(),
            algorithm=self.algorithm.state_dict(),
            pending=() if stream is None else tuple(stream.pending),
            environments=self._environment_states(),
            unlogged=self._averages.state_dict(),
            shape=run_shape(self.user_args, self.algorithm),
        )

    def _environment_states(self) -> dict[str, list[object]]:
        """Of all processes; one entry where all say the same."""
        own = {} if self.ranks.rank and one_plays(self.user_args) else self.rollouts.environment_states()
        found = gather_lists(self.ranks, own)
        return {
            name: states[:1] if all(one == states[0] for one in states) else states for name, states in found.items()
        }

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """A round that a signal cut off from its first step was played: it is counted here, not when it comes back."""
        pending = deque[StepItem]() if self._stream is None else self._stream.pending
        for index, item in enumerate(pending):
            if item.played is not None:
                self._record_round(item.played)
                pending[index] = replace(item, played=None)
        super()._save_checkpoint(model, trial)

    def _record_round(self, played: Round) -> None:
        """Count a round in metrics and logs.

        Raises:
            NotImplementedError: a subclass has not said how.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how it counts a round")

    def extra_weights(self) -> dict[str, dict[str, Tensor]]:
        """The reference and the teacher, where they move."""
        reference = {} if self._sync_reference is None else {REFERENCE_NAME: self._sync_reference.reference.weights()}
        return reference if self.teacher is None else reference | self.teacher.extra_weights()

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Put the tasks where the checkpoint left them, or at the beginning, before the first of them is drawn."""
        checkpoint = kwargs.get("resume_from_checkpoint", args[2] if len(args) > 2 else None)
        state, shape = self._beginning, self._beginning.shape
        state = state if checkpoint is None else read_state(Path(checkpoint), self._tasks, shape)
        self.algorithm.load_state_dict(state.algorithm)
        self._averages.load_state_dict(state.unlogged)
        rank, size = (0, 1) if one_plays(self.user_args) else (self.ranks.rank, self.ranks.size)
        self.rollouts.restore_environments(
            {name: states[rank::size] or states[-1:] for name, states in state.environments.items()}
        )
        if self._stream is not None:
            self._stream.rounds.restore(state.rounds)
            self._stream.pending.extend(state.pending)
        if checkpoint is not None and self._sync_reference is not None:
            self._sync_reference.load(checkpoint)
        if checkpoint is not None and self.teacher is not None:
            self.teacher.load(checkpoint)
        epochs, steps = super()._init_training_state(max_steps, *args, **kwargs)
        own = checkpoint is not None and Path(checkpoint).parent.resolve() == Path(self.args.output_dir).resolve()
        self._saved_step = self.state.global_step if own else None  # what is there is not written again
        if self.episode_log is not None:
            self.episode_log.begin(self.state.global_step)
        return epochs, steps

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Saved arguments show what the user asked for, not the loop's own accumulation of 1."""
        loop_args, self.args = self.args, self.user_args
        base = self.rollouts.policy.base
        missing = base.generation_config is None
        if missing:  # transformers saves one with every model that can generate
            base.generation_config = GenerationConfig.from_model_config(base.config)
        try:
            super()._save(output_dir, state_dict)
        finally:
            self.args = loop_args
            if missing:
                base.generation_config = None
