"""A run in short, as trackers and the model card tell it: settings, final figures, versions, the algorithm's paper.

Only numbers, switches and words from fixed lists: no path, address, key or name that a user typed.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import envgrad
from envgrad.algorithms.base import Algorithm
from envgrad.algorithms.custom import CustomAlgorithm
from envgrad.algorithms.grpo import GRPO
from envgrad.algorithms.rloo import RLOO
from envgrad.algorithms.sdpo import SDPO
from envgrad.config import RolloutConfig

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "peft")

_ALWAYS = (
    "learning_rate", "lr_scheduler_type", "optim", "max_steps", "num_generations", "max_completion_length",
    "temperature", "seed",
)  # fmt: skip
_WORDS = (
    "lr_scheduler_type", "optim", "loss_type", "scale_rewards", "baseline", "credit", "importance_sampling_level",
    "multi_objective_aggregation", "group_consistency", "sampler", "environment_executor", "on_nonfinite",
    "teacher_model_kind", "distillation_mode", "eval_strategy", "save_strategy",
)  # fmt: skip
"""fields of text whose values come from a fixed list"""
_NOT_OF_LEARNING = (
    "log", "save_", "eval_on", "eval_acc", "eval_delay", "hub_", "push_", "dataloader_", "vllm_server", "vllm_group",
    "num_completions", "num_episodes_to", "ddp_", "report", "disable_tqdm", "do_", "use_cpu", "local_rank", "trackio",
    "eval_steps", "eval_strategy", "greater_is", "skip_memory", "include_", "restore_",
    "remove_unused", "episode_log", "load_best", "use_cache", "ignore_data",
)  # fmt: skip
"""beginnings of fields that say where and how a run is shown and kept, not what is learned"""


def hyperparameters(config: RolloutConfig) -> dict[str, bool | int | float | str]:
    """What a run was set to: the usual ones, and all else that differs from its default.

    Example:
        >>> from envgrad import GRPOConfig
        >>> config = GRPOConfig(output_dir="runs/doc", max_steps=5, beta=0.1, run_name="mine", report_to="none")
        >>> found = hyperparameters(config)
        >>> found["max_steps"], found["beta"], found["lr_scheduler_type"], "run_name" in found, "epsilon" in found
        (5, 0.1, 'linear', False, False)
    """
    found: dict[str, bool | int | float | str] = {}
    defaults = {field.name: field.default for field in fields(config)}
    for name in dict.fromkeys((*_ALWAYS, *defaults)):
        value = getattr(config, name)
        value = value.value if isinstance(value, Enum) else value
        default = defaults[name].value if isinstance(defaults[name], Enum) else defaults[name]
        unset = value == default or (value is False and default is None)  # None is resolved on construction
        if name not in _ALWAYS and (unset or name.startswith(_NOT_OF_LEARNING)):
            continue
        if isinstance(value, (bool, int, float)) or (isinstance(value, str) and name in _WORDS):
            found[name] = value
    if config.max_steps <= 0:  # epochs decide
        found = {name: value for name, value in found.items() if name != "max_steps"}
        found["num_train_epochs"] = config.num_train_epochs
    return found | {"episodes_per_step": config.episodes_per_step}


def final_figures(history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The last rewards of training and evaluation, of each environment too, and pass@k.

    Example:
        >>> final_figures([{"reward": 0.1, "loss": 2.0}, {"reward": 0.5}, {"eval_reward": 0.75, "eval_pass@1": 0.5}])
        {'reward': 0.5, 'eval_reward': 0.75, 'eval_pass@1': 0.5}
    """
    found: dict[str, float] = {}
    for entry in history:
        found |= {
            name: float(value)
            for name, value in entry.items()
            if isinstance(value, (int, float)) and (name == "reward" or name.startswith("reward/") or _of_eval(name))
        }
    return found


def _of_eval(name: str) -> bool:
    figure = name.partition("/")[0]
    return name.startswith("eval_") and (figure.endswith(("_reward", "_reward_ci95")) or "_pass@" in figure)


def versions() -> dict[str, str]:
    """Of what decides a run's numbers, by name; packages that are not installed are left out."""
    found = {"envgrad": envgrad.__version__}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found | {"python": platform.python_version()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """Where a method was described; ``url`` is None where it has no paper of its own."""

    name: str
    title: str
    url: str | None


_GRPO = Paper(
    name="GRPO",
    title="DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
    url="https://arxiv.org/abs/2402.03300",
)
_RLOO = Paper(
    name="RLOO",
    title="Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs",
    url="https://arxiv.org/abs/2402.14740",
)
_SDPO = Paper(
    name="SDPO",
    title="Reinforcement Learning via Self-Distillation",
    url="https://arxiv.org/abs/2601.20802",
)
_LOSSES = {
    "dapo": Paper(
        name="DAPO (the loss)",
        title="DAPO: An Open-Source LLM Reinforcement Learning System at Scale",
        url="https://arxiv.org/abs/2503.14476",
    ),
    "dr_grpo": Paper(
        name="Dr. GRPO (the loss)",
        title="Understanding R1-Zero-Like Training: A Critical Perspective",
        url="https://arxiv.org/abs/2503.20783",
    ),
    "cispo": Paper(
        name="CISPO (the loss)",
        title="MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention",
        url="https://arxiv.org/abs/2506.13585",
    ),
}
_GSPO = Paper(
    name="GSPO (ratios of whole sequences)",
    title="Group Sequence Policy Optimization",
    url="https://arxiv.org/abs/2507.18071",
)


def papers(algorithm: Algorithm) -> tuple[Paper, ...]:
    """The algorithm first, then what its options were taken from.

    Example:
        >>> [paper.name for paper in papers(GRPO(loss_type="cispo", importance_sampling_level="sequence"))]
        ['GRPO', 'CISPO (the loss)', 'GSPO (ratios of whole sequences)']
    """
    if isinstance(algorithm, CustomAlgorithm):
        own = Paper(name="credit or loss of the user's own", title="on the algorithm above", url=None)
        return (*papers(algorithm.base), own)
    if isinstance(algorithm, RLOO):
        return (_RLOO,)
    if isinstance(algorithm, SDPO):
        return (_SDPO, *(papers(algorithm.policy) if algorithm.distillation_weight < 1 else ()))
    if isinstance(algorithm, GRPO):
        found = [_GRPO]
        if algorithm.loss_type in _LOSSES:
            found.append(_LOSSES[algorithm.loss_type])
        if algorithm.importance_sampling_level == "sequence":
            found.append(_GSPO)
        return tuple(found)
    return (Paper(name=type(algorithm).__name__, title="an algorithm of the user's own", url=None),)
