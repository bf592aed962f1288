"""Numbers of an episode that are NaN or infinite: found where they arise, named, and never trained."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, inf, isfinite, isnan

from envgrad.errors import EpisodeFailure, NonFiniteError, NonFiniteLogprob, NonFiniteReward, NonFiniteScore, NotFinite
from envgrad.types import Episode, Task

LARGEST_REWARD = 1e150
"""of either sign; the squares of larger ones, of which advantages and metrics are made, are infinite"""

_EPISODE = "episode "


def episode_name(episode: Episode) -> str:
    """How messages call it: its task's key, its number among its siblings, its environment."""
    return sibling_name(episode.task, episode.sibling)


def sibling_name(task: Task, sibling: int) -> str:
    """``episode_name`` of one that may not have been finished."""
    return f"{_EPISODE}{task.key}/{sibling}" + (f" of {task.environment}" if task.environment else "")


def check_played(episode: Episode, *, unknown: bool = False) -> None:
    """The sampler's log-probs and the environment's reward of an episode, and of its parts, are finite.

    Args:
        episode: As it was played and scored.
        unknown: NaN is a log-prob that is not known, which training then computes (a ``rollout_func``'s).

    Raises:
        NonFiniteLogprob: of a sampled token.
        NonFiniteReward: rewards of turns and of ``get_reward`` that add up to an infinite one.
    """
    for number, row in enumerate(episode.rows):
        if isfinite(sum(row.logprobs)):
            continue
        for place, (logprob, sampled) in enumerate(zip(row.logprobs, row.mask, strict=True)):
            if sampled and not isfinite(logprob) and not (unknown and isnan(logprob)):
                branch = f" of its row {number}" if number else ""
                raise NonFiniteLogprob(
                    f"{episode_name(episode)}: the sampler gave token {row.token_ids[place]}, at place {place}{branch},"
                    f" the log-prob {logprob}; a sampled token's is finite"
                )
    if episode.reward is not None and not abs(episode.reward) <= LARGEST_REWARD:
        raise NonFiniteReward(
            f"{episode_name(episode)}: its rewards {dict(episode.rewards)} add up to {episode.reward}; a reward must "
            f"be finite, and at most {LARGEST_REWARD:g}"
        )
    for part in episode.parts:
        check_played(part, unknown=unknown)


def check_scored(episodes: Sequence[Episode]) -> None:
    """The weighted sums of all rewards are finite.

    Raises:
        NonFiniteScore: one is not.
    """
    for episode in episodes:
        if episode.reward is not None and not abs(episode.reward) <= LARGEST_REWARD:
            raise NonFiniteScore(
                f"{episode_name(episode)}: its rewards {dict(episode.rewards)} and their weights add up to "
                f"{episode.reward}; a reward must be finite, and at most {LARGEST_REWARD:g}"
            )


def end_if_asked(failure: EpisodeFailure, *, ends: bool, where: str) -> None:
    """
    Args:
        failure: What went wrong.
        ends: Whether a number that is not finite ends the run.
        where: The episode or group; named unless the failure names its episode itself.

    Raises:
        NonFiniteError: ``failure`` is of a number that is not finite, and such a number ``ends`` the run.
    """
    if ends and isinstance(failure, NotFinite):
        named = str(failure) if _EPISODE in str(failure) else f"{where}: {failure}"
        raise NonFiniteError(
            f"{named} (on_nonfinite='raise'; 'skip' drops what it belongs to, and counts it)"
        ) from failure


def total_or_infinite(values: Sequence[float]) -> float:
    """The sum; infinite where it is too large for a float.

    Example:
        >>> total_or_infinite([1.0, 2.5]), total_or_infinite([1e308, 1e308])
        (3.5, inf)
    """
    try:
        return fsum(values)
    except OverflowError:
        return inf
