"""Instances that live in a process each: a factory of environments, made from an ordinary one."""

from __future__ import annotations

import sys
from collections.abc import Callable

from envgrad.environments.executors.hosts import ForkedHost, SpawnedHost, pickled_by_name
from envgrad.environments.remote.client import Remote
from envgrad.environments.remote.host import ServerHost
from envgrad.environments.remote.stand_in import first_remote
from envgrad.errors import ConfigurationError


class ProcessFactory:
    """A factory whose instances each live in a process of their own, forked from one server process.

    A class that can be imported is imported by the server, a fresh interpreter, as the module's file has it; what else
    there is (classes of a script or notebook, closures, lambdas) is forked from this process, as it is when the first
    instance is made. Not thread-safe in that first call.

    Args:
        factory: a callable without arguments, as ``environment_factory``.
        name: what messages call it.
        close_seconds: what an environment's ``close()`` may take; then its process is ended. None: no limit.

    Raises:
        ConfigurationError: this system has no fork; what is given is no callable.

    Example:
        >>> import asyncio
        >>> from envgrad.environments.contract import inspect_environment
        >>> class Door:
        ...     def reset(self):
        ...         return "Knock."
        ...
        ...     def knock(self) -> str:
        ...         return "Who is there?"
        >>> factory = ProcessFactory(Door, "door")
        >>> spec, door = inspect_environment("door", factory)
        >>> asyncio.run(door.reset()), [tool.name for tool in door.tools]
        ('Knock.', ['knock'])
        >>> door.close()
        >>> factory.close()
    """

    def __init__(self, factory: Callable[[], object], name: str, *, close_seconds: float | None = None) -> None:
        if sys.platform != "linux":
            raise ConfigurationError(
                f"environment_executor='process' needs Linux, whose processes can be forked and end with their parent; "
                f"this is {sys.platform}: use 'thread'"
            )
        self.name = name
        self._close_seconds = close_seconds
        pickled = pickled_by_name(factory)
        self.imported = pickled is not None
        """whether the server imports the factory; else it is a fork of this process"""
        self._host: ServerHost = ForkedHost(name, factory) if pickled is None else SpawnedHost(name, pickled)
        self._class: type[Remote] | None = None

    def __call__(self) -> Remote:
        if self._class is None:
            first = first_remote(self._host, close_seconds=self._close_seconds)
            self._class = type(first)
            return first
        return self._class()

    @property
    def pid(self) -> int | None:
        """The server process; None while there is none."""
        return self._host.pid

    def close(self) -> None:
        """End the server process, and with it every instance; the next call starts anew."""
        self._host.close()
