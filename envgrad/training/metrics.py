"""What a round of rollouts tells, under the names that trl's users plot; means are over episodes, not over means."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, pstdev, stdev

from envgrad.rollout.runner import Round
from envgrad.types import Episode, Group, StopReason


def round_metrics(played: Round) -> dict[str, float]:
    """Metrics of one round: rewards, lengths, turns, tools, stop reasons, failures.

    ``reward_std`` is the mean over groups of the siblings' standard deviation, and ``frac_reward_zero_std`` the share
    of groups in which all siblings earned the same, from which nothing is learned.
    """
    episodes = [episode for group in played.groups for episode in group.episodes]
    metrics: dict[str, float] = {}
    metrics |= _reward_metrics(played.groups, episodes)
    metrics |= _length_metrics(episodes)
    metrics |= _tool_metrics(episodes)
    for reason in StopReason:
        count = sum(episode.stop_reason is reason for episode in episodes)
        if count:
            metrics[f"stop/{reason}"] = count / len(episodes)
    metrics["group/start_mismatch"] = _mean(group.start_mismatch is not None for group in played.groups)
    metrics["groups/dropped"] = float(len(played.dropped))
    metrics["failures/total"] = float(sum(played.failures.values()))
    for kind, count in played.failures.items():
        metrics[f"failures/{kind}"] = float(count)
    return metrics


def _reward_metrics(groups: Sequence[Group], episodes: Sequence[Episode]) -> dict[str, float]:
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    metrics = {"reward": _mean(rewards), "episodes/unscored": float(len(episodes) - len(rewards))}
    spreads = []
    for group in groups:
        scored = [episode.reward for episode in group.episodes if episode.reward is not None]
        if len(scored) > 1:
            spreads.append(stdev(scored))
    metrics["reward_std"] = _mean(spreads)
    metrics["frac_reward_zero_std"] = _mean(spread < 1e-12 for spread in spreads)
    components: dict[str, list[float]] = defaultdict(list)
    by_environment: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        for name, value in episode.rewards.items():
            if value is not None:
                components[name].append(value)
        if episode.reward is not None:
            by_environment[episode.task.environment].append(episode.reward)
    for name, values in components.items():
        metrics[f"rewards/{name}/mean"] = fmean(values)
        metrics[f"rewards/{name}/std"] = pstdev(values)
    if len(by_environment) > 1:
        for name, values in by_environment.items():
            metrics[f"reward/{name}"] = fmean(values)
            metrics[f"episodes/{name}"] = float(len(values))
    return metrics


def _length_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    lengths = [episode.completion_length for episode in episodes]
    ended = [episode.completion_length for episode in episodes if not episode.truncated]
    return {
        "completions/mean_length": _mean(lengths),
        "completions/min_length": float(min(lengths, default=0)),
        "completions/max_length": float(max(lengths, default=0)),
        "completions/mean_terminated_length": _mean(ended),
        "completions/clipped_ratio": _mean(episode.truncated for episode in episodes),
        "episodes/turns": _mean(len(episode.turns) for episode in episodes),
        "tokens/sampled": float(sum(episode.num_sampled_tokens for episode in episodes)),
        "tokens/prompt": float(sum(episode.prompt_length for episode in episodes)),
    }


def _tool_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """``tools/call_frequency``: calls per episode; ``tools/failure_frequency``: share of the calls that failed."""
    outcomes = [outcome for episode in episodes for turn in episode.turns for outcome in turn.outcomes]
    if not outcomes:
        return {"tools/call_frequency": 0.0, "tools/failure_frequency": 0.0}
    return {
        "tools/call_frequency": len(outcomes) / len(episodes),
        "tools/failure_frequency": _mean(not outcome.ok for outcome in outcomes),
    }


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return fmean(found) if found else 0.0


OF_ALL_ROUNDS = ("stop/", "failures/")
"""metrics that a round leaves out where they are 0"""


class MetricAverages:
    """Averages of what was recorded since the last log; what a round leaves out because it is 0 counts as 0.

    Example:
        >>> averages = MetricAverages()
        >>> averages.add({"reward": 0.0}); averages.add({"reward": 1.0, "kl": 0.5})
        >>> averages.take()
        {'reward': 0.5, 'kl': 0.5}
        >>> averages.take()
        {}
    """

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = defaultdict(list)

    def add(self, metrics: dict[str, float]) -> None:
        """Record one step's metrics; a value that is not finite is kept and shown, never hidden."""
        for name, value in metrics.items():
            self._values[name].append(value)

    def take(self) -> dict[str, float]:
        """The averages, and start anew."""
        rounds = len(self._values.get("failures/total", ()))
        averages = {
            name: math.fsum(values) / (max(rounds, len(values)) if name.startswith(OF_ALL_ROUNDS) else len(values))
            for name, values in self._values.items()
        }
        self._values.clear()
        return averages
