"""Are two mathematical answers equal? Asked of child processes, so that no answer can freeze the run."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from envgrad.errors import ConfigurationError, EnvgradError

START_SECONDS = 120.0
"""that a child process may take to start, on a busy machine"""


def require_math(what: str) -> None:
    """
    Raises:
        ConfigurationError: math-verify is not installed.
    """
    if find_spec("math_verify") is None:
        raise ConfigurationError(f"{what} needs the math-verify package: pip install 'envgrad[math]'")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A sampled answer held to the gold one."""

    gold: str | None
    """the gold expression; None if it cannot be read, so that nothing can be said"""
    answer: str | None = None
    """the sampled expression; None if there is none, or if it took too long"""
    equal: bool = False


class _TooSlow(EnvgradError):
    """No reply within the limit."""


class _Child:
    """One child process; see ``math_worker``."""

    def __init__(self) -> None:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "envgrad.rewards.math_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # an interrupt at the terminal is the parent's to handle
        )
        self._unread = b""
        try:
            ready = self._reply(START_SECONDS)
        except _TooSlow:
            ready = None
        if ready != "ready":
            self.close()
            raise EnvgradError(
                "the process that compares mathematical answers does not start: run "
                "'python -m envgrad.rewards.math_worker' to see why"
            )

    def compare(self, gold: str, answer: str, limit: float) -> Comparison:
        """
        Raises:
            _TooSlow: the gold answer took too long, or the process is gone.
        """
        if self.process.stdin is None:
            raise AssertionError("the process was started with pipes")
        self.process.stdin.write(json.dumps({"gold": gold, "answer": answer}).encode() + b"\n")
        self.process.stdin.flush()
        read = self._reply(limit)
        if not isinstance(read, str):
            return Comparison(gold=None)
        try:
            reply = self._reply(limit)
        except _TooSlow:
            self.close()
            return Comparison(gold=read)
        if not isinstance(reply, dict):
            raise AssertionError(reply)
        return Comparison(gold=read, answer=reply["answer"], equal=reply["equal"])

    def _reply(self, limit: float) -> object:
        if self.process.stdout is None:
            raise AssertionError("the process was started with pipes")
        descriptor, deadline = self.process.stdout.fileno(), time.monotonic() + limit
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while b"\n" not in self._unread:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise _TooSlow
            more = os.read(descriptor, 1 << 16)
            if not more:  # it ran out of time or memory of its own
                raise _TooSlow
            self._unread += more
        line, self._unread = self._unread.split(b"\n", 1)
        reply: object = json.loads(line)
        return reply

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what it was never told stays in the buffer
                    pipe.close()


class MathComparer:
    """Compares answers in child processes, which are kept, and replaced when one takes longer than it may.

    Args:
        limit: seconds for reading the gold answer, and as many for reading and comparing the sampled one.
        max_processes: child processes at once; further callers wait.

    Example:
        >>> comparer = MathComparer()
        >>> (same,) = comparer.compare([("$0.5$", "So it is \\\\boxed{1/2}.")])
        >>> same.equal
        True
        >>> comparer.close()
    """

    def __init__(self, *, limit: float = 6.0, max_processes: int = 4) -> None:
        self._limit = limit
        self._slots = threading.BoundedSemaphore(max_processes)
        self._lock = threading.Lock()
        self._idle: list[_Child] = []

    def compare(self, pairs: Sequence[tuple[str, str]]) -> list[Comparison]:
        """One comparison per pair of a gold and a sampled answer. Callable from any thread.

        A sampled answer that cannot be read within the limit is a wrong one; for a gold one nothing can be said.

        Raises:
            ConfigurationError: math-verify is not installed.
            EnvgradError: no child process can be started.
        """
        require_math("comparing mathematical answers")
        results: list[Comparison] = []
        with self._slots:
            child: _Child | None = None
            try:
                for gold, answer in pairs:
                    child = child if child is not None and child.alive else self._child()
                    results.append(self._compare(child, gold, answer))
            finally:
                if child is not None:
                    self._put_back(child, idle=len(results) == len(pairs))
        return results

    def close(self) -> None:
        """End the idle child processes."""
        with self._lock:
            idle, self._idle = self._idle, []
        for child in idle:
            child.close()

    def _compare(self, child: _Child, gold: str, answer: str) -> Comparison:
        try:
            return child.compare(gold, answer, self._limit)
        except _TooSlow:
            child.close()
            return Comparison(gold=None)

    def _child(self) -> _Child:
        with self._lock:
            while self._idle:
                child = self._idle.pop()
                if child.alive:
                    return child
                child.close()
        return _Child()

    def _put_back(self, child: _Child, *, idle: bool) -> None:
        """Keep ``child`` for the next caller, unless a reply may still be under way."""
        if idle and child.alive:
            with self._lock:
                self._idle.append(child)
        else:
            child.close()


COMPARER = MathComparer()
"""The one that the accuracy rewards share."""

atexit.register(COMPARER.close)
