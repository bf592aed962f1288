"""The server process of one environment, as its users see it: started by the first of them, shared by the rest."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from envgrad.environments.remote.wire import Closed, Message, is_readable, rebuild_error, receive
from envgrad.errors import ConfigurationError, EnvironmentFailure

START_SECONDS = 120.0
END_SECONDS = 5.0

PACKAGE = Path(__file__).resolve().parents[2]

BOOTSTRAP = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("envgrad", sys.argv[1] + "/__init__.py",
    submodule_search_locations=[sys.argv[1]])
module = sys.modules["envgrad"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from envgrad.environments.remote.server import main
main(sys.argv[2:])
"""
"""gives another interpreter this package alone, and nothing else of this one's"""


class ServerProcess(Protocol):
    """What a host knows of its server's process: as ``subprocess.Popen``."""

    pid: int

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        ...

    def kill(self) -> None: ...


class ServerHost:
    """Starts and keeps one server process. Safe to use from several threads.

    Args:
        target: what it serves, for messages.
    """

    same_python = False
    """the other side is this Python with this side's modules: it may be sent more than JSON, and never sends more"""

    def __init__(self, target: str) -> None:
        self.target = target
        self._lock = threading.Lock()
        self._process: ServerProcess | None = None
        self._control: socket.socket | None = None

    def meet(self) -> tuple[socket.socket, Message]:
        """A socket to a new instance's process, and what that says of itself.

        Raises:
            ConfigurationError: the server cannot be started.
            EnvironmentFailure: the server process died twice; the factory raised, or it did not start in time.
        """
        connection = self.connect()
        return connection, _await_greeting(connection)

    def connect(self) -> socket.socket:
        """A socket to a new instance's process, on which its greeting or its error comes.

        Raises:
            ConfigurationError, EnvironmentFailure: as ``meet``, but for what the factory does.
        """
        with self._lock:
            for _ in range(2):
                control = self._started()
                ours, theirs = socket.socketpair()
                with theirs:
                    try:
                        socket.send_fds(control, [b"i"], [theirs.fileno()])
                        return ours
                    except OSError:
                        ours.close()
                        self._stop()
            raise EnvironmentFailure(f"the server process of {self.target} dies as soon as it has started")

    @property
    def pid(self) -> int | None:
        """The server process; None while there is none."""
        process = self._process
        return None if process is None else process.pid

    def close(self) -> None:
        """End the server process; instances that still run end with it."""
        with self._lock:
            self._stop()

    def _started(self) -> socket.socket:
        if self._control is not None and self._process is not None and self._process.poll() is None:
            return self._control
        self._stop()
        self._process, self._control = self._launch()
        weakref.finalize(self, _end, self._process, self._control)
        self._greet(self._control)
        return self._control

    def _launch(self) -> tuple[ServerProcess, socket.socket]:
        raise NotImplementedError

    def _greet(self, control: socket.socket) -> None:
        ready = is_readable(control, START_SECONDS)
        greeting: Message
        try:
            greeting = receive(control) if ready else {}
        except Closed:
            greeting = {}
        if "ready" in greeting:
            return
        self._stop()
        self._refuse(rebuild_error(greeting["error"]) if "error" in greeting else None)

    def _refuse(self, cause: Exception | None) -> None:
        """Raise what is wrong with a server that did not start; ``cause`` is its own word."""
        raise NotImplementedError

    def _stop(self) -> None:
        process, control, self._process, self._control = self._process, self._control, None, None
        if process is not None and control is not None:
            _end(process, control)


class Host(ServerHost):
    """The server process of ``target`` under another ``python``.

    Args:
        python: the interpreter.
        target: ``"package.module:name"``.
        arguments: what the name is called with; JSON.
        path: folders in front of its module search path.
        variables: environment variables beside this process's.

    Raises:
        ConfigurationError: the arguments are no JSON.
    """

    def __init__(
        self,
        python: str,
        target: str,
        arguments: Mapping[str, Any],
        *,
        path: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        try:
            self._options = json.dumps(dict(arguments))
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"{target}: its arguments go to another process as JSON, and {dict(arguments)!r:.200} does not: {error}"
            ) from error
        super().__init__(target)
        self.python, self._path, self._variables = python, tuple(path), dict(variables or {})

    def _launch(self) -> tuple[ServerProcess, socket.socket]:
        try:
            return launch_server(self.python, [self.target, self._options, *self._path], self._variables)
        except OSError as error:
            raise ConfigurationError(f"python={self.python!r} cannot be run: {error}") from error

    def _refuse(self, cause: Exception | None) -> None:
        if cause is not None:
            raise ConfigurationError(
                f"{self.python} cannot import {self.target}: {type(cause).__name__}: {cause}"
            ) from cause
        raise ConfigurationError(
            f"{self.python} did not get as far as importing {self.target} (its words are on standard error); it needs "
            "Python 3.11 or newer with the environment's own packages, and transformers where tools are methods"
        )


def launch_server(
    python: str,
    arguments: Sequence[str],
    variables: Mapping[str, str] | None = None,
    through: Sequence[str] = (),
    stdin: int = subprocess.DEVNULL,
    stdout: int | None = None,
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A process of ``python`` that runs ``remote.server.main(FD, *arguments)``, and our end of its control socket.

    ``through``: a command that runs it, given its words.

    Raises:
        OSError: ``python`` cannot be run.
    """
    ours, theirs = socket.socketpair()
    command = [*through, python, "-c", BOOTSTRAP, str(PACKAGE), str(theirs.fileno()), *arguments]
    try:
        with theirs:
            process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=stdin,
                stdout=stdout,
                env=os.environ | {"PYTHONSAFEPATH": "1"} | dict(variables or {}),
            )
    except OSError:
        ours.close()
        raise
    return process, ours


def _end(process: ServerProcess, control: socket.socket) -> None:
    """Closing the control socket ends it, and lets it end its instances first."""
    control.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _await_greeting(connection: socket.socket) -> Message:
    ready = is_readable(connection, START_SECONDS)
    if not ready:
        connection.close()
        raise EnvironmentFailure(f"the environment's process did not start in {START_SECONDS:.0f} s")
    try:
        greeting = receive(connection)
    except Closed as error:
        connection.close()
        raise EnvironmentFailure("the environment's process died while it was built") from error
    if "error" in greeting:
        connection.close()
        raise rebuild_error(greeting["error"])
    return greeting
