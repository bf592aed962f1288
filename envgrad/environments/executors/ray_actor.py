"""What runs on a node of a Ray cluster: an actor that starts a server of instances, and carries their frames.

Instances are the server's children, as with ``environment_executor="process"``: one that hangs or dies takes none of
the others with it, and they end with their actor, and what they have started with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from envgrad.environments.executors.hosts import POLL_SECONDS, SpawnedHost
from envgrad.environments.remote.host import START_SECONDS, ServerProcess, launch_server
from envgrad.environments.remote.wire import HEADER, Closed, Message, decode, describe_error, encode
from envgrad.errors import ConfigurationError, EnvironmentFailure

GONE = b""
"""the answer of an instance whose process has ended"""


DETACH = ("/bin/sh", "-c", 'exec 3>&0; "$@" >&3 3>&- & echo $!', "sh")
"""runs its words as a process that is not this one's child, which prints to standard input, and says its id"""


class DetachedProcess:
    """A process that is nobody's child: as much of ``subprocess.Popen`` as a host needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        """-1 once it has ended; None while it runs."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return -1
        return -1 if state == "Z" else None

    def wait(self, timeout: float | None = None) -> int:
        """
        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("a detached process", timeout or 0.0)
            time.sleep(POLL_SECONDS)
        return -1

    def kill(self) -> None:
        """Kill it, if it has not ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class DetachedHost(SpawnedHost):
    """A server that is not the actor's child: Ray kills the children of a worker that ends, at once, and then nobody
    would end what instances have started. By the end of its socket it ends all that, in order.
    """

    def _start(self, arguments: Sequence[str]) -> tuple[ServerProcess, socket.socket]:
        shell, control = launch_server(sys.executable, arguments, through=DETACH, stdin=1, stdout=subprocess.PIPE)
        told, _ = shell.communicate()
        return DetachedProcess(int(told)), control


@dataclass(slots=True, eq=False)
class _Chair:
    """An instance's process, and the socket to it."""

    connection: socket.socket
    pid: int = 0
    busy: bool = False
    asked: int = 0
    """the number of the last frame"""
    ended: bool = False

    def end(self) -> None:
        """End the process and what it started. Whoever reads from the socket sees its end, and closes it."""
        if not self.ended:
            self.ended = True
            if self.pid:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)
            if not self.busy:
                self.connection.close()

    async def ask(self, frame: bytes, asked: int = 0, handed: socket.socket | None = None) -> bytes:
        """Send a frame, and read the one that answers, without its length.

        Raises:
            Closed: the process is gone.
        """
        loop = asyncio.get_running_loop()
        self.busy = True
        self.asked = asked
        try:
            if frame:
                await loop.sock_sendall(self.connection, frame)
            if handed is not None:
                socket.send_fds(self.connection, [b"f"], [handed.fileno()])
            (length,) = HEADER.unpack(await self._exactly(loop, HEADER.size))
            return await self._exactly(loop, length)
        except OSError as error:
            raise Closed("the process is gone") from error
        finally:
            self.busy = False
            if self.ended:
                self.connection.close()

    async def _exactly(self, loop: asyncio.AbstractEventLoop, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = await loop.sock_recv(self.connection, min(count - len(parts), 2**20))
            if not part:
                raise Closed("the process is gone")
            parts += part
        return bytes(parts)


class EnvironmentActor:
    """Instances by the numbers of their seats. An actor of Ray's, whose methods run on one loop.

    Args:
        target: what messages call the environment.
        pickled: its factory.
        path: folders in front of the module search path, where they exist on this node.
    """

    def __init__(self, target: str, pickled: bytes, path: Sequence[str]) -> None:
        self._host = DetachedHost(target, pickled, path)
        self._chairs: dict[int, _Chair] = {}

    async def where(self) -> dict[str, object]:
        """The node and the process that it is in."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return {"node": node, "address": ray.util.get_node_ip_address(), "pid": os.getpid()}

    async def watch(self) -> None:
        """Never returns: its caller sees the end of this actor, whatever else is asked."""
        await asyncio.Event().wait()

    async def open(self, seat: int) -> bytes:
        """Build an instance; what it says of itself."""
        try:
            connection = await asyncio.to_thread(self._host.connect)
        except (ConfigurationError, EnvironmentFailure) as error:
            kind = "refused" if isinstance(error, ConfigurationError) else "error"
            return _frame({kind: describe_error(error)})
        connection.setblocking(False)
        chair = _Chair(connection)
        try:
            told = await asyncio.wait_for(chair.ask(b""), START_SECONDS)
        except (Closed, TimeoutError) as error:
            chair.end()
            why = "died while it was built" if isinstance(error, Closed) else f"was not built in {START_SECONDS:.0f} s"
            return _frame({"error": describe_error(EnvironmentFailure(f"the environment's process {why}"))})
        greeting = decode(told)
        if "error" in greeting:
            chair.end()
        else:
            chair.pid = int(greeting["pid"])
            self._chairs[seat] = chair
        return told

    async def ask(self, seat: int, asked: int, frame: bytes) -> bytes:
        """What the instance answers to ``frame``, of the number ``asked``; ``GONE`` if its process has ended."""
        chair = self._chairs.get(seat)
        if chair is None:
            return GONE
        try:
            return await chair.ask(frame, asked)
        except Closed:
            self.leave(seat)
            return GONE

    async def fork(self, seat: int, asked: int, frame: bytes, copy: int) -> bytes:
        """``ask`` the instance for a copy of itself, which takes the seat ``copy``."""
        chair = self._chairs.get(seat)
        if chair is None:
            return GONE
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        made = _Chair(ours)
        try:
            with theirs:
                answer = await chair.ask(frame, asked, theirs)
        except Closed:
            made.end()
            self.leave(seat)
            return GONE
        value = decode(answer).get("value")
        if isinstance(value, dict):
            made.pid = int(value["pid"])
            self._chairs[copy] = made
        else:
            made.end()
        return answer

    def interrupt(self, seat: int, asked: int) -> None:
        """Interrupt what the instance runs, if that is the frame of this number: messages overtake each other."""
        chair = self._chairs.get(seat)
        if chair is not None and chair.busy and chair.asked == asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(chair.pid, signal.SIGUSR1)

    def leave(self, seat: int) -> None:
        """End the instance's process; the seat is free."""
        chair = self._chairs.pop(seat, None)
        if chair is not None:
            chair.end()

    async def close(self) -> None:
        """End all instances and their server."""
        for seat in list(self._chairs):
            self.leave(seat)
        await asyncio.to_thread(self._host.close)


def _frame(message: Message) -> bytes:
    return encode(message, "an error")[HEADER.size :]
