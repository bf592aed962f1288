"""The server process: it has imported the environment, and forks one process for each instance.

It runs no threads and no user code beyond imports, so a fork is safe and takes milliseconds. A message on its control
socket carries the instance's end of a socket pair. It ends when its control socket does, that is with the process that
started it, and takes with it the instances and what they started.

Run as ``python -c BOOTSTRAP`` (see ``client``), with the control socket's number and the target as arguments.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

from envgrad.environments.boundary import Raised, guard
from envgrad.environments.remote.instance import serve_instance
from envgrad.environments.remote.wire import Closed, describe_error, encode, send
from envgrad.errors import ConfigurationError

PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """Be killed when the parent process is gone, whatever this one is doing (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def find_factory(target: str, arguments: Mapping[str, Any]) -> Callable[[], object]:
    """``"package.module:name"`` as a factory; with ``arguments``, what it makes is called with them.

    Raises:
        ConfigurationError: no such name.
    """
    module, _, name = target.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigurationError(f"{target!r}: {module} has no {name!r}")
        found = getattr(found, part)
    if isinstance(found, type) and callable(found) and "__call__" in dir(found) and not hasattr(found, "reset"):
        # A factory of environments with options, as the adapters are: made once, here, and called for each instance.
        maker: Callable[[], object] = found(**arguments)
        return maker
    return functools.partial(found, **arguments) if arguments else found


def serve(control: socket.socket, target: str, arguments: Mapping[str, Any]) -> None:
    """Import, say so, then fork an instance for every socket that comes."""
    made = guard(find_factory, target, arguments)
    if isinstance(made, Raised):
        send(control, encode({"error": describe_error(made.error)}, "an error"))
        return
    # What reads tools' signatures loads for seconds: here once, not in each instance. It may be absent, and not needed.
    guard(importlib.import_module, "transformers.utils.chat_template_utils")
    send(control, encode({"ready": os.getpid(), "python": sys.version.split()[0]}, "the greeting"))
    children: set[int] = set()
    signal.signal(signal.SIGCHLD, lambda number, frame: _reap(children))
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            break
        for fd in fds:
            children.add(_fork_instance(control, fd, made.value))  # type: ignore[arg-type]
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)


def _reap(children: set[int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            children.discard(pid)


def _fork_instance(control: socket.socket, fd: int, factory: Callable[[], object]) -> int:
    child = os.fork()
    if child:
        os.close(fd)
        return child
    status = 1
    try:
        control.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
        _die_with_parent()
        serve_instance(socket.socket(fileno=fd), factory)
        status = 0
    finally:
        os._exit(status)


def main(arguments: list[str]) -> None:
    """``FD TARGET JSON PATH...``: serve ``TARGET``; the paths are put in front of the module search path."""
    fd, target, options, *paths = arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path[:0] = paths
    control = socket.socket(fileno=int(fd))
    try:
        serve(control, target, json.loads(options))
    except Closed:
        return
