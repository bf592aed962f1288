"""What a pool does with one instance: build it, in time or not at all, and ask it for its state."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from envgrad.environments.boundary import Ok, Raised, TimedOut, WorkerPool, call_user
from envgrad.errors import EnvironmentFailure


class Birth:
    """One call of a factory: what it builds is either taken in, or has come too late. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._instance: object | None = None
        self._given_up = False

    def take_in(self, instance: object, admit: Callable[[], None]) -> bool:
        """Whether somebody still waits for ``instance``, which then is ``admit``-ted."""
        with self._lock:
            if not self._given_up:
                admit()
                self._instance = instance
            return not self._given_up

    def give_up(self) -> object | None:
        """Nobody waits any more; what was taken in at the last moment."""
        with self._lock:
            self._given_up = True
            return self._instance


async def ask_member(
    label: str, instance: object, name: str, *arguments: object, workers: WorkerPool, timeout: float | None
) -> object:
    """What ``instance``'s method ``name`` returns, within ``timeout`` seconds (None: no limit).

    Raises:
        EnvironmentFailure: it raised, or took too long.
    """
    method = partial(getattr(instance, name), *arguments)
    outcome = await call_user(f"{label}'s {name}", method, workers=workers, timeout=timeout)
    match outcome:
        case Ok(value=value):
            return value
        case Raised(error=error):
            raise EnvironmentFailure(f"{label}: {name} raised {type(error).__name__}: {error}") from error
        case TimedOut(seconds=seconds):
            raise EnvironmentFailure(f"{label}: {name} did not return in {seconds:.1f} s")
