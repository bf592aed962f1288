"""``close()`` of instances; user calls at moments without a running loop of ours: construction, the exit of Python."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

from envgrad.environments.boundary import (
    CANCEL_LOOKS,
    LOOK_SECONDS,
    Ok,
    Outcome,
    Raised,
    TimedOut,
    WorkerPool,
    call_user,
    guard_in_thread,
)
from envgrad.environments.spec import Elsewhere
from envgrad.errors import EnvironmentFailure

_CLOSING_THREADS = 64
_CLOSE_ERRORS_KEPT = 32


def call_all_now(functions: Sequence[Callable[[], object]], *, timeout: float | None) -> list[Outcome]:
    """Call sync or async functions at once, each in a daemon thread, and wait ``timeout`` seconds in all.

    An async function runs in a loop of its own.

    Example:
        >>> [outcome.value for outcome in call_all_now([lambda: 1, lambda: 2], timeout=5.0)]
        [1, 2]
    """
    outcomes: list[Outcome | None] = [None] * len(functions)

    def work(index: int, function: Callable[[], object]) -> None:
        outcomes[index] = guard_in_thread(partial(_finish, function))

    threads: list[threading.Thread] = []
    start = perf_counter()
    for index, function in enumerate(functions):
        thread = threading.Thread(target=work, args=(index, function), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # Python starts no threads while it exits
            work(index, function)
        else:
            threads.append(thread)
    for thread in threads:
        thread.join(None if timeout is None else max(0.0, timeout - (perf_counter() - start)))
    seconds = perf_counter() - start
    return [TimedOut(seconds, killable=False) if outcome is None else outcome for outcome in outcomes]


def _finish(function: Callable[[], object]) -> object:
    value = function()
    if not inspect.isawaitable(value):
        return value

    async def wait() -> object:
        return await value

    return asyncio.run(wait())


class Closer:
    """Calls ``close()`` of one environment's instances, each with a deadline, and keeps what went wrong.

    Args:
        label: the environment's name, for messages.
        has_close: whether it defines ``close``; else nothing is called.
        timeout: seconds that one ``close()`` may take; None: no limit.
    """

    def __init__(self, label: str, *, has_close: bool, timeout: float | None) -> None:
        self.errors: list[Exception] = []
        """what ``close()`` of an instance raised, or that it took too long; the latest ones"""
        self.num_errors = 0
        self.timeout = timeout
        self._label = label
        self._has_close = has_close
        self._threads: WorkerPool | None = None

    async def close(self, instance: object) -> None:
        """Close ``instance`` from the loop."""
        if not self._has_close:
            return
        ending = instance._call_ending if isinstance(instance, Elsewhere) else None
        if ending is not None and not ending.done():
            await asyncio.wait({ending})  # bounded; what ``close()`` may take begins behind it
        if self._threads is None:  # threads of their own: closing works even where hung tools fill the workers
            self._threads = WorkerPool(_CLOSING_THREADS, max_hung=10**6, name="envgrad-close")
        where, call = f"{self._label}'s close()", partial(_call_close, instance)
        limit = self.timeout
        if limit is not None and isinstance(instance, Elsewhere):  # it has the limit itself, behind a call's ending
            limit += CANCEL_LOOKS * LOOK_SECONDS
        self._collect(await call_user(where, call, workers=self._threads, timeout=limit))

    def close_now(self, instances: Sequence[object], *, wait: float | None) -> None:
        """Close ``instances`` without a loop, and wait ``wait`` seconds in all; 0.0 looks at no outcome."""
        if not (self._has_close and instances):
            return
        for outcome in call_all_now([partial(_call_close, instance) for instance in instances], timeout=wait):
            if wait != 0.0:
                self._collect(outcome)

    def end(self) -> None:
        """Let the threads end."""
        if self._threads is not None:
            self._threads.close()

    def _collect(self, outcome: Outcome) -> None:
        self.num_errors += not isinstance(outcome, Ok)
        del self.errors[:-_CLOSE_ERRORS_KEPT]
        match outcome:
            case Raised(error=error):
                self.errors.append(error)
            case TimedOut(seconds=seconds, killable=killable):
                end = "was stopped" if killable else "was left behind"
                self.errors.append(
                    EnvironmentFailure(f"{self._label}: close() did not return in {seconds:.1f} s and {end}")
                )


def _call_close(instance: object) -> object:
    close: Callable[[], object] = getattr(instance, "close")  # noqa: B009 - any object may be an environment
    return close()
