"""What a reward function or a reward model gave -> one reward (or None) per episode, or an error that names it."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import SupportsFloat

from envgrad.environments.arguments import shorten
from envgrad.environments.boundary import Ok, Outcome, Raised, TimedOut
from envgrad.errors import ConfigurationError, NonFiniteScore, RewardFailure, RewardTimeout
from envgrad.rollout.finite import episode_name
from envgrad.rollout.scoring import check_count
from envgrad.types import Episode

logger = logging.getLogger(__name__)

_told_of_nan: set[str] = set()
"""functions of which it has been said that they returned NaN"""


def value_of(outcome: Outcome, where: str, timeout: float | None) -> object:
    """The value of a call.

    Raises:
        RewardTimeout: it took longer than ``timeout`` seconds.
        ConfigurationError: it raised one: what cannot work ends the run.
        RewardFailure: it raised anything else, which is chained.
    """
    match outcome:
        case Ok(value=value):
            return value
        case Raised(error=(ConfigurationError() | RewardFailure()) as error):
            raise error
        case Raised(error=error):
            raise RewardFailure(f"{where} raised {type(error).__name__}: {error}") from error
        case TimedOut():
            raise RewardTimeout(f"{where} took longer than {timeout} s (reward_timeout)")


def read_rewards(value: object, episodes: Sequence[Episode], name: str) -> list[float | None]:
    """One finite reward per episode; None and NaN are None. Nothing is ever broadcast.

    Lists, tuples, and one-dimensional arrays and tensors are read; their items are numbers of any kind, or None.

    Raises:
        ConfigurationError: not one reward per episode, or something that is no reward; names the function.
        RewardFailure: an infinite reward.

    Example:
        >>> read_rewards([True, float("nan")], (None, None), "format")
        [1.0, None]
    """
    to_list = getattr(value, "tolist", None)  # numpy's and torch's arrays
    items = to_list() if callable(to_list) else value
    if isinstance(items, str | bytes) or not isinstance(items, Sequence):
        raise ConfigurationError(
            f"reward function {name!r} returned {_shown(value)} for {len(episodes)} completions; it must return a list "
            f"of {len(episodes)} numbers, one (or None) for each completion"
        )
    check_count(items, episodes, name)
    rewards = [
        _read_number(item, f"reward function {name!r} returned", index, episode)
        for index, (item, episode) in enumerate(zip(items, episodes, strict=True))
    ]
    unknown = sum(reward is None and item is not None for item, reward in zip(items, rewards, strict=True))
    if unknown and name not in _told_of_nan:
        _told_of_nan.add(name)
        logger.warning(
            "reward function %r returned NaN for %d of %d completions: it counts as not applicable, as None does, and "
            "never as 0. Return None if that is meant. This is said once for each function", name, unknown, len(items)
        )  # fmt: skip
    return rewards


def _read_number(value: object, says: str, index: int, episode: Episode) -> float | None:
    if value is None:
        return None
    shape = getattr(value, "shape", ())
    if isinstance(value, str | bytes) or not isinstance(value, SupportsFloat) or tuple(shape) != ():
        raise ConfigurationError(
            f"{says} {_shown(value)} for completion {index}; a reward is a number, or None where it does not apply"
        )
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise RewardFailure(f"{says} {_shown(value)} for completion {index}, which is no float: {error}") from error
    if math.isinf(number):
        raise NonFiniteScore(
            f"{says} {number} for completion {index}, {episode_name(episode)}; a reward must be finite (None: not "
            "applicable)"
        )
    return None if math.isnan(number) else number


def _shown(value: object) -> str:
    return f"{shorten(repr(value))} ({type(value).__name__})"
