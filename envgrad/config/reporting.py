"""What a run tells trackers and the Hub: how many episodes, which metric is the best, and no secret."""

from __future__ import annotations

import copy
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from transformers import TrainingArguments

from envgrad.config.checks import at_least
from envgrad.errors import ConfigurationError

_SECRET = re.compile(r"(^|_)(token|secret|password|passwd|api_?key|authorization|credentials?)$", re.IGNORECASE)
_LOWER = re.compile(
    r"(loss|_ci95|kl)$|^(failures|faults|time|stop/max_|stop/timeout)|failure_frequency|clipped_ratio|start_mismatch"
    r"|frac_reward_zero_std|dropped|unscored"
)
"""evaluation metrics that are better where they are lower; all others are better where they are higher"""

_PACKAGES = {"tensorboard": ("tensorboard", "tensorboardX"), "trackio": ("trackio",), "wandb": ("wandb",)}
"""what the reporters of our own extras need, any of it"""


@dataclass
class ReportingFields(TrainingArguments):
    """The fields; ``RolloutConfig`` has them. The names beside these are ``TrainingArguments``' own."""

    num_episodes_to_report: int = field(
        default=4,
        metadata={
            "help": "Episodes of each logged step, drawn at random, that report_to's trackers show; 0 shows none."
        },
    )

    def to_dict(self) -> dict[str, Any]:
        """The fields as trackers and saved files get them: tokens, keys and passwords are left out."""
        found: dict[str, Any] = without_secrets(super().to_dict())
        return found


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` whose secrets are replaced by their names, at any depth; addresses lose user and password.

    Example:
        >>> without_secrets({"model_init_kwargs": {"token": "hf_abc"}, "url": "http://me:pw@host:8000/v1", "top_k": 3})
        {'model_init_kwargs': {'token': '<TOKEN>'}, 'url': 'http://host:8000/v1', 'top_k': 3}
    """
    return {name: _without_secret(name, value) for name, value in values.items()}


def public_copy(config: ReportingFields) -> Any:
    """The configuration without its secrets, to be saved beside a model.

    Example:
        >>> from envgrad import GRPOConfig
        >>> public_copy(GRPOConfig(output_dir="runs/doc", max_steps=1, hub_token="hf_abc", report_to="none")).hub_token
    """
    shown = copy.copy(config)
    for name, value in vars(config).items():
        if isinstance(value, str) and _SECRET.search(name):
            setattr(shown, name, None)
        elif isinstance(value, (str, dict, list)):
            setattr(shown, name, _without_secret(name, value))
    return shown


def _without_secret(name: object, value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_secrets(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_without_secret("", one) for one in value)
    if not isinstance(value, str):
        return value
    if _SECRET.search(str(name)):
        return f"<{str(name).upper()}>" if not value.startswith("<") else value
    if "://" in value and "@" in value:
        parts = urlsplit(value)
        return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    return value


def best_metric_name(name: str) -> str:
    """A metric as ``Trainer`` looks it up, from the name that trackers show or ``evaluate`` returns.

    Example:
        >>> best_metric_name("eval/reward"), best_metric_name("reward"), best_metric_name("eval_pass@1")
        ('eval_reward', 'eval_reward', 'eval_pass@1')
    """
    for prefix in ("eval/", "eval_"):
        name = name.removeprefix(prefix)
    return f"eval_{name}"


def greater_is_better(name: str) -> bool:
    """Whether a higher value of the metric is the better model; ``greater_is_better`` in the configuration decides.

    Example:
        >>> greater_is_better("eval/reward"), greater_is_better("eval_failures/total"), greater_is_better("kl")
        (True, False, False)
    """
    return _LOWER.search(best_metric_name(name).removeprefix("eval_")) is None


def check_reporters(config: ReportingFields) -> None:
    """Find out at once what ``report_to`` cannot report to.

    Raises:
        ConfigurationError: a name that transformers does not know, or a package that is not installed.
    """
    names = config.report_to or []
    if not names:
        return
    from transformers.integrations import INTEGRATION_TO_CALLBACK

    for name in (names,) if isinstance(names, str) else names:
        if name is None:  # as parsers of the command line spell an unset one
            continue
        if name not in INTEGRATION_TO_CALLBACK:
            known = ", ".join(sorted(INTEGRATION_TO_CALLBACK))
            raise ConfigurationError(f"report_to={name!r} is not known; choose some of {known}, 'all' or 'none'")
        packages = _PACKAGES.get(name, ())
        if packages and not any(importlib.util.find_spec(package) for package in packages):
            raise ConfigurationError(f"report_to={name!r} needs the {name} package: pip install 'envgrad[{name}]'")


def resolve_reporting(config: ReportingFields) -> None:
    """Check the fields, and let ``greater_is_better`` follow from the metric where it was not given.

    Raises:
        ConfigurationError: a number of episodes below 0.
    """
    at_least("num_episodes_to_report", config.num_episodes_to_report, 0)
    if config.metric_for_best_model is not None and config.greater_is_better is None:
        config.greater_is_better = greater_is_better(config.metric_for_best_model)
