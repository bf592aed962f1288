"""What a round of rollouts tells, under the names that trl's users plot; means are over episodes, not over means."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev

from envgrad.rollout.runner import Round
from envgrad.types import Episode, Group, StopReason


def round_metrics(played: Round) -> dict[str, float]:
    """Metrics of one round: rewards, lengths, turns, tools, stop reasons, failures.

    ``reward_std`` and ``rewards/<name>/std`` are standard deviations over all episodes of the round (with N - 1), and
    ``frac_reward_zero_std`` is the share of groups in which all siblings earned the same, from which nothing is
    learned. Groups that dynamic sampling
    replaced (``groups/filtered``) are in all of these: what is trained is chosen by its rewards, so means over it alone
    would say little of the policy. ``groups/unteaching`` counts those that were trained although they teach nothing,
    because the bound was reached.
    """
    groups = played.scored
    episodes = [episode for group in groups for episode in group.episodes]
    metrics: dict[str, float] = {}
    metrics |= _reward_metrics(groups, episodes)
    metrics |= _length_metrics(episodes)
    metrics |= _tool_metrics(episodes)
    metrics |= _part_metrics(episodes)
    for reason in StopReason:
        count = sum(episode.stop_reason is reason for episode in episodes)
        if count:
            metrics[f"stop/{reason}"] = count / len(episodes)
    logged: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        for name, values in group.metrics.items():
            logged[name].extend(values)
    metrics |= {name: _mean(values) for name, values in logged.items()}
    metrics["group/start_mismatch"] = _mean(group.start_mismatch is not None for group in groups)
    metrics["groups/dropped"] = float(len(played.dropped))
    if played.dynamic:
        metrics["groups/filtered"] = float(len(played.filtered))
        metrics["groups/unteaching"] = float(played.unteaching)
    metrics |= {f"curriculum/{name}": share for name, share in played.shares.items()}
    metrics |= {f"faults/{kind}": float(count) for kind, count in played.faults.items()}
    metrics["failures/total"] = float(sum(played.failures.values()))
    for kind, count in played.failures.items():
        metrics[f"failures/{kind}"] = float(count)
    return metrics


def _reward_metrics(groups: Sequence[Group], episodes: Sequence[Episode]) -> dict[str, float]:
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    metrics = {"reward": _mean(rewards), "episodes/unscored": float(len(episodes) - len(rewards))}
    metrics["reward_std"] = _std(rewards)
    spreads = []
    for group in groups:
        scored = [episode.reward for episode in group.episodes if episode.reward is not None]
        if len(scored) > 1:
            spreads.append(stdev(scored))
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
        metrics[f"rewards/{name}/std"] = _std(values)
    if len(by_environment) > 1:
        for name, values in by_environment.items():
            metrics[f"reward/{name}"] = fmean(values)
            metrics[f"episodes/{name}"] = float(len(values))
    return metrics


def _length_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Lengths count sampled tokens, as trl's do: tool results and separators are left out."""
    lengths = [episode.num_sampled_tokens for episode in episodes]
    ended = [episode.num_sampled_tokens for episode in episodes if not episode.truncated]
    return {
        "completions/mean_length": _mean(lengths),
        "completions/min_length": float(min(lengths, default=0)),
        "completions/max_length": float(max(lengths, default=0)),
        "completions/mean_terminated_length": _mean(ended),
        "completions/min_terminated_length": float(min(ended, default=0)),
        "completions/max_terminated_length": float(max(ended, default=0)),
        "completions/clipped_ratio": _mean(episode.truncated for episode in episodes),
        "episodes/turns": _mean(len(episode.turns) for episode in episodes),
        "tokens/sampled": float(sum(episode.num_sampled_tokens for episode in episodes)),
        "tokens/prompt": float(sum(episode.num_prompt_tokens for episode in episodes)),
    }


def _tool_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """``tools/call_frequency``: calls per episode; ``tools/failure_frequency``: share of the calls that failed.

    For each tool too, as ``tools/<name>/*``; calls of tools that do not exist count in the totals only.
    """
    outcomes = [outcome for episode in episodes for turn in episode.turns for outcome in turn.outcomes]
    metrics = {
        "tools/call_frequency": len(outcomes) / max(len(episodes), 1),
        "tools/failure_frequency": _mean(not outcome.ok for outcome in outcomes),
    }
    by_tool: dict[str, list[bool]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.tool is not None:
            by_tool[outcome.tool].append(outcome.ok)
    for name, succeeded in by_tool.items():
        metrics[f"tools/{name}/call_frequency"] = len(succeeded) / len(episodes)
        metrics[f"tools/{name}/failure_frequency"] = _mean(not ok for ok in succeeded)
    return metrics


def _part_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Of the policy's other parts, such as other seats, by name; none where there are none."""
    parts: dict[str, list[Episode]] = defaultdict(list)
    for episode in episodes:
        for part in episode.parts:
            parts[part.part].append(part)
    metrics = {}
    for name, played in parts.items():
        metrics[f"parts/{name}/reward"] = _mean(one.reward for one in played if one.reward is not None)
        metrics[f"parts/{name}/tokens"] = float(sum(one.num_sampled_tokens for one in played))
    return metrics


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return fmean(found) if found else 0.0


def _std(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


OF_ALL_ROUNDS = ("stop/", "failures/", "faults/")
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

    def state_dict(self) -> dict[str, list[float]]:
        """What has not been logged yet, for a checkpoint."""
        return {name: list(values) for name, values in self._values.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Go on with what ``state_dict`` gave."""
        self._values.clear()
        for name, values in state.items():
            self._values[name].extend(values)
