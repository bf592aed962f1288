"""Where instances live: in this process, their sync calls in threads; each in a process of its own; or on a cluster.

``process``: a factory of instances in processes. ``hosts``: the two ways in which a factory gets to the server process
that forks them: pickled, into a fresh interpreter, or by a fork of this process. ``forked``: what such a fork leaves
behind of its parent. The rest is the machinery of ``environments.remote``.

On a Ray cluster the same processes are held by actors: ``ray_options`` says what is asked for, ``ray_cluster`` connects
or starts one, ``ray_actor`` runs on a node, ``ray_fleet`` makes, fills and buries actors, ``ray_remote`` carries the
calls of an instance's stand-in there, ``ray_factory`` is the factory.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Protocol

from envgrad.environments.executors.ray_options import RayOptions
from envgrad.errors import ConfigurationError

EXECUTORS = ("thread", "process", "ray")


class ElsewhereFactory(Protocol):
    """A factory whose instances live elsewhere: see ``process`` and ``ray_factory``."""

    def __call__(self) -> object: ...

    @property
    def pid(self) -> int | None:
        """The process here that serves instances; None while there is none."""
        ...

    def close(self) -> None:
        """End what holds instances, and with it every instance; the next call starts anew."""
        ...


def check_executor(name: str) -> None:
    """
    Raises:
        ConfigurationError: ``name`` is no executor, or its package is not there.

    Example:
        >>> check_executor("threads")
        Traceback (most recent call last):
        envgrad.errors.ConfigurationError: environment_executor='threads' must be one of thread, process, ray
    """
    if name not in EXECUTORS:
        raise ConfigurationError(f"environment_executor={name!r} must be one of {', '.join(EXECUTORS)}")
    if name == "ray" and importlib.util.find_spec("ray") is None:
        raise ConfigurationError("environment_executor='ray' needs the package ray: pip install 'envgrad[ray]'")


def factory_elsewhere(
    executor: str, factory: Callable[[], object], name: str, *, close_seconds: float | None, ray: RayOptions
) -> ElsewhereFactory:
    """``factory`` with its instances where ``executor``, ``process`` or ``ray``, puts them.

    Raises:
        ConfigurationError: it cannot be there.
    """
    if executor == "ray":
        from envgrad.environments.executors.ray_factory import RayFactory

        return RayFactory(factory, name, ray, close_seconds=close_seconds)
    from envgrad.environments.executors.process import ProcessFactory

    return ProcessFactory(factory, name, close_seconds=close_seconds)
