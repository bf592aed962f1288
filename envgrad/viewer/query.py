"""A request's query -> typed values. What cannot be read is an error that names the value and the rule."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import get_args, overload

from envgrad.episodes import EpisodeFilter, Use
from envgrad.episodes.records import Order
from envgrad.errors import ConfigurationError


class _Needed:
    """The parameter must be there."""


@overload
def number(asked: Mapping[str, str], name: str, default: None, *, least: int, most: int = ...) -> int | None: ...
@overload
def number(
    asked: Mapping[str, str], name: str, default: int | type[_Needed] = ..., *, least: int, most: int = ...
) -> int: ...
def number(
    asked: Mapping[str, str],
    name: str,
    default: int | type[_Needed] | None = _Needed,
    *,
    least: int,
    most: int = 2**53 - 1,
) -> int | None:
    """A whole number in ``least..most``; ``default`` where it is not given.

    Raises:
        ConfigurationError: no such number, or none given where one must be.

    Example:
        >>> number({"step": "3"}, "step", least=0)
        3
    """
    value = asked.get(name, "")
    if value == "" and not isinstance(default, type):
        return default
    try:
        read = int(value)
    except ValueError:
        read = least - 1
    if not least <= read <= most:
        raise ConfigurationError(f"{name}={value!r} must be a whole number from {least} to {most}")
    return read


def text(asked: Mapping[str, str], name: str) -> str | None:
    """A text; None where it is empty or not given."""
    return asked.get(name) or None


def order(asked: Mapping[str, str]) -> Order:
    """How a list is ordered.

    Raises:
        ConfigurationError: no such order.
    """
    wanted = asked.get("order") or "newest"
    known: tuple[Order, ...] = get_args(Order)
    for one in known:
        if one == wanted:
            return one
    raise ConfigurationError(f"order={wanted!r} is none of {', '.join(known)}")


def episode_filter(asked: Mapping[str, str]) -> EpisodeFilter:
    """The filter that a page's address holds.

    Raises:
        ConfigurationError: a value that cannot be read, or an empty range.

    Example:
        >>> episode_filter({"min": "0.5", "failed": "false", "stop": "done"}).min_reward
        0.5
    """
    return EpisodeFilter(
        split=text(asked, "split"),
        environment=text(asked, "environment"),
        first_step=number(asked, "first", None, least=0),
        last_step=number(asked, "last", None, least=0),
        min_reward=_real(asked, "min"),
        max_reward=_real(asked, "max"),
        stop_reason=text(asked, "stop"),
        use=_use(asked),
        failed=_choice(asked, "failed", {"": None, "true": True, "false": False}),
        task_index=number(asked, "task", None, least=0),
        text=text(asked, "text"),
        part=_part(asked),
        current=_choice(asked, "lineage", {"": True, "old": False, "both": None}),
    )


def _real(asked: Mapping[str, str], name: str) -> float | None:
    value = asked.get(name, "")
    if value == "":
        return None
    try:
        read = float(value)
    except ValueError:
        read = float("nan")
    if not isfinite(read):
        raise ConfigurationError(f"{name}={value!r} must be a number")
    return read


def _use(asked: Mapping[str, str]) -> Use | None:
    value = asked.get("use", "")
    if value == "":
        return None
    if value not in set(Use):
        raise ConfigurationError(f"use={value!r} is none of {', '.join(Use)}")
    return Use(value)


def _part(asked: Mapping[str, str]) -> str | None:
    """``agent``: the agents themselves; anything else names another part of the policy's."""
    value = text(asked, "part")
    return "" if value == "agent" else value


def _choice(asked: Mapping[str, str], name: str, values: Mapping[str, bool | None]) -> bool | None:
    value = asked.get(name, "")
    if value not in values:
        raise ConfigurationError(f"{name}={value!r} is none of {', '.join(filter(None, values))}")
    return values[value]
