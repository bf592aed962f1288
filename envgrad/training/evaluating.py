"""What a trainer plays without learning from it: evaluations, and answers for a user's own rollouts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from transformers import TrainerControl

from envgrad.config import RolloutConfig
from envgrad.distributed.ranks import Ranks
from envgrad.environments.tasks import TaskStream
from envgrad.episodes.log import EpisodeLog
from envgrad.errors import ConfigurationError
from envgrad.evaluation.summary import evaluation_metrics
from envgrad.rollout.runner import RolloutRunner, Round
from envgrad.training.completions import CompletionLog
from envgrad.training.generation import Generated, generate
from envgrad.training.metrics import round_metrics
from envgrad.training.rollouts import Rollouts
from envgrad.training.signals import StoppableTrainer
from envgrad.training.tracking import Trackers
from envgrad.types import Group, Message

if TYPE_CHECKING:
    from envgrad.training.stream import StepItem, StepStream


class EvaluatingTrainer(StoppableTrainer):
    """``Trainer`` whose ``evaluate`` plays episodes."""

    rollouts: Rollouts
    ranks: Ranks
    user_args: RolloutConfig
    episode_log: EpisodeLog | None
    completion_log: CompletionLog | None
    control: TrainerControl
    _stream: StepStream | None = None
    _log_depth: int = 0
    _evaluated: tuple[int, int] | None = None

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Play the evaluation's tasks, the same ones every time; log ``<prefix>_reward`` and others.

        They are the rows of ``eval_dataset`` (of this call, or of construction), or without one ``eval_tasks`` tasks of
        the environments' ``split="eval"`` (all of them, if there are fewer). Of ``{name: dataset}`` each is played and
        logged as ``<prefix>_<name>_*``.
        ``<prefix>_reward_ci95`` is half of its 95% interval over tasks; ``<prefix>_pass@k`` counts episodes with a
        reward of at least ``eval_success_reward``.

        Raises:
            ConfigurationError: there is no environment, and no dataset to evaluate on.
        """
        streams = self.rollouts.eval_streams(eval_dataset)
        if not streams:
            raise ConfigurationError("nothing to evaluate on: there is no environment; pass eval_dataset=")
        if not self._log_depth:  # not within a run: it is one of its own
            self.ranks.begin()
        with self.trackers.open(), self.logged_episodes():
            metrics = self._play_streams(streams, metric_key_prefix)
            self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _play_streams(self, streams: Mapping[str, tuple[TaskStream, int]], metric_key_prefix: str) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for name, (tasks, count) in streams.items():
            prefix = f"{metric_key_prefix}_{name}" if name else metric_key_prefix
            played = self.play_eval(tasks, count)
            figures = round_metrics(played) | evaluation_metrics(played, self.user_args.eval_success_reward)
            metrics |= {f"{prefix}_{key}": value for key, value in figures.items()}
            metrics[f"{prefix}_time/rollout"] = played.seconds
        return metrics

    @property
    def trackers(self) -> Trackers:
        """What ``report_to`` reports to."""
        found = self.__dict__.get("_trackers")
        if found is None:
            found = self.__dict__["_trackers"] = Trackers(self.callback_handler.callbacks, self.user_args)
        return found

    def record_for_logs(self, played: Round, items: Sequence[StepItem]) -> None:
        """Keep a round, whose optimizer steps are ``items``, for the tables of the next log."""
        samples = [sample for item in items for sample in item.batch.samples]
        if self.completion_log is not None:
            self.completion_log.record(played, samples)
        self.trackers.record(played, samples)

    def show_for_logs(self, logs: Mapping[str, float]) -> None:
        """The tables of a log that has just been made."""
        if self.completion_log is not None and "loss" in logs:
            self.completion_log.show(self.state.global_step)
        self.trackers.show(logs, self.state)

    @contextlib.contextmanager
    def logged_episodes(self) -> Iterator[None]:
        """Within the outermost of these the episode log may be open; behind it all is written."""
        self._log_depth += 1
        try:
            yield
        finally:
            self._log_depth -= 1
            if not self._log_depth and self.episode_log is not None:
                self.episode_log.close()

    def play_eval(self, tasks: TaskStream | None = None, count: int | None = None) -> Round:
        """The episodes that ``evaluate`` scores: ``count`` of ``tasks``, or ``eval_tasks`` of the environments' own.

        Finite tasks are played once at most, and none whose episodes fail is replaced: a model of later is measured on
        the same ones.
        """
        config = self.user_args
        tasks, count = tasks or self.rollouts.eval_tasks(), count or config.eval_tasks
        count = min(count, tasks.epoch_length or count)
        settled = contextlib.nullcontext() if self._stream is None else self._stream.rounds.settled()
        with self.signals, self.rollouts.open() as runner:
            with settled:
                self.rollouts.publish(self.state.global_step)
            policy = self.rollouts.group_policy(config.num_generations_eval or 1, config.per_device_eval_batch_size)
            with self._told(runner, count):
                played = runner.play(tasks, count, policy, max_draws=count)
        if self.episode_log is not None:
            with self.logged_episodes():
                self.episode_log.write(played, step=self.state.global_step)
        return played

    @contextlib.contextmanager
    def _told(self, runner: RolloutRunner, count: int) -> Iterator[None]:
        """Count the evaluation's groups as they end; those of training may go on beside them."""
        before, self._evaluated = runner.on_group, (0, count)

        def on_group(group: Group) -> None:
            if group.task.split == "eval" and self._evaluated is not None:
                self._evaluated = (self._evaluated[0] + 1, count)
            if before is not None:
                before(group)

        runner.on_group = on_group
        try:
            yield
        finally:
            runner.on_group, self._evaluated = before, None

    @property
    def doing(self) -> str | None:
        """The long work beside optimizer steps that goes on now, for displays; None: there is none."""
        if self.rollouts.installing is not None:
            return f"installing weights of step {self.rollouts.installing}"
        if self._evaluated is not None:
            return f"evaluating, {self._evaluated[0]} of {self._evaluated[1]} tasks"
        return None

    def generate(
        self, prompts: Sequence[str | list[Message] | list[int]], *, max_tokens: int | None = None
    ) -> list[Generated]:
        """The policy's answers to ``prompts``, with token ids and log-probs: for a ``rollout_func``."""
        return generate(self.rollouts, prompts, max_tokens=max_tokens)
