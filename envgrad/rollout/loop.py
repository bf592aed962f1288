"""The rollouts' asyncio loop, in a thread of its own: it works in a notebook, and decoding never blocks it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_SECONDS = 5.0
"""that what still runs gets to obey its cancellation; user code may refuse"""
LIVENESS_SECONDS = 0.5
"""how often a waiting caller looks whether the loop's thread lives"""


class RolloutLoop:
    """An asyncio event loop in a daemon thread.

    Example:
        >>> loop = RolloutLoop()
        >>> loop.run(asyncio.sleep(0, result=3))
        3
        >>> loop.close()
    """

    def __init__(self) -> None:
        self.watch: Callable[[], None] | None = None
        """called by who waits in ``run``, now and then; what it raises ends the waiting"""
        self._loop = asyncio.new_event_loop()
        self._thread = self._start_thread()

    def _start_thread(self) -> threading.Thread:
        thread = threading.Thread(target=self._serve, name="envgrad-rollouts", daemon=True)
        thread.start()
        return thread

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def run(self, coroutine: Coroutine[object, object, T]) -> T:
        """Run ``coroutine`` on the loop and wait for it; an interrupt here cancels it there.

        A ``SystemExit`` or ``KeyboardInterrupt`` that is raised on the loop stops its thread. It is started again, so
        that what waits there is cleaned up and the exception arrives here.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            while not future.done():
                wait([future], timeout=LIVENESS_SECONDS)
                if self.watch is not None and not future.done():
                    self.watch()
                if not self._thread.is_alive():
                    self._thread = self._start_thread()
            return future.result()
        finally:
            future.cancel()

    def submit(self, coroutine: Coroutine[object, object, T]) -> Future[T]:
        """Start ``coroutine`` on the loop without waiting; cancelling the future cancels it there."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Cancel what still runs, stop the loop and join its thread. Safe to call twice.

        What refuses to be cancelled for ``CLOSE_SECONDS`` is left behind, with a warning.
        """
        if self._loop.is_closed():
            return
        refusing = self.run(_cancel_others())
        if refusing:
            logger.warning(
                "%d asynchronous calls go on for %.0f s after they were cancelled, and are left behind: an "
                "environment's coroutine catches CancelledError",
                refusing,
                CLOSE_SECONDS,
            )  # fmt: skip
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> int:
    """How many refuse."""
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    if not others:
        return 0
    ended, refusing = await asyncio.wait(others, timeout=CLOSE_SECONDS)
    await asyncio.gather(*ended, return_exceptions=True)  # their errors are of no use any more
    return len(refusing)


async def gather_or_cancel(coroutines: Sequence[Coroutine[object, object, T]]) -> list[T]:
    """All results in order; if one raises, the others are cancelled, awaited, and its error goes on as it is."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
