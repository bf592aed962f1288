"""Where instances live: in this process, their sync calls in threads, or each in a process of its own.

``process``: a factory of instances in processes. ``hosts``: the two ways in which a factory gets to the server process
that forks them: pickled, into a fresh interpreter, or by a fork of this process. ``forked``: what such a fork leaves
behind of its parent. The rest is the machinery of ``environments.remote``.
"""

from __future__ import annotations

from envgrad.errors import ConfigurationError

EXECUTORS = ("thread", "process")


def check_executor(name: str) -> None:
    """
    Raises:
        ConfigurationError: ``name`` is no executor.

    Example:
        >>> check_executor("ray")
        Traceback (most recent call last):
        envgrad.errors.ConfigurationError: environment_executor='ray' does not exist yet; use 'thread' or 'process'
    """
    if name == "ray":
        raise ConfigurationError("environment_executor='ray' does not exist yet; use 'thread' or 'process'")
    if name not in EXECUTORS:
        raise ConfigurationError(f"environment_executor={name!r} must be one of {', '.join(EXECUTORS)}")
