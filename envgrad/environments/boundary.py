"""The one place where user code is called and its exceptions are caught.

::

    rollout loop's thread                            worker threads (daemons)
    run(fn) --put--> SimpleQueue ------------------> fn()
    future <-- drain() <-- wake (one pending at most) <-- deque of outcomes

A sync call is data going there and back: no exception crosses threads, so ``StopIteration`` and friends are safe. A
call that runs past its timeout leaves its thread behind: the thread is counted, replaced, and never waited for.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import TypeAlias

from envgrad.environments.isolation import current_stream
from envgrad.environments.swapping import swapped_call, swapped_steps
from envgrad.errors import ConfigurationError, EnvironmentFailure, EpisodeDone

GROWTH_DELAY = 0.001
"""seconds a job may wait before another thread is considered"""
LOOK_SECONDS, CANCEL_LOOKS = 0.15, 38
"""that an async call gets to obey its cancellation: more than an interrupted process"""


@dataclass(frozen=True, slots=True)
class Ok:
    """The call returned ``value`` after ``seconds``."""

    value: object
    seconds: float


@dataclass(frozen=True, slots=True)
class Raised:
    """The call raised ``error`` (``EpisodeDone`` too) after ``seconds``.

    What user code raises beyond ``Exception`` (a tool's ``sys.exit()``, a cancellation of its own) is wrapped in a
    ``RuntimeError``, so that raising ``error`` again never looks like an exit or a cancellation of ours.
    """

    error: Exception
    seconds: float


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The call ran past its limit. ``killable``: it was stopped; else it still runs, with the instance in hand."""

    seconds: float
    killable: bool


Outcome: TypeAlias = Ok | Raised | TimedOut


def guard(function: Callable[..., object], /, *args: object, **kwargs: object) -> Ok | Raised:
    """Call sync user code here and now.

    Example:
        >>> guard(int, "x").error
        ValueError("invalid literal for int() with base 10: 'x'")
    """
    start = perf_counter()
    try:
        value = function(*args, **kwargs)
    except Exception as error:
        return Raised(error, perf_counter() - start)
    return Ok(value, perf_counter() - start)


def guard_in_thread(function: Callable[[], object]) -> Ok | Raised:
    """``guard`` for a thread that runs nothing but user code: there, even ``SystemExit`` is the user's."""
    start = perf_counter()
    try:
        value = function()
    except BaseException as error:
        return Raised(as_exception(error), perf_counter() - start)
    return Ok(value, perf_counter() - start)


def as_exception(error: BaseException) -> Exception:
    if isinstance(error, Exception):
        return error
    wrapped = RuntimeError(f"the call raised {error!r}")
    wrapped.__cause__ = error
    return wrapped


class _Mailbox:
    """Outcomes on their way to one loop; at most one wake-up is under way."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = weakref.ref(loop)
        self.finished: deque[tuple[_Job, Ok | Raised]] = deque()
        self.waking = False
        self.growing = False
        """whether a look at the backlog is scheduled on this loop"""

    def put(self, job: _Job, outcome: Ok | Raised, drain: Callable[[_Mailbox], None]) -> None:
        self.finished.append((job, outcome))
        loop = self.loop()
        if self.waking or loop is None:
            return
        self.waking = True
        try:
            loop.call_soon_threadsafe(drain, self)
        except RuntimeError:  # the loop is closed: nobody waits any more
            self.finished.clear()


@dataclass(slots=True, eq=False)
class _Job:
    function: Callable[[], object]
    future: asyncio.Future[Outcome]
    mailbox: _Mailbox
    timer: asyncio.TimerHandle | None = None
    started: float | None = None
    returned: bool = False
    skipped: bool = False
    hung: bool = False


class WorkerPool:
    """Daemon threads for sync user code; thousands of microsecond calls per second, and hung calls are survived.

    Args:
        max_threads: threads in use at once; they are created when jobs have to wait.
        max_hung: how many calls may hang at once before the pool refuses work.

    Example:
        >>> pool = WorkerPool(max_threads=2)
        >>> asyncio.run(pool.run(sum, [1, 2, 3], timeout=1.0))
        6
        >>> pool.close()
    """

    def __init__(self, max_threads: int = 256, *, max_hung: int = 64, name: str = "envgrad-environment") -> None:
        if max_threads < 1 or max_hung < 1:
            raise ConfigurationError(
                f"max_threads and max_hung must be at least 1, got {max_threads} and {max_hung}: raise them."
            )
        self.max_threads = max_threads
        self.max_hung = max_hung
        self.hung = 0
        """calls past their timeout whose threads still run"""
        self._name = name
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._threads = 0
        self._outstanding = 0
        self._running = 0
        self._completed = 0
        self._closed = False

    @property
    def num_threads(self) -> int:
        """Threads that serve the queue; hung ones are not among them."""
        return self._threads

    async def run(self, function: Callable[..., object], /, *args: object, timeout: float | None = None) -> object:
        """Run ``function(*args)`` in a thread and return its value.

        ``timeout`` counts seconds from the moment a thread takes the call.

        Raises:
            TimeoutError: it ran past ``timeout``; the thread is left behind.
            EnvironmentFailure: too many calls hang already.
            BaseException: what ``function`` raised.
        """
        outcome = await self.outcome(partial(function, *args), timeout=timeout)
        match outcome:
            case Ok(value=value):
                return value
            case Raised(error=error):
                raise error
            case TimedOut(seconds=seconds):
                raise TimeoutError(f"{function!r} ran for {seconds:.3g} s, past its limit of {timeout} s")

    async def outcome(self, function: Callable[[], object], *, timeout: float | None) -> Outcome:
        """Run ``function()`` in a thread; what it does comes back as data."""
        if self._closed:
            raise RuntimeError("the worker pool is closed")
        if self.hung >= self.max_hung:
            return Raised(self._too_many_hung(), 0.0)
        loop = asyncio.get_running_loop()
        mailbox = self._mailboxes.get(loop)
        if mailbox is None:
            mailbox = self._mailboxes[loop] = _Mailbox(loop)
        job = _Job(function, loop.create_future(), mailbox)
        if timeout is not None:
            job.timer = loop.call_later(timeout, self._check_deadline, job, timeout)
        with self._lock:
            self._outstanding += 1
        self._queue.put(job)
        if self._threads == 0:
            self._spawn(1)
        elif self._outstanding > self._threads:
            self._watch_backlog(mailbox, loop)
        try:
            return await job.future
        except asyncio.CancelledError:
            job.skipped = True  # a running call keeps its timer, so a hung one is still found
            raise

    def close(self) -> None:
        """Stop taking work; never blocks. Calls that have not started come back as ``EnvironmentFailure``."""
        self._closed = True
        self._fail_queued(_NOT_STARTED)
        for _ in range(self._threads):
            self._queue.put(None)

    def _too_many_hung(self) -> EnvironmentFailure:
        return EnvironmentFailure(
            f"{self.hung} environment calls hang past their timeout (max_hung={self.max_hung}): "
            "fix the call that blocks, or make it async so that it can be cancelled."
        )

    def _fail_queued(self, error: EnvironmentFailure) -> None:
        while True:
            try:
                job = self._queue.get_nowait()
            except Empty:
                return
            if job is not None:
                job.mailbox.put(job, Raised(error, 0.0), self._drain)

    def _spawn(self, count: int) -> None:
        for _ in range(count):
            with self._lock:
                if self._threads >= self.max_threads:
                    return
                self._threads += 1
            threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _watch_backlog(self, mailbox: _Mailbox, loop: asyncio.AbstractEventLoop) -> None:
        if not mailbox.growing and self._threads < self.max_threads and not self._closed:
            mailbox.growing = True
            loop.call_later(GROWTH_DELAY, self._grow, mailbox, loop, self._completed)

    def _grow(self, mailbox: _Mailbox, loop: asyncio.AbstractEventLoop, completed_before: int) -> None:
        """Double the threads while jobs wait behind slow calls; where the backlog soon melts by itself, leave it."""
        mailbox.growing = False
        backlog, completed = self._queue.qsize(), self._completed - completed_before
        if self._running >= self._threads and backlog > 4 * completed:
            self._spawn(min(backlog, max(1, self._threads)))
        if self._queue.qsize():
            self._watch_backlog(mailbox, loop)

    def _work(self) -> None:
        while True:
            job = self._queue.get()
            if job is None:
                with self._lock:
                    self._threads -= 1
                return
            with self._lock:
                self._running += 1
            job.started = perf_counter()
            outcome = Raised(_NOT_STARTED, 0.0) if job.skipped else guard_in_thread(job.function)
            with self._lock:
                job.returned = True
                replaced = job.hung
                self._completed += 1
                self._running -= not replaced
            job.mailbox.put(job, outcome, self._drain)
            del job, outcome  # an idle thread must not keep an instance alive
            if replaced:
                return

    def _drain(self, mailbox: _Mailbox) -> None:
        mailbox.waking = False  # before the look, so that no outcome is left behind
        finished = mailbox.finished
        while finished:
            job, outcome = finished.popleft()
            if job.timer is not None:
                job.timer.cancel()
            with self._lock:
                if job.hung:
                    self.hung -= 1
                else:
                    self._outstanding -= 1
            if not job.future.done():
                job.future.set_result(outcome)

    def _check_deadline(self, job: _Job, timeout: float) -> None:
        elapsed = 0.0 if job.started is None else perf_counter() - job.started
        if elapsed < timeout:
            loop = job.future.get_loop()
            job.timer = loop.call_later(max(timeout - elapsed, 1e-4), self._check_deadline, job, timeout)
            return
        with self._lock:
            if job.returned:  # just in time: its outcome is in the mail
                return
            job.hung = True
            self.hung += 1
            self._outstanding -= 1
            self._threads -= 1
            self._running -= 1
        if not job.future.done():
            job.future.set_result(TimedOut(elapsed, killable=False))
        if self.hung >= self.max_hung:
            self._fail_queued(self._too_many_hung())
        elif self._queue.qsize():
            self._spawn(1)


_NOT_STARTED = EnvironmentFailure("the run is closing: the call was not started")


def is_async(function: Callable[..., object]) -> bool:
    """Whether calling ``function`` gives a coroutine: async functions, partials, objects with async ``__call__``."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def call_user(
    where: str,
    function: Callable[..., object],
    /,
    *args: object,
    workers: WorkerPool,
    timeout: float | None,
    arguments: Mapping[str, object] | None = None,
) -> Outcome:
    """Call ``function(*args, **arguments)``: async functions on the loop, sync ones in a worker thread.

    A sync function that returns an awaitable has it awaited, within the same ``timeout`` (seconds; None: no limit).
    ``where`` names the call in tracebacks. Named arguments come as one mapping, since a tool may have a parameter that
    is called ``timeout``.

    Example:
        >>> async def add(a, b):
        ...     return a + b
        >>> outcome = asyncio.run(call_user("add", add, 1, workers=WorkerPool(), timeout=1.0, arguments={"b": 2}))
        >>> outcome.value
        3
    """
    call, stream = partial(function, *args, **(arguments or {})), current_stream()
    outcome: Outcome
    if is_async(function):
        outcome = guard(call)
    elif stream is None:
        outcome = await workers.outcome(call, timeout=timeout)
    else:
        try:
            outcome = await swapped_call(where, call, stream, partial(workers.outcome, timeout=timeout))
        except EnvironmentFailure as failure:  # its generators are not to be had
            return Raised(failure, 0.0)
    if isinstance(outcome, Ok) and inspect.isawaitable(outcome.value):
        left = None if timeout is None else max(timeout - outcome.seconds, 0.0)
        awaitable = outcome.value if stream is None else swapped_steps(where, outcome.value, stream)
        outcome = await _await_user(awaitable, left, outcome.seconds)
    if isinstance(outcome, Raised) and not isinstance(outcome.error, EpisodeDone):
        _note(outcome.error, f"raised in {where}")
    return outcome


def _note(error: Exception, note: str) -> None:
    if note not in (error.__notes__ if hasattr(error, "__notes__") else ()):
        error.add_note(note)


async def _await_user(awaitable: Awaitable[object], timeout: float | None, spent: float) -> Outcome:
    start = perf_counter() - spent
    task = asyncio.ensure_future(awaitable)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, whoever still listens
    try:
        await asyncio.wait({task}, timeout=timeout)
    except asyncio.CancelledError:  # ours: pass it on, and give its cleanup a moment
        await _cancel(task)
        raise
    seconds = perf_counter() - start
    if not task.done():
        await _cancel(task)
        return TimedOut(seconds, killable=task.done())
    if task.cancelled():
        return Raised(as_exception(asyncio.CancelledError("cancelled by the environment itself")), seconds)
    error = task.exception()
    return Ok(task.result(), seconds) if error is None else Raised(as_exception(error), seconds)


async def _cancel(task: asyncio.Task[object]) -> None:
    task.cancel()
    for _ in range(CANCEL_LOOKS):  # counted: where the whole machine stood still, the call had no time to obey
        if not task.done():
            await asyncio.wait({task}, timeout=LOOK_SECONDS)
