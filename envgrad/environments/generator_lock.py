"""One user call at a time holds the process-global random generators.

::

    loop:     await acquire(where) -> Hold ... workers.outcome(hold.run(...)) ... hold.leave()
    worker:                            begin | swapped call | end

A hold is taken on the loop, so that sync calls that wait occupy no thread and their own timeouts do not run. Whoever
ends the call gives it back. A call that runs past its timeout in a thread keeps the generators, since it may draw at
any moment: what waits for them fails a moment later, naming that call.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeVar

from envgrad.errors import EnvironmentFailure

T = TypeVar("T")

GRACE = 5.0
"""seconds that waiting calls give a call that ran past its own timeout"""


class _State(Enum):
    TAKEN = auto()
    RUNNING = auto()
    LEFT_BEHIND = auto()
    """nobody listens any more, but the call may still run"""
    OVER = auto()


class Hold:
    """One call's time with the generators."""

    __slots__ = ("_lock", "_state", "where")

    def __init__(self, lock: GeneratorLock, where: str) -> None:
        self.where = where
        self._lock = lock
        self._state = _State.TAKEN

    def run(self, call: Callable[[], T]) -> T:
        """Run ``call``, in whichever thread, and give the generators back behind it.

        Raises:
            EnvironmentFailure: nobody waits for it any more (then ``call`` is not run).
        """
        with self._lock.mutex:
            if self._state is not _State.TAKEN:
                raise EnvironmentFailure(f"{self.where} was not started: the run is closing")
            self._state = _State.RUNNING
        try:
            return call()
        finally:
            self._end()

    def leave(self) -> None:
        """Nobody waits for the call any more: it ended, or never began, or is left behind in its thread."""
        with self._lock.mutex:
            if self._state is _State.TAKEN:
                self._state = _State.OVER
                self._lock.hand_on(self)
            elif self._state is _State.RUNNING:
                self._state = _State.LEFT_BEHIND
                self._lock.bound_waiting(self)

    @property
    def is_left_behind(self) -> bool:
        return self._state is _State.LEFT_BEHIND

    def _end(self) -> None:
        with self._lock.mutex:
            self._state = _State.OVER
            self._lock.hand_on(self)


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    hold: Hold
    loop: asyncio.AbstractEventLoop
    turn: asyncio.Future[None]


class GeneratorLock:
    """A fair lock for calls that run on event loops and in their worker threads.

    Args:
        grace: seconds that each waiting call gives a call that ran past its own timeout.

    Example:
        >>> async def use(lock):
        ...     hold = await lock.acquire("Game.reset")
        ...     return hold.run(lambda: "swapped in")
        >>> asyncio.run(use(GeneratorLock()))
        'swapped in'
    """

    def __init__(self, grace: float = GRACE) -> None:
        self.grace = grace
        self.mutex = threading.Lock()
        self._holder: Hold | None = None
        self._queue: deque[_Waiter] = deque()

    async def acquire(self, where: str) -> Hold:
        """The generators for one call, in order of arrival. It ends in ``run`` or ``leave``.

        Raises:
            EnvironmentFailure: a call that ran past its timeout still has them; names it.
        """
        hold = Hold(self, where)
        with self.mutex:
            if self._holder is None:
                self._holder = hold
                return hold
            loop = asyncio.get_running_loop()
            waiter = _Waiter(hold, loop, loop.create_future())
            self._queue.append(waiter)
            if self._holder.is_left_behind:
                loop.call_later(self.grace, self._fail, [waiter], self._holder)
        try:
            await waiter.turn
        except asyncio.CancelledError:
            self._withdraw(waiter)
            raise
        return hold

    def bound_waiting(self, hold: Hold) -> None:
        """``hold`` is left behind: what waits for it now does so no longer than ``grace``. With ``mutex`` held."""
        asyncio.get_running_loop().call_later(self.grace, self._fail, list(self._queue), hold)

    def _fail(self, waiters: list[_Waiter], hold: Hold) -> None:
        """Fail those that still wait, if ``hold`` still has the generators."""
        with self.mutex:
            failed = [waiter for waiter in waiters if self._holder is hold and waiter in self._queue]
            for waiter in failed:
                self._queue.remove(waiter)
        for waiter in failed:
            _tell(waiter, self._failure(waiter.hold.where, hold))

    def hand_on(self, hold: Hold) -> None:
        """``hold`` is over: the next in line has the generators. From any thread, with ``mutex`` held."""
        if self._holder is not hold:
            raise AssertionError(f"{hold.where} gave back generators that it does not have")
        self._holder = None
        while self._queue and self._holder is None:
            waiter = self._queue.popleft()
            if _tell(waiter, None):
                self._holder = waiter.hold

    def _withdraw(self, waiter: _Waiter) -> None:
        """``waiter`` was cancelled, be it in the queue or just as its turn came."""
        with self.mutex:
            if waiter in self._queue:
                self._queue.remove(waiter)
            elif self._holder is waiter.hold:
                self.hand_on(waiter.hold)

    @staticmethod
    def _failure(where: str, holder: Hold) -> EnvironmentFailure:
        return EnvironmentFailure(
            f"{where} cannot run: {holder.where} ran past its timeout and still holds the process-global random "
            "generators, which its environment draws from. Fix that call, make it async so that it can be cancelled, "
            "or let the environment draw from a random.Random of its own."
        )


def _tell(waiter: _Waiter, failure: EnvironmentFailure | None) -> bool:
    """Whether ``waiter``'s loop can be told that its turn has come, or never will."""

    def tell() -> None:
        if waiter.turn.done():
            return
        if failure is None:
            waiter.turn.set_result(None)
        else:
            waiter.turn.set_exception(failure)

    try:
        waiter.loop.call_soon_threadsafe(tell)
    except RuntimeError:
        return False
    return True


GENERATORS = GeneratorLock()
"""The process has one set of global generators, and so one lock."""
