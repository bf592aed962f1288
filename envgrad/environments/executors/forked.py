"""The child's side of a fork of the trainer: a server of instances that has no part in the trainer's affairs."""

from __future__ import annotations

import gc
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable
from typing import NoReturn

from envgrad.environments.remote.instance import flush_streams
from envgrad.environments.remote.server import ignore_stop_signals, serve
from envgrad.environments.remote.wire import Closed


def serve_forked(control: socket.socket, factory: Callable[[], object]) -> NoReturn:
    """Serve instances of ``factory`` until the socket closes, then end without the parent's clean-up.

    The kernel is not asked to kill this process with its parent: it must live to end its instances' programs.
    """
    status = 1
    try:
        _leave_behind(control)
        serve(control, lambda: factory)
        status = 0
    except Closed:
        status = 0
    finally:
        flush_streams()
        os._exit(status)


def _leave_behind(control: socket.socket) -> None:
    """Drop what belongs to the trainer's process: garbage, signal handlers, connections, threads of torch."""
    gc.freeze()  # nothing of the parent's is collected here, and its pages stay shared
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) and number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
    ignore_stop_signals()
    _drop_connections(control.fileno())
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)  # its other threads were not forked, and would be waited for


def _drop_connections(keep: int) -> None:
    """Put ``/dev/null`` in the place of inherited sockets and pipes.

    Held open here, their other ends would never see that the trainer has closed them. The numbers stay taken, so that
    what the parent's objects close later is not a file of ours.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    try:
        os.dup2(nothing, 0)
        for name in os.listdir("/proc/self/fd"):
            number = int(name)
            if number > 2 and number not in (keep, nothing) and _is_connection(number):
                os.dup2(nothing, number, inheritable=False)
    finally:
        os.close(nothing)


def _is_connection(number: int) -> bool:
    try:
        mode = os.fstat(number).st_mode
    except OSError:  # the listing's own
        return False
    return stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode)
