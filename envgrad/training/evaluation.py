"""Evaluation without a trainer: a local model, or one behind an endpoint, plays tasks; nothing is updated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from envgrad.chat.base import Renderer
from envgrad.config.checks import choice
from envgrad.config.evaluation import EvalConfig
from envgrad.environments.tasks import TaskStream
from envgrad.rollout.runner import Round
from envgrad.sampling.endpoint import Endpoint, EndpointSampler
from envgrad.sampling.endpoint_chat import EndpointRenderer
from envgrad.sampling.sampler import Sampler
from envgrad.training.inputs import UserInputs
from envgrad.training.model import load_policy
from envgrad.training.rollouts import Rollouts
from envgrad.types import Group

SPLITS = ("eval", "train")


class EndpointRollouts(Rollouts):
    """``Rollouts`` that a chat endpoint answers: everything but the sampler and the renderer is the same.

    Raises:
        ConfigurationError: an environment or a dataset that cannot be used.
    """

    def __init__(self, endpoint: Endpoint, config: EvalConfig, inputs: UserInputs) -> None:
        self.endpoint = endpoint
        self._chats = EndpointRenderer()
        self._answers: EndpointSampler | None = None
        super().__init__(None, config, inputs)

    @property
    def answers(self) -> EndpointSampler | None:
        """The sampler of the last opening, for its usage; None before the first."""
        return self._answers

    def _make_renderer(self) -> Renderer:
        return self._chats

    def _make_sampler(self, max_sessions: int) -> Sampler:
        self._answers = EndpointSampler(self.endpoint, self._chats, max_connections=max_sessions)
        return self._answers


def local_rollouts(model: str | Path | PreTrainedModel, config: EvalConfig, inputs: UserInputs) -> Rollouts:
    """Rollouts of a model in this process, on the device that ``config`` names.

    Raises:
        ConfigurationError: a model that cannot be loaded, an environment or a dataset that cannot be used.
    """
    policy = load_policy(model, None, config, None)
    if policy.base.device != config.device:  # quantized weights are there already, and refuse to be moved
        policy.model.to(config.device)
    return Rollouts(policy, config, inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalTasks:
    """The tasks of an evaluation, from their beginning."""

    stream: TaskStream
    count: int
    """how many are played"""


def eval_tasks(rollouts: Rollouts, split: str, count: int | None = None) -> EvalTasks:
    """The first ``count`` tasks of a split, in order; no finite task is drawn twice. By default all of a dataset's
    rows, else ``eval_tasks``.

    Raises:
        ConfigurationError: another split than ``eval`` and ``train``.
    """
    choice("split", split, SPLITS)
    stream = rollouts.eval_streams()[""][0] if split == "eval" else rollouts.train_tasks()
    has_rows = rollouts.inputs.train_dataset is not None
    wanted = count or (stream.epoch_length if has_rows else None) or rollouts.config.eval_tasks
    return EvalTasks(stream=stream, count=min(wanted, stream.epoch_length or wanted))


def play_evaluation(rollouts: Rollouts, tasks: EvalTasks, *, on_group: Callable[[Group], None] | None = None) -> Round:
    """Play each of ``tasks`` once, ``num_generations_eval`` episodes of it. One whose episodes fail is not replaced, so
    that every model is measured on the same tasks.

    ``on_group`` is told of each group as it ends, on the rollouts' thread.

    Raises:
        TooManyFailures: ``max_consecutive_failed_groups`` tasks in a row failed.

    Example:
        >>> from envgrad.starter.compass import Compass
        >>> from envgrad.evaluation.summary import summarize
        >>> config = EvalConfig(output_dir="unused", num_generations_eval=2, use_cpu=True, max_completion_length=64)
        >>> rollouts = local_rollouts("starter", config, UserInputs(environment_factory=Compass))
        >>> played = play_evaluation(rollouts, eval_tasks(rollouts, "eval", 3))
        >>> summary = summarize(played)
        >>> summary.tasks, summary.episodes, 0 <= summary.reward.mean <= 1
        (3, 6, True)
    """
    with rollouts.open() as runner:
        runner.on_group = on_group
        policy = rollouts.group_policy(rollouts.config.num_generations_eval or 1)
        return runner.play(tasks.stream, tasks.count, policy, max_draws=tasks.count)
