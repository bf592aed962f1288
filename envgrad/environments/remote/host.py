"""The server process of one environment, as its users see it: started by the first of them, shared by the rest."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envgrad.environments.remote.wire import Closed, Message, rebuild_error, receive
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


class Host:
    """Starts and keeps the server process of ``target`` under ``python``. Safe to use from several threads.

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
        self.python, self.target, self._path, self._variables = python, target, tuple(path), dict(variables or {})
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def connect(self) -> socket.socket:
        """A socket to a new instance's process.

        Raises:
            ConfigurationError: the interpreter cannot be run, or cannot import the target.
            EnvironmentFailure: the server process died twice.
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

    def close(self) -> None:
        """End the server process; instances that still run end with it."""
        with self._lock:
            self._stop()

    def _started(self) -> socket.socket:
        if self._control is not None and self._process is not None and self._process.poll() is None:
            return self._control
        self._stop()
        ours, theirs = socket.socketpair()
        command = [self.python, "-c", BOOTSTRAP, str(PACKAGE), str(theirs.fileno()), self.target, self._options]
        try:
            with theirs:
                process = subprocess.Popen(
                    [*command, *self._path],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=os.environ | {"PYTHONSAFEPATH": "1"} | self._variables,
                )
        except OSError as error:
            ours.close()
            raise ConfigurationError(f"python={self.python!r} cannot be run: {error}") from error
        self._process, self._control = process, ours
        weakref.finalize(self, _end, process, ours)
        self._greet(ours)
        return ours

    def _greet(self, control: socket.socket) -> None:
        ready, _, _ = select.select([control], [], [], START_SECONDS)
        greeting: Message
        try:
            greeting = receive(control) if ready else {}
        except Closed:
            greeting = {}
        if "ready" in greeting:
            return
        self._stop()
        if "error" in greeting:
            cause = rebuild_error(greeting["error"])
            raise ConfigurationError(
                f"{self.python} cannot import {self.target}: {type(cause).__name__}: {cause}"
            ) from cause
        raise ConfigurationError(
            f"{self.python} did not get as far as importing {self.target} (its words are on standard error); it needs "
            "Python 3.11 or newer with the environment's own packages, and transformers where tools are methods"
        )

    def _stop(self) -> None:
        process, control, self._process, self._control = self._process, self._control, None, None
        if process is not None and control is not None:
            _end(process, control)


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    """Closing the control socket ends it, and lets it end its instances first."""
    control.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
