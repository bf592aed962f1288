"""User calls at moments without a running loop of ours: construction, and the interpreter's exit."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

from envgrad.environments.boundary import Outcome, TimedOut, guard_in_thread


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
