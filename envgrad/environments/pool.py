"""Environment instances: built when needed, bounded, reused, replaced after a failure, and each closed exactly once."""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from envgrad.environments.boundary import Ok, Raised, TimedOut, WorkerPool, call_user
from envgrad.environments.closing import Closer
from envgrad.environments.instances import Birth, ask_member
from envgrad.environments.results import plain_state
from envgrad.environments.spec import Elsewhere, EnvironmentSpec
from envgrad.environments.start import fork_instance
from envgrad.errors import ConfigurationError, EnvironmentContractError, EnvironmentFailure

_STATE_FAILURES = 3
"""instances whose ``state_dict`` may fail before a checkpoint goes without it"""


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
        state_timeout: seconds that one ``state_dict`` or ``load_state_dict`` may take; None: no limit.
        build_timeout: seconds that the factory may take; what comes later is closed. None: no limit.

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
        self,
        spec: EnvironmentSpec,
        probe: object,
        *,
        limit: int,
        workers: WorkerPool,
        close_timeout: float | None,
        state_timeout: float | None = None,
        build_timeout: float | None = None,
    ) -> None:
        if limit < 1:
            raise ConfigurationError(f"{spec.label}: at least 1 instance is needed, got a limit of {limit}: raise it.")
        self.spec = spec
        self.limit = limit
        self._workers = workers
        self._closer = Closer(spec.label, has_close=spec.has_close, timeout=close_timeout)
        self._state_timeout = state_timeout
        self._build_timeout = build_timeout
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

    @property
    def close_errors(self) -> list[Exception]:
        """What ``close()`` of an instance raised, or that it took too long; the latest ones."""
        return self._closer.errors

    @property
    def num_close_errors(self) -> int:
        return self._closer.num_errors

    async def acquire(self) -> object:
        """An instance for one episode: a free one, else a new one, else the next that is released.

        Raises:
            EnvironmentFailure: the factory raised or took too long, or the pool is closed.
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

        One entry where they all say the same; none if the environment keeps no state. An instance that fails is closed,
        and another one is asked.

        Raises:
            EnvironmentFailure: ``state_dict`` raised or took too long, of three instances; or the pool is closed.
            EnvironmentContractError: what it returned is not plain JSON.
        """
        if not self.spec.has_state:
            return []
        waiting, asked, found, failures = deque(self._take_free()), deque[object](), list[object](), 0
        try:
            while waiting or not found:
                try:
                    if not waiting:
                        waiting.append(await self.acquire())
                    state = await self._ask(waiting[0], "state_dict")
                except EnvironmentFailure:
                    failures += 1
                    if waiting:
                        await self.discard(waiting.popleft())
                    if failures == _STATE_FAILURES or self._closed:
                        raise
                    continue
                found.append(plain_state(self.spec.label, state))
                asked.append(waiting.popleft())
        finally:
            for one in reversed((*asked, *waiting)):
                self.release(one)
        return found[:1] if all(state == found[0] for state in found) else found

    async def restore(self, states: Sequence[object]) -> None:
        """Give ``states`` back: one to each instance that waits and that is yet to come, the last to all further ones.

        Raises:
            EnvironmentFailure: ``load_state_dict`` raised or took too long.
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
        workers, timeout = self._workers, self._state_timeout
        return await ask_member(self.spec.label, instance, name, *arguments, workers=workers, timeout=timeout)

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
            ending = asyncio.ensure_future(self._closer.close(instance))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)
            try:
                await asyncio.shield(ending)
            finally:
                self._busy -= 1
                self._wake()

    async def fork(self, instance: object, *, timeout: float | None) -> object:
        """A fork of ``instance``, which is out now, counts to the limit, and gets closed, even if it comes too late.

        Raises:
            EnvironmentFailure: ``fork()`` raised, gave none or took too long (seconds), or the pool is closed.
            EnvironmentContractError: it gave an instance of this pool.
        """
        return await self._born(f"{self.spec.label}: fork()", partial(_forked, instance), timeout)

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
        self._closer.close_now(instances, wait=self._closer.timeout)

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
            instance = await self._born(f"{self.spec.label}: the factory", self.spec.factory, self._build_timeout)
        finally:
            self._busy -= 1
            self._wake()
        if self._kept:
            await self._load_newborn(instance)
        return instance

    async def _born(self, what: str, make: Callable[[], object], timeout: float | None) -> object:
        birth, born = Birth(), False
        try:
            build = partial(self._give_birth, birth, make, what)
            outcome = await call_user(what, build, workers=self._workers, timeout=timeout)
            born = isinstance(outcome, Ok)
        finally:
            if not born and (newborn := birth.give_up()) is not None:
                self._close_late(newborn, wait=0.0)
                self._wake()
        match outcome:
            case Ok(value=instance):
                self._check_open()
                return instance
            case Raised(error=EnvironmentContractError() as error):
                raise error
            case Raised(error=error):
                raise EnvironmentFailure(f"{what} raised {type(error).__name__}: {error}") from error
            case TimedOut(seconds=seconds):
                raise EnvironmentFailure(f"{what} did not return in {seconds:.1f} s")

    async def _load_newborn(self, instance: object) -> None:
        try:
            await self._load(instance)
        except EnvironmentFailure:
            await self.discard(instance)
            raise

    def _give_birth(self, birth: Birth, make: Callable[[], object], what: str) -> object:
        """Build and admit in one go, in the worker's thread: from its first moment on, the instance is to be closed."""
        instance = make()
        if birth.take_in(instance, partial(self._admit, instance, what)):
            if self._closed:
                self._close_late(instance, wait=self._closer.timeout)
        elif id(instance) not in self._live:
            self._closer.close_now([instance], wait=self._closer.timeout)
        return instance

    def _close_late(self, instance: object, *, wait: float | None) -> None:
        """Close an instance that came too late or after the pool was closed, when there may be no loop any more."""
        if self._forget(instance):
            self._closer.close_now([instance], wait=wait)

    def _release_built(self, task: asyncio.Task[object]) -> None:
        if not task.cancelled() and task.exception() is None:
            self.release(task.result())

    def _admit(self, instance: object, what: str) -> None:
        if id(instance) in self._live:
            raise EnvironmentContractError(
                f"{what} returned the same instance twice: episodes run side by side, so it must build a new one each "
                "time."
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
            await asyncio.wait(set(self._building), timeout=self._closer.timeout)
        self._free.clear()
        instances = [instance for instance in list(self._live.values()) if self._forget(instance)]
        await asyncio.gather(*(self._closer.close(instance) for instance in instances), *self._endings)
        self._closer.end()

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


def _forked(instance: object) -> object:
    try:
        return fork_instance(instance)
    except EnvironmentContractError as error:  # it may have a snapshot next time
        raise EnvironmentFailure(f"{error}") from error
