"""What a trainer gives to its episode log: rounds with their credit, and how its environments are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

import envgrad
from envgrad.config import RolloutConfig
from envgrad.config.evaluation import EvalConfig
from envgrad.config.mixture import EnvironmentOptions
from envgrad.episodes.factories import describe_factory
from envgrad.episodes.flat import Credit, RowKey
from envgrad.episodes.log import FOLDER_NAME, EpisodeLog
from envgrad.training.plan import RolloutPlan
from envgrad.types import TrainingSample

if TYPE_CHECKING:
    from envgrad.training.stream import StepItem
    from envgrad.training.trainer import RolloutTrainer


def trainer_log(trainer: RolloutTrainer) -> EpisodeLog | None:
    """The log that a trainer's configuration asks for."""
    config = trainer.user_args
    if not config.log_episodes or trainer.ranks.rank:  # every process has the whole round; one writes it
        return None
    return run_log(config, trainer.rollouts, algorithm=type(trainer.algorithm).__name__)


def run_log(config: RolloutConfig, plan: RolloutPlan, *, algorithm: str | None = None) -> EpisodeLog:
    """The log of what ``plan`` plays, in the run's folder."""
    limit = config.episode_log_gb
    return EpisodeLog(
        Path(config.output_dir or "") / FOLDER_NAME,
        limit=None if limit is None else int(limit * 1e9),
        describe=lambda: describe_run(config, plan, algorithm),
        tokenizer=lambda: _tokenizer_json(plan),
    )


def round_credit(items: Sequence[StepItem], *, recomputed: bool) -> Callable[[], Credit]:
    """Advantages, and the trainer's own log-probs if it computed them, of a round whose optimizer steps are ``items``.

    The numbers are taken apart where the result is called: by the log's thread.
    """
    first = [item.batch for item in items if not item.iteration]
    samples = [sample for batch in first for sample in batch.samples]
    passed: list[tuple[TrainingSample, Tensor, Tensor, int]] = []
    for batch in first if recomputed else ():
        for packed in batch.micro_batches:
            logprobs, owner = packed.old_logprobs.cpu(), packed.sample_index.cpu()
            passed += [(batch.samples[index], logprobs, owner, number) for number, index in enumerate(packed.samples)]

    def credit() -> Credit:
        found: dict[RowKey, tuple[float, ...]] = {}
        for sample, logprobs, owner, number in passed:
            if sample.episode is not None:
                found[(*sample.episode.key, sample.row)] = tuple(logprobs[owner == number].tolist())
        return Credit.of(samples, found)

    return credit


def describe_run(config: RolloutConfig, plan: RolloutPlan, algorithm: str | None) -> dict[str, Any]:
    """What a replay needs beside the episodes: see ``episodes.replay``."""
    return {
        "envgrad": envgrad.__version__,
        "algorithm": algorithm,
        "seed": config.seed,
        "environments": {
            name: {
                "factory": describe_factory(plan.factories().get(name)),
                "limits": _limits(config, plan.options.get(name)),
            }
            for name in plan.specs
        },
        "reward_sources": [source.name for source in plan.reward_sources],
        "tools": [describe_factory(tool) for tool in plan.inputs.tools or ()],
        "routed": isinstance(plan.inputs.environment_factory, Mapping),
        "isolate_generators": config.isolate_generators,
        "custom_rollout": plan.inputs.rollout_func is not None,
        "evaluation_only": isinstance(config, EvalConfig),
    }


def _limits(config: RolloutConfig, options: EnvironmentOptions | None) -> dict[str, float | None]:
    own = options or EnvironmentOptions.of_run(config)
    return {
        "max_turns": own.max_turns,
        "episode_timeout": own.episode_timeout,
        "tool_timeout": own.tool_timeout,
        "reset_timeout": config.reset_timeout,
        "reward_timeout": config.reward_timeout,
    }


def _tokenizer_json(plan: RolloutPlan) -> str | None:
    """What a fast tokenizer is loaded from; None without one."""
    tokenizer = plan.policy.tokenizer if plan.has_policy else None
    return tokenizer.backend_tokenizer.to_str() if tokenizer is not None and tokenizer.is_fast else None
