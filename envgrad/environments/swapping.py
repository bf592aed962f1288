"""User calls with an instance's own generators swapped in: in a worker thread as a whole, on a loop step by step."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import ContextVar, Token
from functools import partial
from typing import Any, TypeVar

from envgrad.environments.generator_lock import GENERATORS, Hold
from envgrad.environments.isolation import Stream
from envgrad.errors import EnvironmentFailure

T = TypeVar("T")


async def swapped_call(
    where: str,
    call: Callable[[], object],
    stream: Stream,
    submit: Callable[[Callable[[], object]], Awaitable[T]],
) -> T:
    """Wait for the generators, then ``submit`` the call with ``stream`` swapped in; what ``submit`` gives comes back.

    Raises:
        EnvironmentFailure: a call that ran past its timeout still holds the generators.
    """
    hold = await GENERATORS.acquire(where)
    try:
        return await submit(partial(hold.run, partial(stream.run, call)))
    finally:
        hold.leave()


def swapped_steps(where: str, awaitable: Awaitable[object], stream: Stream) -> Awaitable[object]:
    """``awaitable``, each of whose steps runs with ``stream`` swapped in; tasks that it starts are taken along.

    Between two steps, while it waits, nothing of it is swapped in. Await it on a running loop.
    """
    _follow_tasks(asyncio.get_running_loop())
    return _stepwise(_Steps(where, _as_coroutine(awaitable), stream))


async def _stepwise(steps: _Steps) -> object:
    return await steps


def _as_coroutine(awaitable: Awaitable[object]) -> Coroutine[Any, Any, object]:
    async def wait() -> object:
        return await awaitable

    return awaitable if isinstance(awaitable, Coroutine) else wait()


_OWNER: ContextVar[tuple[str, Stream] | None] = ContextVar("envgrad_steps_of", default=None)
"""whose step runs right now; a task that is started in it inherits the value with its context"""


class _Steps(Generator[Any, Any, object]):
    """Drives a coroutine: waits for the generators, then makes one step with them."""

    def __init__(self, where: str, coroutine: Coroutine[Any, Any, object], stream: Stream) -> None:
        self._where = where
        self._coroutine = coroutine
        self._stream = stream
        self._step: Callable[[], object] = partial(coroutine.send, None)
        self._turn: Generator[Any, None, Hold] | None = None
        """the wait for the generators that is under way"""

    def __await__(self) -> _Steps:
        return self

    def send(self, value: object) -> object:
        if self._turn is None:
            self._step = partial(self._coroutine.send, value)
        return self._advance()

    def throw(self, error: Any, value: Any = None, traceback: Any = None) -> object:
        if self._turn is None:
            self._step = partial(self._coroutine.throw, error)
            return self._advance()
        turn, self._turn = self._turn, None
        try:
            return turn.throw(error)  # cancelled, or the generators will not come
        finally:
            self._coroutine.close()

    def close(self) -> None:
        if self._turn is not None:
            self._turn.close()
        self._coroutine.close()

    def _advance(self) -> object:
        if self._turn is None:
            self._turn = GENERATORS.acquire(self._where).__await__()
        try:
            return self._turn.send(None)  # somebody has the generators: wait
        except StopIteration as mine:
            hold: Hold = mine.value
        except EnvironmentFailure:  # and will not give them back
            self._coroutine.close()
            raise
        self._turn = None
        return hold.run(self._swapped_step)

    def _swapped_step(self) -> object:
        token: Token[tuple[str, Stream] | None] = _OWNER.set((self._where, self._stream))
        try:
            return self._stream.run(self._step)
        finally:
            _OWNER.reset(token)


class _TaskFactory:
    """Makes tasks as before, but those that a swapped step starts are driven like it."""

    def __init__(self, before: Callable[..., asyncio.Future[Any]] | None) -> None:
        self._before = before

    def __call__(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Future[Any]:
        if (owner := _OWNER.get()) is not None:
            where, stream = owner
            coroutine = _stepwise(_Steps(where, _as_coroutine(coroutine), stream))
        if self._before is not None:
            return self._before(loop, coroutine, **options)
        return asyncio.Task(coroutine, loop=loop, **options)


def _follow_tasks(loop: asyncio.AbstractEventLoop) -> None:
    factory = loop.get_task_factory()
    if not isinstance(factory, _TaskFactory):
        loop.set_task_factory(_TaskFactory(factory))
