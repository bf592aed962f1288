"""What algorithms say of an option that cannot work, and which of their options act where."""

from __future__ import annotations

from dataclasses import MISSING, Field
from typing import Any

from envgrad.errors import ConfigurationError

CREDIT = {"part": "credit"}
"""metadata of a field that only ``credit`` reads"""
LOSS = {"part": "loss"}
"""metadata of a field that only ``loss`` reads"""


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigurationError(f"{name}={value!r} must be one of {', '.join(allowed)}")


def at_least_zero(name: str, value: float, why: str) -> None:
    if not value >= 0:
        raise ConfigurationError(f"{name}={value} must be at least 0; {why}")


def above_zero(name: str, value: float, why: str) -> None:
    if not value > 0:
        raise ConfigurationError(f"{name}={value} must be above 0; {why}")


def within(name: str, value: float, low: float, high: float, why: str) -> None:
    if not low <= value <= high:
        raise ConfigurationError(f"{name}={value} must be in [{low:g}, {high:g}]; {why}")


def lower_clip(epsilon: float) -> None:
    if not 0 <= epsilon < 1:
        raise ConfigurationError(f"epsilon={epsilon} must be in [0, 1): it is the lower clip 1 - epsilon; 0.2 is usual")


def unused(owner: object, all_fields: tuple[Field[Any], ...], prefix: str, because: str) -> None:
    """An error for a field named ``prefix...`` that is not at its default, where it cannot act."""
    for field in all_fields:
        if field.name.startswith(prefix) and getattr(owner, field.name) != field.default:
            raise ConfigurationError(
                f"{field.name}={getattr(owner, field.name)} cannot act: {because}; leave it at {field.default}"
            )


def changed(owner: object, all_fields: tuple[Field[Any], ...], part: str | None = None) -> list[str]:
    """``name=value`` of the fields that are not at their default: those of one part, or all."""
    return [
        f"{field.name}={getattr(owner, field.name)!r}"
        for field in all_fields
        if field.init
        and field.default is not MISSING
        and getattr(owner, field.name) != field.default
        and (part is None or field.metadata.get("part") == part)
    ]
