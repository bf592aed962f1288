"""What stands for an environment in another process: an ordinary environment, whose members ask that process.

::

    Host      one server process per (python, target), started by the first instance, ended with the last user of it
    Remote    one instance's process: async members, so that a call past its time-out is interrupted there, and the
              process ended if it does not obey

A call that is cancelled (a time-out, the end of the run) is interrupted in the other process; if that does not help
within ``OBEY_SECONDS`` the process is killed with all that it started, and the instance is of no use any more: its next
member raises ``EnvironmentFailure``, so that the episode is played anew on a fresh one.
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

from envgrad.environments.members import RESERVED_NAMES, StepResult, ToolResult
from envgrad.environments.remote.described import reset_signature, tool_specs
from envgrad.environments.remote.host import ServerHost
from envgrad.environments.remote.wire import HEADER, Closed, Message, decode, encode, pack, rebuild_error, receive, send
from envgrad.environments.sources import hash63
from envgrad.environments.spec import Elsewhere
from envgrad.environments.tools import ToolSpec
from envgrad.errors import EnvironmentFailure, EpisodeDone

OBEY_SECONDS = 5.1
"""how long an interrupted call may take to end before its process is killed"""
OBEY_LOOKS = 34
"""in which that is waited: counted, for where the whole machine stands still, no time has been given to the process"""
QUICK_SECONDS = 60.0
"""limit of what is asked without a time-out of its own: counts of tasks, states, forks"""


class Remote(Elsewhere):
    """One instance in its own process. ``remote_class`` adds the members that its environment has."""

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
        self._asked = 0
        self._waiting = False
        self._lock = threading.Lock()
        self._ending: asyncio.Future[None] | None = None
        """of a cancelled call"""
        self.done = False
        self._tools = tool_specs(self.described["tools"])

    @property
    def process_lost(self) -> bool:
        return self._dead is not None

    @property
    def ending(self) -> asyncio.Future[None] | None:
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

    def _exchange(self, frame: bytes, seconds: float | None) -> Message:
        """Send and receive without a loop."""
        return self._exchange_by(lambda: send(self._connection, frame), seconds)

    def _exchange_by(self, begin: Callable[[], None], seconds: float | None) -> Message:
        self._connection.settimeout(seconds)
        begin()
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
                send(self._connection, frame)
                socket.send_fds(self._connection, [b"f"], [theirs.fileno()])

            with contextlib.ExitStack() as undo:
                undo.enter_context(ours)
                value = self._now("fork", QUICK_SECONDS, lambda: self._exchange_by(begin, QUICK_SECONDS))
                undo.pop_all()
        return type(self)(ours, int(value["pid"]))

    # -- asking

    async def _ask(self, operation: str, **arguments: object) -> Any:
        frame = self._begin(operation, arguments)
        loop = asyncio.get_running_loop()
        self._waiting = True
        reading: asyncio.Future[Message] | None = None
        try:
            await self._send(loop, frame)
            reading = asyncio.ensure_future(self._receive(loop))
            # shielded: an answer that has arrived when this call is cancelled must not go with it
            answer = await asyncio.shield(reading)
        except asyncio.CancelledError:
            self._ending = asyncio.ensure_future(self._interrupt(reading))
            await asyncio.shield(self._ending)  # cancelled again, it goes on, and close() waits for it
            raise
        except (OSError, Closed) as error:
            raise self._died(operation) from error
        self._waiting = False
        return self._read(answer)

    async def _interrupt(self, reading: asyncio.Future[Message] | None) -> None:
        """End the call in the other process, or that process. ``reading``: its answer; None: it was not sent whole."""
        for _ in range(OBEY_LOOKS):
            if reading is None or reading.done():
                break
            self._signal()  # again and again: it may not have begun yet
            await asyncio.wait({reading}, timeout=OBEY_SECONDS / OBEY_LOOKS)
        if reading is not None and reading.done() and not reading.cancelled() and reading.exception() is None:
            self._waiting = False
            return
        if reading is not None:
            reading.cancel()
        self._kill("a call ran past its limit and did not stop")

    def _ask_now(self, operation: str, *, seconds: float | None = QUICK_SECONDS, **arguments: object) -> Any:
        """``_ask`` without a loop, for members that are not async."""
        frame = self._begin(operation, arguments)
        return self._now(operation, seconds, lambda: self._exchange(frame, seconds))

    def _now(self, operation: str, seconds: float | None, exchange: Callable[[], Message]) -> Any:
        """``exchange`` asks, and waits for the answer here."""
        self._waiting, answered = True, False
        try:
            answer = exchange()
            answered = True
        except TimeoutError as error:
            self._kill(f"{operation} took longer than {seconds:.3g} s")
            raise EnvironmentFailure(f"{operation} took longer than {seconds:.3g} s; its process was ended") from error
        except (OSError, Closed) as error:
            raise self._died(operation) from error
        finally:
            if not answered:  # interrupted: it is still due, and would be taken for the next one's
                self._kill(f"its caller was interrupted in {operation}")
        self._waiting = False
        return self._read(answer)

    def _packed(self, value: Mapping[str, object], what: str) -> Message:
        return pack(value, what) if self.host.same_python else {"plain": value}

    def _begin(self, operation: str, arguments: Mapping[str, object]) -> bytes:
        if self._dead is not None:
            raise EnvironmentFailure(f"the environment's process has ended: {self._dead}")
        if self._waiting:
            raise EnvironmentFailure(f"{operation} was asked while another call runs in the environment's process")
        self._asked += 1
        return encode({"id": self._asked, "op": operation, "arguments": arguments}, f"what {operation} is given")

    def _read(self, answer: Message) -> Any:
        self.done = bool(answer.get("done", self.done))
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
        """Close the instance, and end its process."""
        for _ in range(round(OBEY_SECONDS / 0.005)):
            if not self._waiting or self._dead is not None:
                break
            time.sleep(0.005)  # a cancelled call is being interrupted, beside this thread
        try:
            if self._dead is None and not self._waiting:
                self._ask_now("close", seconds=self.close_seconds)
        finally:
            self._kill("it was closed")

    def __deepcopy__(self, memo: object) -> Remote:
        return _forked(self)

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


def remote_class(
    host: ServerHost | None,
    described: Message,
    name: str,
    close_seconds: float | None = None,
    way: type[Remote] | None = None,
) -> type[Remote]:
    """The class that stands for the environment ``described`` by its own process.

    ``way``: a subclass that goes there otherwise than by sockets of ``host``'s.
    """
    described = described | {"counts": {}}
    members: dict[str, object] = {"host": host, "described": described, "determinism": described["determinism"]}
    members |= {"close_seconds": close_seconds, "may_copy": described["may_copy"]}
    members["reset"] = _reset_member(described)
    wanted = {"step": described["step_protocol"], "num_tasks": described["finite"]}
    wanted |= dict.fromkeys(described["members"], True) | {"close": False}
    if described["has_state"]:
        wanted |= {"state_dict": True, "load_state_dict": True}
    members |= {member: _MEMBERS[member] for member, has in wanted.items() if has}
    base: type[Remote] = _FreeText if described["step_protocol"] else Remote
    bases: tuple[type[Remote], ...] = (base,) if way is None else (way,) if base is Remote else (way, base)
    return type(name, bases, members)


class _FreeText(Remote):
    tools = None  # type: ignore[assignment]


async def _step(self: Remote, message: str) -> StepResult:
    value = await self._ask("step", message=message)
    if "ended" in value:
        return StepResult(value["ended"], done=True)
    return StepResult(value["observation"], value["reward"], value["over"])


async def _get_reward(self: Remote) -> object:
    return await self._ask("get_reward")


async def _get_feedback(self: Remote) -> object:
    return await self._ask("get_feedback")


async def _read_chat(self: Remote, messages: list[Any]) -> None:
    await self._ask("read_chat", messages=messages)


def _num_tasks(self: Remote, split: str) -> object:
    counts: dict[str, object] = self.described["counts"]  # asked once: the instance may be playing later, or be closed
    if split not in counts:
        counts[split] = self._ask_now("num_tasks", split=split)
    return counts[split]


def _state_dict(self: Remote) -> object:
    return self._ask_now("state_dict")


def _load_state_dict(self: Remote, state: object) -> None:
    self._ask_now("load_state_dict", state=state)


def _forked(self: Remote) -> Remote:
    copy = self._fork()
    copy.done, copy._tools = self.done, self._tools
    return copy


_MEMBERS: dict[str, object] = {
    "step": _step,
    "get_reward": _get_reward,
    "get_feedback": _get_feedback,
    "read_chat": _read_chat,
    "num_tasks": _num_tasks,
    "state_dict": _state_dict,
    "load_state_dict": _load_state_dict,
    "fork": _forked,
}


def _reset_member(described: Message) -> object:
    async def reset(self: Remote, **given: object) -> object:
        return await self._reset(given)

    reset.__signature__ = reset_signature(described)  # type: ignore[attr-defined]
    return reset


def first_remote(host: ServerHost, name: str | None = None, close_seconds: float | None = None) -> Remote:
    """The first instance of ``host``, of a class made from what it says of itself; ``name``: of the class.

    Raises:
        EnvironmentFailure: the factory raised, or did not return in time.
        EnvironmentContractError: what breaks the contract, or needs siblings or sampler beside it.
    """
    connection, greeting = host.meet()
    described: Message = greeting["described"]
    made = remote_class(host, described, name or str(described["name"]), close_seconds)
    return made(connection, int(greeting["pid"]))
