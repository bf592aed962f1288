"""A round of evaluation in numbers: reward with its interval, pass@k, ends, turns, tokens, failures.

Every scored episode counts, also of groups that training would drop: a failure is never a reward of 0, and nothing is
left out but what has no score.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from envgrad.evaluation.estimates import Estimate, clustered_mean, pass_at_k, pass_ks
from envgrad.rollout.runner import Round
from envgrad.types import Group, StopReason, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSummary:
    """What was played, and what it says. Estimates are None where nothing could be scored."""

    tasks: int
    """tasks that were drawn and played"""
    unscored_tasks: int
    """those of which no episode has a reward"""
    episodes: int
    """finished episodes"""
    unscored_episodes: int
    """finished, but the environment gave no reward (None)"""
    reward: Estimate | None
    pass_at: Mapping[int, Estimate]
    """by k: over the tasks with at least k scored samples"""
    stop_reasons: Mapping[StopReason, float]
    """shares of the finished episodes"""
    failures: Mapping[str, int]
    """episodes that failed after their retries, by kind"""
    turns: float
    """mean per episode"""
    completion_length: float
    """mean tokens per episode behind its prompt, tool results included"""
    prompt_tokens: int
    result_tokens: int
    """what the environment added behind the prompts: tool results and observations, as the template wrote them"""
    sampled_tokens: int
    environments: Mapping[str, EvaluationSummary] = field(default_factory=dict)
    """each environment's own, where there are several"""

    def metrics(self) -> dict[str, float]:
        """The figures as a trainer logs them; what has no value is left out."""
        found: dict[str, float] = {"tasks": float(self.tasks), "tasks/unscored": float(self.unscored_tasks)}
        found |= _estimates(self)
        for name, summary in self.environments.items():
            found |= {f"{key}/{name}": value for key, value in _estimates(summary).items()}
        return found

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON; None where there is no value."""
        data: dict[str, Any] = {
            "tasks": self.tasks,
            "unscored_tasks": self.unscored_tasks,
            "episodes": self.episodes,
            "unscored_episodes": self.unscored_episodes,
            "failed_episodes": sum(self.failures.values()),
            "failures": dict(self.failures),
            "reward": None if self.reward is None else _plain(self.reward),
            "pass_at": {str(k): _plain(estimate) for k, estimate in self.pass_at.items()},
            "stop_reasons": {str(reason): share for reason, share in self.stop_reasons.items()},
            "turns": self.turns,
            "completion_length": self.completion_length,
            "prompt_tokens": self.prompt_tokens,
            "result_tokens": self.result_tokens,
            "sampled_tokens": self.sampled_tokens,
        }
        if self.environments:
            data["environments"] = {name: summary.as_dict() for name, summary in self.environments.items()}
        return data


def summarize(played: Round, success_reward: float = 1.0) -> EvaluationSummary:
    """The figures of a round; an episode succeeds if its reward is at least ``success_reward``.

    A task that was drawn twice (a finite environment, in its second pass) is one task with more samples.

    Example:
        >>> from envgrad.types import Episode
        >>> task = Task(position=0, split="eval", environment="e", group_id=1, seed=2)
        >>> episodes = [Episode(task=task, sibling=i, token_ids=(5, 6), mask=(0, 1), logprobs=(0.0, -0.1),
        ...     versions=(-1, 0), prompt_length=1, messages=(), turns=(), stop_reason=StopReason.ANSWER, reward=reward)
        ...     for i, reward in enumerate([1.0, 0.0])]
        >>> summary = summarize(Round(groups=(Group(task=task, episodes=tuple(episodes)),)))
        >>> summary.reward.mean, {k: estimate.mean for k, estimate in summary.pass_at.items()}
        (0.5, {1: 0.5, 2: 1.0})
    """
    groups = (*played.scored, *played.dropped)
    summary = _summarize(groups, success_reward)
    by_environment: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_environment[group.task.environment].append(group)
    if len(by_environment) < 2:
        return summary
    own = {name: _summarize(by_environment[name], success_reward) for name in sorted(by_environment)}
    return replace(summary, environments=own)


def evaluation_metrics(played: Round, success_reward: float = 1.0) -> dict[str, float]:
    """What an evaluation logs beside the metrics of any round, under names that every tracker takes.

    ``reward`` and ``reward_ci95`` (half the width of the 95% interval over tasks), ``pass@k`` for powers of two up to
    the samples per task, each with ``_ci95``; with ``/<environment>`` behind, where there are several.
    """
    return summarize(played, success_reward).metrics()


def _summarize(groups: Sequence[Group], success_reward: float) -> EvaluationSummary:
    episodes = [episode for group in groups for episode in group.episodes]
    rewards: dict[Hashable, list[float]] = {}
    for group in groups:
        scored = [episode.reward for episode in group.episodes if episode.reward is not None]
        rewards.setdefault(_identity(group.task), []).extend(scored)
    clusters = [values for values in rewards.values() if values]
    successes = [[float(value >= success_reward) for value in values] for values in clusters]
    ends = Counter(episode.stop_reason for episode in episodes)
    sampled = sum(episode.num_sampled_tokens for episode in episodes)
    return EvaluationSummary(
        tasks=len(rewards),
        unscored_tasks=len(rewards) - len(clusters),
        episodes=len(episodes),
        unscored_episodes=sum(episode.reward is None for episode in episodes),
        reward=clustered_mean(clusters) if clusters else None,
        pass_at=_pass_at(successes, max((len(group.episodes) + len(group.failures) for group in groups), default=0)),
        stop_reasons={reason: ends[reason] / len(episodes) for reason in StopReason if ends[reason]},
        failures=dict(Counter(failure.kind for group in groups for failure in group.failures)),
        turns=_mean(len(episode.turns) for episode in episodes),
        completion_length=_mean(episode.completion_length for episode in episodes),
        prompt_tokens=sum(episode.num_prompt_tokens for episode in episodes),
        result_tokens=sum(episode.completion_length for episode in episodes) - sampled,
        sampled_tokens=sampled,
    )


def _identity(task: Task) -> Hashable:
    """Equal for two draws of one task. Draws of an endless environment are taken to be different tasks."""
    if task.task_index is None:
        return (task.environment, "drawn", task.position)
    return (task.environment, "index", task.task_index)


def _pass_at(successes: Sequence[Sequence[float]], drawn: int) -> dict[int, Estimate]:
    """pass@k of each task, averaged; its interval is over tasks, whatever their numbers of samples.

    ``k`` ends at the ``drawn`` samples of one draw: only tasks that are drawn again have more, and a mean over these
    alone would be one over other tasks.
    """
    found: dict[int, Estimate] = {}
    for k in pass_ks(min(drawn, max((len(samples) for samples in successes), default=0))):
        values = [[pass_at_k(len(samples), int(sum(samples)), k)] for samples in successes if len(samples) >= k]
        found[k] = clustered_mean(values)
    return found


def _estimates(summary: EvaluationSummary) -> dict[str, float]:
    named = {} if summary.reward is None else {"reward": summary.reward}
    named |= {f"pass@{k}": estimate for k, estimate in summary.pass_at.items()}
    found: dict[str, float] = {}
    for name, estimate in named.items():
        found[name] = estimate.mean
        if not math.isnan(estimate.ci95):
            found[f"{name}_ci95"] = estimate.ci95
    return found


def _plain(estimate: Estimate) -> dict[str, float | int | None]:
    return {
        "mean": estimate.mean,
        "standard_error": _or_none(estimate.standard_error),
        "ci95": _or_none(estimate.ci95),
        "tasks": estimate.clusters,
    }


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return fmean(found) if found else 0.0
