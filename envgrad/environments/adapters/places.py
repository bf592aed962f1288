"""Places at a server: so many connections at once, in order of asking, and kept ones used again.

All instances of an environment in this process share them. ::

    take() -> a kept connection, or None: a place for a new one       waits where all are taken
    give(kept) <- a connection that can be used again; give() <- a place whose connection is closed
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from envgrad.environments.adapters.background import background_loop
from envgrad.errors import ConfigurationError, EnvironmentFailure

C = TypeVar("C")


class Places(Generic[C]):
    """Its coroutines run on the background loop.

    Args:
        limit: connections at once; None: no limit.

    Raises:
        ConfigurationError: a limit below 1.

    Example:
        >>> from envgrad.environments.adapters.background import run_in_background
        >>> places = Places(1)
        >>> run_in_background(places.take(1.0, "the server"), timeout=5.0) is None, places.taken
        (True, 1)
        >>> run_in_background(places.take(0.1, "the server"), timeout=5.0)
        Traceback (most recent call last):
        envgrad.errors.EnvironmentFailure: the server: all 1 (max_sessions) are in use for 0.1 s; raise it
    """

    def __init__(self, limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise ConfigurationError(f"max_sessions={limit} must be at least 1, or None")
        self.limit = limit
        self.taken = 0
        """connections that are in use"""
        self._kept: list[C] = []
        self._waiters: deque[asyncio.Future[None]] = deque()

    async def take(self, seconds: float, server: str) -> C | None:
        """A connection that was kept, else None: a place for a new one.

        Raises:
            EnvironmentFailure: none was free within ``seconds``.
        """
        if self.limit is not None and (self.taken >= self.limit or self._waiters):
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await asyncio.wait((waiter,), timeout=seconds)
            except asyncio.CancelledError:
                if waiter.done():
                    self.give()  # the place that was meant for us
                waiter.cancel()
                raise
            if not waiter.done():
                waiter.cancel()
                raise EnvironmentFailure(
                    f"{server}: all {self.limit} (max_sessions) are in use for {seconds:g} s; raise it"
                )
        else:
            self.taken += 1
        return self._kept.pop() if self._kept else None

    def give(self, kept: C | None = None) -> None:
        """Give a place back, with a connection that can be used again. On the background loop."""
        if kept is not None:
            self._kept.append(kept)
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)  # the place changes hands
                return
        self.taken -= 1

    def give_soon(self, kept: C | None = None) -> None:
        """``give``, from any thread."""
        background_loop().call_soon_threadsafe(self.give, kept)

    def drain(self) -> list[C]:
        """The kept connections, which are the caller's to close."""
        kept, self._kept = self._kept, []
        return kept
