"""How a factory gets to the server process that forks its instances: pickled, or by a fork of this process.

::

    SpawnedHost   a fresh interpreter unpickles the factory: no thread, lock, socket or model of the trainer is there.
                  For what can be imported: classes of modules, ``functools.partial`` of them, adapters' factories
    ForkedHost    a fork of this process, which knows everything: classes of scripts and notebooks, closures, lambdas
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec

from envgrad.environments.boundary import Raised, guard
from envgrad.environments.executors.forked import serve_forked
from envgrad.environments.remote.host import ServerHost, ServerProcess, launch_server
from envgrad.environments.remote.instance import flush_streams
from envgrad.environments.remote.wire import HEADER, send
from envgrad.errors import ConfigurationError

POLL_SECONDS = 0.005


def importable(module: str) -> bool:
    """Whether a fresh interpreter with this one's search path finds the same module under this name.

    Example:
        >>> importable("json.decoder"), importable("__main__"), importable("no_such_module")
        (True, False, False)
    """
    if module == "__main__" or module not in sys.modules:
        return False
    spec, path, name = None, None, ""
    for part in module.split("."):
        name = f"{name}.{part}".lstrip(".")
        spec = _find(name, path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    loaded = sys.modules[module].__spec__
    return spec is not None and loaded is not None and loaded.origin == spec.origin


def _find(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """As an import statement would find it, were it not loaded."""
    found = (finder.find_spec(name, path) for finder in sys.meta_path)
    return next((spec for spec in found if spec is not None), None)


class _Names(pickle.Pickler):
    """Collects the modules of classes and functions that are pickled by name."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.modules: set[str] = set()

    def persistent_id(self, value: object) -> None:
        if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
            self.modules.add(str(value.__module__ or "builtins"))


def pickled_by_name(factory: Callable[[], object]) -> bytes | None:
    """``factory`` pickled, if a fresh interpreter can import all that it names; else None.

    Example:
        >>> from envgrad.starter.compass import Compass
        >>> pickled_by_name(Compass) is None, pickled_by_name(lambda: Compass()) is None
        (False, True)
    """
    file = io.BytesIO()
    pickler = _Names(file)
    if isinstance(guard(pickler.dump, factory), Raised):
        return None
    return file.getvalue() if all(importable(module) for module in pickler.modules) else None


class SpawnedHost(ServerHost):
    """A fresh interpreter that unpickles its factory; it finds modules in ``path``, then where this one does."""

    same_python = True

    def __init__(self, target: str, pickled: bytes, path: Sequence[str] = ()) -> None:
        super().__init__(target)
        self._pickled, self._path = pickled, tuple(path)

    def _launch(self) -> tuple[ServerProcess, socket.socket]:
        flush_streams()
        path = [os.path.abspath(folder) for folder in (*self._path, *sys.path) if os.path.exists(folder or ".")]
        process, control = self._start(["", "{}", *path])
        send(control, HEADER.pack(len(self._pickled)) + self._pickled)
        return process, control

    def _start(self, arguments: Sequence[str]) -> tuple[ServerProcess, socket.socket]:
        return launch_server(sys.executable, arguments)

    def _refuse(self, cause: Exception | None) -> None:
        why = (
            "its process died (its words are on standard error)"
            if cause is None
            else f"{type(cause).__name__}: {cause}"
        )
        raise ConfigurationError(
            f"{self.target} cannot be imported in a process of its own: {why}; use environment_executor='thread'"
        ) from cause


class ForkedProcess:
    """A child made by ``os.fork``: as much of ``subprocess.Popen`` as a host needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        with self._lock:
            if self._code is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # somebody else has waited for it
                    self._code = -1
                else:
                    self._code = os.waitstatus_to_exitcode(status) if pid else None
            return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            time.sleep(POLL_SECONDS)
        return code

    def kill(self) -> None:
        """Kill it, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class ForkedHost(ServerHost):
    """A fork of this process, made when it is first needed: at a trainer's construction."""

    same_python = True

    def __init__(self, target: str, factory: Callable[[], object]) -> None:
        super().__init__(target)
        self._factory = factory

    def _launch(self) -> tuple[ServerProcess, socket.socket]:
        flush_streams()
        ours, theirs = socket.socketpair()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # other threads are none of the child's business
            child = os.fork()
        if not child:
            serve_forked(theirs, self._factory)
        theirs.close()
        return ForkedProcess(child), ours

    def _refuse(self, cause: Exception | None) -> None:
        why = "it died" if cause is None else f"{type(cause).__name__}: {cause}"
        raise ConfigurationError(
            f"{self.target} cannot be played in a fork of this process: {why}; use environment_executor='thread'"
        ) from cause
