"""What configurations say of a value that cannot work."""

from __future__ import annotations

from envgrad.errors import ConfigurationError


def choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigurationError(f"{name}={value!r} is not known; choose one of {', '.join(allowed)}")


def given(name: str, value: object) -> None:
    if value is None:
        raise ConfigurationError(f"{name}=None is no number; set one, or leave it at its default")


def at_least(name: str, value: float | None, least: float, *, why: str = "") -> None:
    if value is not None and value < least:
        raise ConfigurationError(f"{name}={value} must be at least {least}{'; ' + why if why else ''}")


def scale_name(value: object) -> str:
    """True and False (or their text) are group and none, as in trl.

    Example:
        >>> scale_name(False), scale_name("batch")
        ('none', 'batch')
    """
    return {"true": "group", "false": "none"}.get(str(value).lower(), str(value))


def at_most_concurrent(name: str, siblings: int | None, limit: int | None) -> None:
    if siblings is not None and limit is not None and siblings > limit:
        raise ConfigurationError(
            f"max_concurrent_episodes={limit} must be at least {name}={siblings}: groups are played whole; raise it"
        )


def check_baseline(baseline: str, dynamic_sampling: bool) -> None:
    """
    Raises:
        ConfigurationError: groups of equal rewards would be replaced, though they teach where batches are compared.
    """
    if baseline == "batch" and dynamic_sampling:
        raise ConfigurationError(
            "dynamic_sampling=True cannot act with baseline='batch': a group of equal rewards teaches there, beside "
            "other groups; turn one of them off"
        )
