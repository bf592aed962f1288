"""Configurations for ``accelerate launch --config_file``, and where they lie."""

from __future__ import annotations

from pathlib import Path

from envgrad.errors import ConfigurationError

FOLDER = Path(__file__).parent


def config_names() -> list[str]:
    """
    Example:
        >>> config_names()
        ['ddp', 'ddp_cpu', 'fsdp2', 'zero2', 'zero3']
    """
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def config_path(name: str) -> Path:
    """The file of a configuration.

    Raises:
        ConfigurationError: there is none of that name.

    Example:
        >>> config_path("fsdp2").name
        'fsdp2.yaml'
    """
    path = FOLDER / f"{name}.yaml"
    if name not in config_names():
        raise ConfigurationError(f"no configuration {name!r}; there are {', '.join(config_names())}")
    return path
