"""What a trainer plays without learning from it: evaluations, and answers for a user's own rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import TrainerControl

from envgrad.config import RolloutConfig
from envgrad.environments.tasks import TaskStream
from envgrad.errors import ConfigurationError
from envgrad.evaluation.summary import evaluation_metrics
from envgrad.rollout.runner import Round
from envgrad.training.episode_log import EpisodeLog
from envgrad.training.generation import Generated, generate
from envgrad.training.metrics import round_metrics
from envgrad.training.rollouts import Rollouts
from envgrad.training.signals import StoppableTrainer
from envgrad.types import Message


class EvaluatingTrainer(StoppableTrainer):
    """``Trainer`` whose ``evaluate`` plays episodes."""

    rollouts: Rollouts
    user_args: RolloutConfig
    episode_log: EpisodeLog | None
    control: TrainerControl

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
        metrics: dict[str, float] = {}
        for name, (tasks, count) in streams.items():
            prefix = f"{metric_key_prefix}_{name}" if name else metric_key_prefix
            played = self.play_eval(tasks, count)
            figures = round_metrics(played) | evaluation_metrics(played, self.user_args.eval_success_reward)
            metrics |= {f"{prefix}_{key}": value for key, value in figures.items()}
            metrics[f"{prefix}_time/rollout"] = played.seconds
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def play_eval(self, tasks: TaskStream | None = None, count: int | None = None) -> Round:
        """The episodes that ``evaluate`` scores: ``count`` of ``tasks``, or ``eval_tasks`` of the environments' own.

        Finite tasks are played once at most, and none whose episodes fail is replaced: a model of later is measured on
        the same ones.
        """
        config = self.user_args
        tasks, count = tasks or self.rollouts.eval_tasks(), count or config.eval_tasks
        count = min(count, tasks.epoch_length or count)
        with self.signals, self.rollouts.open() as runner:
            self.rollouts.publish(self.state.global_step)
            policy = self.rollouts.group_policy(config.num_generations_eval or 1, config.per_device_eval_batch_size)
            played = runner.play(tasks, count, policy, max_draws=count)
        if self.episode_log is not None:
            self.episode_log.write(played, step=self.state.global_step)
        return played

    def generate(
        self, prompts: Sequence[str | list[Message] | list[int]], *, max_tokens: int | None = None
    ) -> list[Generated]:
        """The policy's answers to ``prompts``, with token ids and log-probs: for a ``rollout_func``."""
        return generate(self.rollouts, prompts, max_tokens=max_tokens)
