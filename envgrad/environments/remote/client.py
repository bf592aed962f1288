"""What stands for an environment in another process: an ordinary environment, whose members ask that process.

::

    Host      one server process per (python, target), started by the first instance, ended with the last user of it
    Remote    one instance's process: async members, so that a call past its time-out is interrupted there, and the
              process ended if it does not obey

A call that is cancelled (a time-out, the end of the run) is interrupted in the other process; if that does not help
within five seconds the process is killed with all that it started, and the instance is of no use any more: its next
member raises ``EnvironmentFailure``, so that the episode is played anew on a fresh one. So it does where a call had to
be interrupted twice, which may have cut its cleaning up; such an instance is still closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from envgrad.environments.boundary import LOOK_SECONDS
from envgrad.environments.members import RESERVED_NAMES, ToolResult
from envgrad.environments.remote.described import tool_specs
from envgrad.environments.remote.host import ServerHost
from envgrad.environments.remote.wire import (
    HEADER,
    Closed,
    Message,
    decode,
    encode,
    is_readable,
    pack,
    rebuild_error,
    receive,
    send,
)
from envgrad.environments.sources import hash63
from envgrad.environments.spec import Elsewhere
from envgrad.environments.tools import ToolSpec
from envgrad.errors import EnvironmentFailure, EpisodeDone

OBEY_LOOKS = 34
"""``LOOK_SECONDS`` that an interrupted call may take to end before its process is killed; counted, for where the whole
machine stands still, no time has been given to the process"""
QUICK_SECONDS = 60.0
"""limit of what is asked without a loop: counts of tasks, states, forks; who waits for them may have a shorter one"""


class Remote(Elsewhere):
    """One instance in its own process. ``stand_in`` adds the members that its environment has."""

    host: ClassVar[ServerHost]
    described: ClassVar[Message]
    close_seconds: ClassVar[float | None] = None
    """of the environment's ``close()``; then its process is ended. None: no limit"""

    def __init__(self, connection: socket.socket | None = None, pid: int = 0) -> None:
        self._set_out()
        if connection is None:
            connection, greeting = self.host.meet()
            pid = int(greeting["pid"])
        self._pid = pid
        self._connection = connection
        self._connection.setblocking(False)

    def _set_out(self) -> None:
        self._dead: str | None = None
        self._torn = False
        """a call was interrupted in its own cleaning up, perhaps"""
        self._asked = 0
        self._waiting = False
        self._lock = threading.Lock()
        self._ending: asyncio.Future[None] | None = None
        """of a cancelled call"""
        self.done = False
        self._tools = tool_specs(self.described["tools"])

    @property
    def process_lost(self) -> bool:
        return self._dead is not None or self._torn

    @property
    def _call_ending(self) -> asyncio.Future[None] | None:
        return self._ending

    # -- the way there and back: ``executors.ray_remote`` has another

    async def _send(self, loop: asyncio.AbstractEventLoop, frame: bytes) -> None:
        await loop.sock_sendall(self._connection, frame)

    async def _receive(self, loop: asyncio.AbstractEventLoop) -> Message:
        (length,) = HEADER.unpack(await self._exactly(loop, HEADER.size))
        return decode(await self._exactly(loop, length))

    async def _exactly(self, loop: asyncio.AbstractEventLoop, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = await loop.sock_recv(self._connection, min(count - len(parts), 2**20))
            if not part:
                raise Closed("the process is gone")
            parts += part
        return bytes(parts)

    def _begin_now(self, frame: bytes, seconds: float | None) -> None:
        """``_send`` without a loop.

        Raises:
            TimeoutError: not within ``seconds``.
        """
        self._connection.settimeout(seconds)
        send(self._connection, frame)

    def _answer_now(self, seconds: float | None) -> Message | None:
        """``_receive`` without a loop; None: nothing has come within ``seconds``."""
        if not is_readable(self._connection, seconds):
            return None
        self._connection.settimeout(QUICK_SECONDS)
        answer = receive(self._connection)
        self._connection.setblocking(False)
        return answer

    def _signal(self) -> None:
        """Interrupt what runs in the process."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGUSR1)

    def _end(self) -> None:
        """End the process, and all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)
        self._connection.close()

    def _fork(self) -> Remote:
        ours, theirs = socket.socketpair()
        with theirs:
            frame = self._begin("fork", {})

            def begin() -> None:
                self._begin_now(frame, QUICK_SECONDS)
                socket.send_fds(self._connection, [b"f"], [theirs.fileno()])

            with contextlib.ExitStack() as undo:
                undo.enter_context(ours)
                value = self._now("fork", QUICK_SECONDS, begin)
                undo.pop_all()
        return type(self)(ours, int(value["pid"]))

    # -- asking

    async def _ask(self, operation: str, **arguments: object) -> Any:
        frame = self._begin(operation, arguments)
        loop = asyncio.get_running_loop()
        self._waiting = True
        reading = asyncio.ensure_future(self._converse(loop, frame))
        try:
            # shielded: an answer that has arrived when this call is cancelled must not go with it
            answer = await asyncio.shield(reading)
            self._waiting = False
        except asyncio.CancelledError:
            self._ending = asyncio.ensure_future(self._interrupt(reading))
            await asyncio.shield(self._ending)  # cancelled again, it goes on, and close() waits for it
            raise
        except (OSError, Closed) as error:
            raise self._died(operation) from error
        finally:
            left = self._waiting and self._dead is None and (self._ending is None or self._ending.done())
            if left:  # dropped in another way, as by the end of its coroutine
                self._ending = loop.create_task(self._interrupt(reading))
        return self._read(answer)

    async def _converse(self, loop: asyncio.AbstractEventLoop, frame: bytes) -> Message:
        await self._send(loop, frame)
        return await self._receive(loop)

    async def _interrupt(self, reading: asyncio.Future[Message]) -> None:
        """End the call in the other process, or that process. ``reading``: its answer."""
        for _ in range(OBEY_LOOKS):
            if reading.done():
                break
            self._signal()  # again and again: it may not have begun yet
            await asyncio.wait({reading}, timeout=LOOK_SECONDS)
        if reading.done() and not reading.cancelled() and reading.exception() is None:
            self._note(reading.result())
            self._waiting = False
            return
        reading.cancel()
        self._kill("a call ran past its limit and did not stop")

    def _ask_now(self, operation: str, *, seconds: float | None = QUICK_SECONDS, **arguments: object) -> Any:
        """``_ask`` without a loop, for members that are not async."""
        frame = self._begin(operation, arguments)
        return self._now(operation, seconds, lambda: self._begin_now(frame, seconds))

    def _now(self, operation: str, seconds: float | None, begin: Callable[[], None]) -> Any:
        """``begin`` asks; wait for the answer here."""
        self._waiting, answer, late = True, None, ""
        try:
            begin()
            answer = self._answer_now(seconds)
            if answer is None:
                late = f"{operation} took longer than {seconds:.3g} s"
                answer = None if operation == "close" else self._insist()
        except TimeoutError:  # in the middle of a frame
            late = f"{operation} took longer than {QUICK_SECONDS if seconds is None else seconds:.3g} s"
        except (OSError, Closed) as error:
            raise self._died(operation) from error
        finally:
            if answer is None:  # or its caller was interrupted: it is still due, and would be taken for the next one's
                self._kill(late or f"its caller was interrupted in {operation}")
        if answer is None:
            raise EnvironmentFailure(f"{late}; its process was ended")
        self._waiting = False
        if late:
            raise EnvironmentFailure(f"{late}, and was interrupted")
        return self._read(answer)

    def _insist(self) -> Message | None:
        """``_interrupt`` without a loop; None: it does not obey."""
        for _ in range(OBEY_LOOKS):
            self._signal()
            answer = self._answer_now(LOOK_SECONDS)
            if answer is not None:
                self._note(answer)
                return answer
        return None

    def _note(self, answer: Message) -> None:
        self._torn = self._torn or bool(answer.get("torn"))

    def _packed(self, value: Mapping[str, object], what: str) -> Message:
        return pack(value, what) if self.host.same_python else {"plain": value}

    def _begin(self, operation: str, arguments: Mapping[str, object]) -> bytes:
        if self._dead is not None:
            raise EnvironmentFailure(f"the environment's process has ended: {self._dead}")
        if self._torn and operation != "close":
            raise EnvironmentFailure("a call had to be interrupted twice, which may have cut its cleaning up")
        if self._waiting:
            raise EnvironmentFailure(f"{operation} was asked while another call runs in the environment's process")
        self._asked += 1
        return encode({"id": self._asked, "op": operation, "arguments": arguments}, f"what {operation} is given")

    def _read(self, answer: Message) -> Any:
        self.done = bool(answer.get("done", self.done))
        self._note(answer)
        if "error" in answer:
            raise rebuild_error(answer["error"])
        if answer.get("interrupted"):
            raise EnvironmentFailure("the call was interrupted")
        return answer.get("value")

    def _died(self, operation: str) -> EnvironmentFailure:
        self._kill(f"it died in {operation}")
        return EnvironmentFailure(f"the environment's process died in {operation} (killed, out of memory, or an exit)")

    def _kill(self, why: str) -> None:
        with self._lock:
            if self._dead is not None:
                return
            self._dead = why
        self._end()

    # -- members that every environment has

    @property
    def tools(self) -> Sequence[ToolSpec]:
        return self._tools

    async def _call_tool(self, name: str, /, **arguments: object) -> object:
        value = await self._ask("call", name=name, given=arguments)
        if "ended" in value:
            raise EpisodeDone(value["ended"])
        return value["content"] if value["reward"] is None else ToolResult(value["content"], value["reward"])

    async def _reset(self, given: dict[str, object]) -> object:
        described = self.described
        generators = hash63("generators", int(str(given.get("seed", given.get("group_id", 0)))))
        if not described["reset_takes_all"]:
            given = {name: value for name, value in given.items() if name in described["reset_names"]}
            if given.get("task_index", 0) is None and "task_index" not in described["reset_required"]:
                given.pop("task_index")
        self.done = False
        packed = self._packed(given, "what reset is given")
        value = await self._ask("reset", packed=packed, generators=generators)
        tools, self.copy_safe = value["tools"], bool(value["copy_safe"])
        self._tools = tool_specs(self.described["tools"] if tools is None else tools)
        return value["opening"]

    def start_state(self) -> object:
        return self._ask_now("start_state")

    def close(self) -> None:
        """Close the instance, and end its process.

        Raises:
            EnvironmentFailure: it could not be closed, since a call runs that does not stop.
        """
        try:
            for look in range(round(OBEY_LOOKS * LOOK_SECONDS / 0.005)):
                if not self._waiting or self._dead is not None:
                    break
                if look % 30 == 1:  # of a thread that waits in vain, or cancelled, and interrupted by the loop as well
                    self._signal()
                time.sleep(0.005)
            if self._dead is None:
                self._ask_now("close", seconds=self.close_seconds)
        finally:
            self._kill("it was closed")

    def __deepcopy__(self, memo: object) -> Remote:
        copy = self._fork()
        copy.done, copy._tools = self.done, self._tools
        return copy

    def __getattr__(self, name: str) -> Any:
        """An attribute of the environment, for reward functions that look at it: what JSON can carry, or a method."""
        if name.startswith("_") or name in RESERVED_NAMES:
            raise AttributeError(name)
        found = self._ask_now("read", name=name)
        if not found["method"]:
            return found["value"]

        def call(*args: object, **kwargs: object) -> Any:
            packed = self._packed({"args": list(args), "kwargs": kwargs}, f"what {name} is given")
            return self._ask_now("invoke", name=name, packed=packed)

        return call
