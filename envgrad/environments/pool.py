"""Environment instances: built when needed, bounded, reused, replaced after a failure, and each closed exactly once."""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from envgrad.environments.boundary import Ok, Outcome, Raised, TimedOut, WorkerPool, call_user
from envgrad.environments.closing import call_all_now
from envgrad.environments.results import plain_state
from envgrad.environments.spec import Elsewhere, EnvironmentSpec
from envgrad.errors import ConfigurationError, EnvironmentContractError, EnvironmentFailure

_CLOSING_THREADS = 64
_CLOSE_ERRORS_KEPT = 32


class InstancePool:
    """The instances of one environment. All methods but ``close_now`` belong to one event loop.

    ::

        factory -> [out] -- release --> [free] -- acquire --> [out]
                     |                     |
                  discard                close / close_now          (each ends in exactly one close())

    Args:
        spec: the environment; its factory builds further instances, in worker threads.
        probe: the instance that construction was checked on; the first to be handed out.
        limit: how many instances may exist at once.
        workers: threads for the factory.
        close_timeout: seconds that one ``close()`` may take; None: no limit.

    Example:
        >>> from envgrad.environments.contract import inspect_environment
        >>> class Door:
        ...     def reset(self):
        ...         return "Knock."
        ...
        ...     def close(self):
        ...         print("closed")
        >>> async def use():
        ...     spec, probe = inspect_environment("door", Door)
        ...     pool = InstancePool(spec, probe, limit=2, workers=WorkerPool(), close_timeout=5.0)
        ...     door = await pool.acquire()
        ...     pool.release(door)
        ...     await pool.close()
        >>> asyncio.run(use())
        closed
    """

    def __init__(
        self, spec: EnvironmentSpec, probe: object, *, limit: int, workers: WorkerPool, close_timeout: float | None
    ) -> None:
        if limit < 1:
            raise ConfigurationError(f"{spec.label}: at least 1 instance is needed, got a limit of {limit}: raise it.")
        self.spec = spec
        self.limit = limit
        self.close_errors: list[Exception] = []
        """what ``close()`` of an instance raised, or that it took too long; the latest ones"""
        self.num_close_errors = 0
        self._workers = workers
        self._closers: WorkerPool | None = None
        self._close_timeout = close_timeout
        self._live: dict[int, object] = {id(probe): probe}
        """every instance that has not been closed; who pops it is the one to close it"""
        self._state: dict[int, Literal["free", "out"]] = {id(probe): "free"}
        self._free: list[object] = [probe]
        self._busy = 0
        """constructions and closings under way: they hold a place too"""
        self._building: set[asyncio.Task[object]] = set()
        self._endings: set[asyncio.Future[None]] = set()
        """instances that are being closed because they failed"""
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._builders: deque[asyncio.Future[None]] = deque()
        """who waits for a new instance, which may take long (a cluster is full), and would take a released one"""
        self._kept: list[object] = []
        """states of a checkpoint, for instances to come"""
        self._closed = False
        self._closing: asyncio.Task[None] | None = None

    @property
    def size(self) -> int:
        """Instances that exist and are not closed."""
        return len(self._live)

    @property
    def num_free(self) -> int:
        """Instances that wait to be used."""
        return len(self._free)

    async def acquire(self) -> object:
        """An instance for one episode: a free one, else a new one, else the next that is released.

        Raises:
            EnvironmentFailure: the factory raised, or the pool is closed.
            EnvironmentContractError: the factory returned an instance that it had returned before.
        """
        waited = False
        while True:
            self._check_open()
            if self._free:
                instance = self._free.pop()
                self._state[id(instance)] = "out"
                if not (isinstance(instance, Elsewhere) and instance.process_lost):
                    return instance
                await self.discard(instance)  # it died while it waited, which is to cost no episode
                continue
            if len(self._live) + self._busy < self.limit:
                released: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                instance = await self._build(released)
                if instance is None:
                    continue
                return instance
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            if waited:  # the place went to somebody else: first in line again
                self._waiters.appendleft(waiter)
            else:
                self._waiters.append(waiter)
            waited = True
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._wake()  # the place that was meant for us goes to the next
                raise

    async def states(self) -> list[object]:
        """What ``state_dict`` says of the instances that wait, the next to be used first; of one instance at the least.

        One entry where they all say the same; none if the environment keeps no state.

        Raises:
            EnvironmentFailure: ``state_dict`` raised, or the pool is closed.
            EnvironmentContractError: what it returned is not plain JSON.
        """
        if not self.spec.has_state:
            return []
        instances = self._take_free() or [await self.acquire()]
        try:
            found = [plain_state(self.spec.label, await self._ask(one, "state_dict")) for one in instances]
        finally:
            for one in reversed(instances):
                self.release(one)
        return found[:1] if all(state == found[0] for state in found) else found

    async def restore(self, states: Sequence[object]) -> None:
        """Give ``states`` back: one to each instance that waits and that is yet to come, the last to all further ones.

        Raises:
            EnvironmentFailure: ``load_state_dict`` raised.
        """
        self._kept = list(states)
        instances = self._take_free() if self._kept else []
        try:
            for one in instances:
                await self._load(one)
        finally:
            for one in reversed(instances):
                self.release(one)

    def _take_free(self) -> list[object]:
        """All that wait, out now, the next to be used first."""
        instances, self._free = self._free[::-1], []
        self._state |= {id(one): "out" for one in instances}
        return instances

    async def _load(self, instance: object) -> None:
        state = self._kept.pop(0) if len(self._kept) > 1 else self._kept[0]
        await self._ask(instance, "load_state_dict", copy.deepcopy(state))

    async def _ask(self, instance: object, name: str, *arguments: object) -> object:
        method = getattr(instance, name)
        outcome = await call_user(
            f"{self.spec.label}'s {name}", partial(method, *arguments), workers=self._workers, timeout=None
        )
        match outcome:
            case Ok(value=value):
                return value
            case Raised(error=error):
                raise EnvironmentFailure(f"{self.spec.label}: {name} raised {type(error).__name__}: {error}") from error
            case TimedOut(seconds=seconds):
                raise EnvironmentFailure(f"{self.spec.label}: {name} did not return in {seconds:.1f} s")

    async def close_free(self) -> None:
        """Close the instances that wait, so that the next one is new."""
        while self._free:
            instance = self._free.pop()
            self._state[id(instance)] = "out"
            await self.discard(instance)

    def release(self, instance: object) -> None:
        """Give an instance back for reuse.

        Raises:
            ValueError: it is not out (released twice, or not of this pool).
        """
        if id(instance) not in self._live and self._closed:
            return  # closed while it was out
        self._check_out(instance)
        self._state[id(instance)] = "free"
        self._free.append(instance)
        self._wake(released=True)

    async def discard(self, instance: object) -> None:
        """Close an instance that failed; it is never used again. Its place is free once it is closed.

        Raises:
            ValueError: it is not out.
        """
        if id(instance) not in self._live and self._closed:
            return
        self._check_out(instance)
        if self._forget(instance):
            self._busy += 1
            ending = asyncio.ensure_future(self._close_one(instance))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)
            try:
                await asyncio.shield(ending)
            finally:
                self._busy -= 1
                self._wake()

    def adopt(self, instance: object) -> None:
        """Take in an instance that was made outside (a fork): it is out now, counts to the limit, and gets closed.

        Raises:
            EnvironmentFailure: the pool is closed (then the instance is closed too).
            EnvironmentContractError: it is one of this pool's instances already.
        """
        self._admit(instance, "fork() returned")
        if self._closed:
            self._close_late(instance, wait=0.0)
        self._check_open()

    async def close(self) -> None:
        """Close every instance once, in parallel, those that are out too. Waits for all; again is harmless."""
        if self._closing is None:
            self._closed = True
            self._closing = asyncio.ensure_future(self._close_all())
        await asyncio.shield(self._closing)

    def close_now(self) -> None:
        """``close`` without a loop, for interpreter exit: what is not closed yet is closed in threads of their own."""
        self._closed = True
        instances = [instance for instance in list(self._live.values()) if self._forget(instance)]
        self._free.clear()
        if self.spec.has_close:
            closes = [partial(_call_close, instance) for instance in instances]
            for outcome in call_all_now(closes, timeout=self._close_timeout):
                self._collect(outcome)

    async def _build(self, released: asyncio.Future[None]) -> object | None:
        """A new instance; None if another one was released before.

        It is built in a task of its own, so that nobody who stops waiting loses it: it becomes a free one.
        """
        self._busy += 1
        task = asyncio.ensure_future(self._construct())
        self._building.add(task)
        task.add_done_callback(self._building.discard)
        self._builders.append(released)
        end: Literal["built", "released", "given up"] = "given up"
        try:
            await asyncio.wait((task, released), return_when=asyncio.FIRST_COMPLETED)
            end = "built" if task.done() else "released"
        finally:
            if end != "built":
                task.add_done_callback(self._release_built)
            if end != "released" and released.done():
                self._wake(released=True)  # it is for the next
            released.cancel()
        return task.result() if end == "built" else None

    async def _construct(self) -> object:
        try:
            outcome = await call_user(
                f"{self.spec.label}'s factory", self._give_birth, workers=self._workers, timeout=None
            )
        finally:
            self._busy -= 1
            self._wake()
        match outcome:
            case Ok(value=instance):
                self._check_open()
                if self._kept:
                    await self._load_newborn(instance)
                return instance
            case Raised(error=EnvironmentContractError() as error):
                raise error
            case Raised(error=error):
                raise EnvironmentFailure(
                    f"{self.spec.label}: the factory raised {type(error).__name__}: {error}"
                ) from error
            case TimedOut(seconds=seconds):
                raise EnvironmentFailure(f"{self.spec.label}: the factory did not return in {seconds:.1f} s")

    async def _load_newborn(self, instance: object) -> None:
        try:
            await self._load(instance)
        except EnvironmentFailure:
            await self.discard(instance)
            raise

    def _give_birth(self) -> object:
        """Build and admit in one go, in the worker's thread: from its first moment on, the instance is to be closed."""
        instance = self.spec.factory()
        self._admit(instance, "the factory returned")
        if self._closed:
            self._close_late(instance, wait=self._close_timeout)
        return instance

    def _close_late(self, instance: object, *, wait: float | None) -> None:
        """Close an instance that came after the pool was closed, when there may be no loop any more."""
        if self._forget(instance) and self.spec.has_close:
            for outcome in call_all_now([partial(_call_close, instance)], timeout=wait):
                if wait != 0.0:
                    self._collect(outcome)

    def _release_built(self, task: asyncio.Task[object]) -> None:
        if not task.cancelled() and task.exception() is None:
            self.release(task.result())

    def _admit(self, instance: object, source: str) -> None:
        if id(instance) in self._live:
            raise EnvironmentContractError(
                f"{self.spec.label}: {source} the same instance twice: episodes run side by side, so it must build a "
                "new one each time."
            )
        self._state[id(instance)] = "out"
        self._live[id(instance)] = instance

    def _forget(self, instance: object) -> bool:
        """Whether the caller is the one to close ``instance``. Atomic, also against ``close_now`` in another thread."""
        self._state.pop(id(instance), None)
        return self._live.pop(id(instance), None) is not None

    async def _close_all(self) -> None:
        while self._waiters:
            self._wake()  # they see the pool closed
        if self._building:
            await asyncio.wait(set(self._building), timeout=self._close_timeout)
        self._free.clear()
        instances = [instance for instance in list(self._live.values()) if self._forget(instance)]
        await asyncio.gather(*(self._close_one(instance) for instance in instances), *self._endings)
        if self._closers is not None:
            self._closers.close()

    async def _close_one(self, instance: object) -> None:
        if not self.spec.has_close:
            return
        if self._closers is None:  # threads of their own: closing works even where hung tools fill the workers
            self._closers = WorkerPool(_CLOSING_THREADS, max_hung=10**6, name="envgrad-close")
        outcome = await call_user(
            f"{self.spec.label}'s close()",
            partial(_call_close, instance),
            workers=self._closers,
            timeout=self._close_timeout,
        )
        self._collect(outcome)

    def _collect(self, outcome: Outcome) -> None:
        self.num_close_errors += not isinstance(outcome, Ok)
        del self.close_errors[:-_CLOSE_ERRORS_KEPT]
        match outcome:
            case Raised(error=error):
                self.close_errors.append(error)
            case TimedOut(seconds=seconds, killable=killable):
                end = "was stopped" if killable else "was left behind"
                self.close_errors.append(
                    EnvironmentFailure(f"{self.spec.label}: close() did not return in {seconds:.1f} s and {end}")
                )

    def _wake(self, *, released: bool = False) -> None:
        for waiters in (self._waiters, self._builders)[: 1 + released]:
            while waiters:
                waiter = waiters.popleft()
                if not waiter.done():
                    waiter.set_result(None)
                    return

    def _check_open(self) -> None:
        if self._closed:
            raise EnvironmentFailure(f"{self.spec.label}: its instances are closed, the run has ended")

    def _check_out(self, instance: object) -> None:
        if self._state.get(id(instance)) != "out":
            raise ValueError(f"{self.spec.label}: {instance!r} is not an instance that was handed out")


def _call_close(instance: object) -> object:
    close: Callable[[], object] = getattr(instance, "close")  # noqa: B009 - any object may be an environment
    return close()
