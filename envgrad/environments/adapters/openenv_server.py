"""An OpenEnv server of our own: started for an environment, on a free port of the loopback, and ended with it.

The server's Python may be another one. It imports the app, binds a port, tells which one through a pipe, and ends when
its standard input does: that is when we close it, and when this process dies, in whatever way.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from envgrad.errors import ConfigurationError, EnvironmentFailure

_STOP_SECONDS = 5.0
_LOG_TAIL = 2000
"""bytes of the server's output that an error quotes"""

_CHILD = """
import importlib, os, socket, sys, threading
place, port_pipe = sys.argv[1], int(sys.argv[2])
sys.path[:0] = [os.getcwd()]
def end_with_parent():
    sys.stdin.buffer.read()
    server.should_exit = True
    late = threading.Timer(3.0, os._exit, [0])
    late.daemon = True
    late.start()
module, _, attribute = place.partition(":")
app = importlib.import_module(module)
for name in (attribute or "app").split("."):
    app = getattr(app, name)
import uvicorn
server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws_ping_interval=None, timeout_graceful_shutdown=2))
listening = socket.socket()
listening.bind(("127.0.0.1", 0))
listening.listen(1024)
threading.Thread(target=end_with_parent, daemon=True).start()
os.write(port_pipe, str(listening.getsockname()[1]).encode())
os.close(port_pipe)
server.run(sockets=[listening])
"""


def check_app(place: str) -> None:
    """
    Raises:
        ConfigurationError: not of the form ``module:app``.
    """
    module, colon, attribute = place.partition(":") if isinstance(place, str) else ("", "", "")
    if not all(part.isidentifier() for part in module.split(".")) or bool(colon) != bool(attribute):
        raise ConfigurationError(f"start={place!r} must name an ASGI app in a module, as 'my_server:app'")


class Server:
    """A running server.

    Args:
        place: ``module:app``; modules of ``folder`` are found too.
        python: the interpreter that has the server's packages (``uvicorn`` among them); this one if None.
        folder: the server's working folder; this process's if None.
        timeout: seconds until it must listen.

    Raises:
        EnvironmentFailure: it ended, or did not listen in time; the end of its output is quoted.
    """

    def __init__(self, place: str, *, python: str | None, folder: str | None, timeout: float) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop()
        read_end, write_end = os.pipe()
        try:
            command: Sequence[str] = [python or sys.executable, "-c", _CHILD, place, str(write_end)]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=(write_end,),
                cwd=folder,
                start_new_session=True,  # an interrupt at the terminal is for this process, which then closes it
            )
        except OSError as error:
            os.close(read_end)
            self._log.close()
            raise EnvironmentFailure(f"start={place!r}: {python or sys.executable} cannot be run: {error}") from error
        finally:
            os.close(write_end)
        try:
            self.url = f"http://127.0.0.1:{self._read_port(place, read_end, timeout)}"
        finally:
            os.close(read_end)

    def _read_port(self, place: str, read_end: int, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        ready = select.select([read_end], [], [], max(0.0, deadline - time.monotonic()))[0]
        port = os.read(read_end, 16) if ready else b""
        if port:
            return int(port)
        if ready:  # it has ended: give it a moment to say why
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_SECONDS)
        what = f"ended with exit code {self._process.poll()}" if ready else f"did not listen within {timeout:g} s"
        told = self._output()
        self.stop()
        raise EnvironmentFailure(f"start={place!r}: the server {what}. Its output ended in:\n{told}")

    def _output(self) -> str:
        end = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, end - _LOG_TAIL))
        return self._log.read().decode("utf-8", "replace").strip() or "(nothing)"

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """End it: asked first, killed if it does not listen. Safe to call twice."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(OSError):  # what it has started and not ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._log.close()
