"""The server process: it has imported the environment, and forks one process for each instance.

It runs no threads and no user code beyond imports, so a fork is safe and takes milliseconds. A message on its control
socket carries the instance's end of a socket pair. It ends when its control socket does, that is with the process that
started it, and takes with it the instances and what they started.

Run as ``python -c BOOTSTRAP`` (see ``host``), with the control socket's number and the target as arguments.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import pickle
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

from envgrad.environments.boundary import Raised, guard
from envgrad.environments.remote.instance import end_with_programs, serve_instance
from envgrad.environments.remote.wire import Closed, describe_error, encode, receive_bytes, send
from envgrad.environments.tools import build_tool
from envgrad.errors import ConfigurationError

PR_SET_PDEATHSIG = 1
LOOK_SECONDS = 1.0
"""how often a server that waits looks whether its parent lives"""


def die_with_parent() -> None:
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


def serve(control: socket.socket, find: Callable[[], object]) -> None:
    """Find the factory, say so, then fork an instance for every socket that comes."""
    made = guard(find)
    if isinstance(made, Raised):
        send(control, encode({"error": describe_error(made.error)}, "an error"))
        return
    guard(_warm_up)  # transformers may be absent, and not needed
    gc.collect()
    gc.freeze()  # a collection in an instance would write to all these pages, which are shared
    send(control, encode({"ready": os.getpid(), "python": sys.version.split()[0]}, "the greeting"))
    children: set[int] = set()
    signal.signal(signal.SIGCHLD, lambda number, frame: _reap(children))
    parent = os.getppid()
    while os.getppid() == parent:  # the socket's end says so too, unless another process has a copy of it
        ready, _, _ = select.select([control], [], [], LOOK_SECONDS)
        if not ready:
            continue
        data, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            break
        for fd in fds:
            children.add(_fork_instance(control, fd, made.value))  # type: ignore[arg-type]
    for child in sorted(children):  # a copy: each end is reaped, and leaves the set
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)


def _warm_up() -> None:
    """Load what reads tools' signatures here once, not in each instance: that takes seconds.

    It would load torch and PIL too, for annotations of images and sounds, which no tool here has.
    """
    module: Any = importlib.import_module("transformers.utils.chat_template_utils")
    if "torch" not in sys.modules:
        module.is_torch_available = lambda: False
    if "PIL" not in sys.modules:
        module.is_vision_available = lambda: False

    def tool(text: str) -> str:
        """A tool."""
        return text

    build_tool("tool", tool)


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
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent()
        serve_instance(socket.socket(fileno=fd), factory)
        status = 0
    finally:
        end_with_programs(status)


def ignore_stop_signals() -> None:
    """Whoever stops the run's whole process group means its trainer, which then closes the instances in order."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # a handler, so that programs do not inherit it


def main(arguments: list[str]) -> None:
    """``FD TARGET JSON PATH...``: serve ``TARGET``; the paths are put in front of the module search path.

    Without a target the factory comes over the socket, pickled, from the process that started this one.
    """
    fd, target, options, *paths = arguments
    ignore_stop_signals()
    sys.path[:0] = paths
    control = socket.socket(fileno=int(fd))
    try:
        if target:
            serve(control, functools.partial(find_factory, target, json.loads(options)))
        else:
            serve(control, functools.partial(pickle.loads, receive_bytes(control)))
    except Closed:
        return
