"""``metric_for_best_model``: a metric of our own evaluations, checked before a run could be lost to a typing error."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from transformers.trainer_utils import IntervalStrategy, SaveStrategy, SchedulerType

from envgrad.config import RolloutConfig
from envgrad.config.reporting import best_metric_name
from envgrad.errors import ConfigurationError
from envgrad.rollout.runner import Round
from envgrad.training.metrics import round_metrics
from envgrad.training.plan import RolloutPlan
from envgrad.training.signals import StoppableTrainer

_SEEN_LATER = ("rewards/", "tools/", "stop/", "parts/", "failures/", "faults/")
"""beginnings of metrics whose names depend on what is played"""
_SHOWN = 12


def chooses_best(config: RolloutConfig) -> bool:
    """Whether anything in the run depends on ``metric_for_best_model``."""
    on_plateau = config.lr_scheduler_type == SchedulerType.REDUCE_ON_PLATEAU
    return bool(config.load_best_model_at_end) or config.save_strategy == SaveStrategy.BEST or on_plateau


def evaluation_names(config: RolloutConfig, plan: RolloutPlan) -> list[str]:
    """The metrics that every evaluation of a run has, the most used first."""
    names = [name for name in plan.specs if name]
    samples = config.num_generations_eval or 1
    powers = [2**power for power in range(samples.bit_length()) if 2**power <= samples]
    own = ["reward", "reward_ci95", *(f"pass@{k}{end}" for k in powers for end in ("", "_ci95"))]
    if len(names) > 1:
        own += [f"{metric}/{name}" for metric in tuple(own) for name in names]
        own += [f"episodes/{name}" for name in names]
    found = dict.fromkeys([*own, *round_metrics(Round(groups=(), seconds=0.0)), "time/rollout"])
    given = plan.inputs.eval_dataset
    prefixes = [f"eval_{name}" for name in given] if isinstance(given, Mapping) else ["eval"]
    return [f"{prefix}_{name}" for name in found for prefix in prefixes]


def check_best_metric(config: RolloutConfig, plan: RolloutPlan) -> None:
    """Find a metric that no evaluation of this run can have.

    Raises:
        ConfigurationError: there is none of that name, and nothing of the user's could log it.
    """
    if not chooses_best(config) or config.eval_strategy == IntervalStrategy.NO:
        return
    given = config.metric_for_best_model
    name = "eval_reward" if given in (None, "loss") else best_metric_name(str(given))
    known = evaluation_names(config, plan)
    prefixes = sorted({one.removesuffix("reward") for one in known if one.endswith("_reward")}, key=len, reverse=True)
    rest = next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), None)
    logs_more = plan.reward_sources or plan.inputs.rollout_func is not None  # ``log_metric``
    if name in known or (rest is not None and (rest.startswith(_SEEN_LATER) or logs_more)):
        return
    raise ConfigurationError(unknown_metric(name, known))


def unknown_metric(name: str, known: Iterable[str]) -> str:
    """What is said of a metric that is not there."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    hint = f"did you mean {near[0]!r}? " if near else ""
    more = "" if len(names) <= _SHOWN else f" and {len(names) - _SHOWN} more"
    return (
        f"metric_for_best_model={name!r} is no metric of this run's evaluations: {hint}They have "
        f"{', '.join(names[:_SHOWN])}{more}"
    )


class BestModelTrainer(StoppableTrainer):
    """``Trainer`` that names the metrics there are, and loses no step, where the one to choose by is missing."""

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """
        Raises:
            ConfigurationError: the evaluation has no such metric; the run is saved before.
        """
        name = self.args.metric_for_best_model
        if name is not None and chooses_best(self.args) and best_metric_name(name) not in metrics:
            self.save_on_the_way_out()
            raise ConfigurationError(unknown_metric(best_metric_name(name), metrics))
        found: bool = super()._determine_best_metric(metrics, trial)
        return found
