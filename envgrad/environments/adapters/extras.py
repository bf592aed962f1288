"""Packages of other ecosystems: imported when an environment is made, never before."""

from __future__ import annotations

import importlib
from types import ModuleType

from envgrad.errors import ConfigurationError


def require(module: str, *, extra: str, what: str) -> ModuleType:
    """The package ``module``.

    Args:
        extra: the extra of ours that installs it.
        what: who needs it, for the message.

    Raises:
        ConfigurationError: it is not installed; the message names the extra.

    Example:
        >>> require("no_such_game", extra="games", what="GameEnvironment")
        Traceback (most recent call last):
        envgrad.errors.ConfigurationError: GameEnvironment needs the package no_such_game: pip install 'envgrad[games]'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise ConfigurationError(f"{what} needs the package {module}: pip install 'envgrad[{extra}]'") from error
