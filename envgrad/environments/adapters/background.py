"""One asyncio loop in a daemon thread, on which adapters keep their connections.

A connection belongs to one loop for life, but an environment is called from several: its trainer's, a check's, none at
all when it is closed at exit. Here connections live on a loop of their own, and every call goes there and back.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}
"""by process: a forked child has no thread that would run its parent's loop"""


def background_loop() -> asyncio.AbstractEventLoop:
    """This process's loop; started by the first call."""
    with _lock:
        loop = _loops.get(os.getpid())
        if loop is None:
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="envgrad-connections", daemon=True).start()
        return loop


async def in_background(coroutine: Coroutine[object, object, T]) -> T:
    """Await ``coroutine``, run on the background loop. Cancelling this cancels it there.

    Example:
        >>> asyncio.run(in_background(asyncio.sleep(0, result=3)))
        3
    """
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, background_loop()))


async def obtain_in_background(coroutine: Coroutine[object, object, T], *, give_up: Callable[[T], object]) -> T:
    """``in_background`` for what must be given back: if nobody waits for it any more, ``give_up`` gets it there."""
    future = asyncio.run_coroutine_threadsafe(coroutine, background_loop())

    def give_up_late(done: Future[T]) -> None:
        if not done.cancelled() and done.exception() is None:
            background_loop().call_soon_threadsafe(give_up, done.result())

    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        future.add_done_callback(give_up_late)
        raise


def run_in_background(coroutine: Coroutine[object, object, T], *, timeout: float | None) -> T:
    """Run ``coroutine`` on the background loop and wait for it, from a thread without a loop.

    Raises:
        TimeoutError: it took longer than ``timeout`` seconds, and was cancelled.

    Example:
        >>> run_in_background(asyncio.sleep(0, result=3), timeout=5.0)
        3
    """
    future = asyncio.run_coroutine_threadsafe(coroutine, background_loop())
    try:
        return future.result(timeout)
    finally:
        future.cancel()
