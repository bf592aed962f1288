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
import inspect
import os
import select
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from envgrad.environments.members import StepResult, ToolResult
from envgrad.environments.remote.host import Host
from envgrad.environments.remote.wire import HEADER, Closed, Message, decode, encode, rebuild_error, receive, send
from envgrad.environments.sources import hash63
from envgrad.environments.tools import ToolSpec
from envgrad.errors import EnvironmentContractError, EnvironmentFailure, EpisodeDone

OBEY_SECONDS = 0.5
"""how long an interrupted call may take to end before its process is killed"""
START_SECONDS = 120.0
QUICK_SECONDS = 60.0
"""limit of what is asked without a time-out of its own: counts of tasks, states, forks"""


class Remote:
    """One instance in its own process. ``remote_class`` adds the members that its environment has."""

    host: ClassVar[Host]
    described: ClassVar[Message]

    def __init__(self, connection: socket.socket | None = None, pid: int = 0) -> None:
        self._dead: str | None = None
        self._asked = 0
        self._waiting = False
        self._lock = threading.Lock()
        if connection is None:
            connection = self.host.connect()
            greeting = _await_greeting(connection)
            pid = int(greeting["pid"])
        self._pid = pid
        self._connection = connection
        self._connection.setblocking(False)
        self.done = False
        self._tools = _tool_specs(self.described["tools"])

    # -- asking

    async def _ask(self, operation: str, **arguments: object) -> Any:
        frame = self._begin(operation, arguments)
        loop = asyncio.get_running_loop()
        self._waiting = True
        try:
            await loop.sock_sendall(self._connection, frame)
            answer = await self._receive(loop)
        except asyncio.CancelledError:
            await self._interrupt(loop)
            raise
        except (OSError, Closed) as error:
            raise self._died(operation) from error
        self._waiting = False
        return self._read(answer)

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

    async def _interrupt(self, loop: asyncio.AbstractEventLoop) -> None:
        """End the call in the other process, or that process."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGUSR1)
        answer = asyncio.ensure_future(self._receive(loop))
        await asyncio.wait({answer}, timeout=OBEY_SECONDS)
        if answer.done() and not answer.cancelled() and answer.exception() is None:
            self._waiting = False
            return
        answer.cancel()
        self._kill("a call ran past its limit and did not stop")

    def _ask_now(self, operation: str, *, seconds: float | None = QUICK_SECONDS, **arguments: object) -> Any:
        """``_ask`` without a loop, for members that are not async."""
        frame = self._begin(operation, arguments)
        try:
            self._connection.settimeout(seconds)
            send(self._connection, frame)
            return self._read(receive(self._connection))
        except TimeoutError as error:
            self._kill(f"{operation} took longer than {seconds:.0f} s")
            raise EnvironmentFailure(f"{operation} took longer than {seconds:.0f} s; its process was ended") from error
        except (OSError, Closed) as error:
            raise self._died(operation) from error
        finally:
            if self._dead is None:
                self._connection.setblocking(False)

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
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)
        self._connection.close()

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
        generators = hash63("generators", int(str(given.get("group_id", 0))))
        if not described["reset_takes_all"]:
            given = {name: value for name, value in given.items() if name in described["reset_names"]}
            if given.get("task_index", 0) is None and "task_index" not in described["reset_required"]:
                given.pop("task_index")
        self.done = False
        value = await self._ask("reset", given=given, generators=generators)
        tools = value["tools"]
        self._tools = _tool_specs(self.described["tools"] if tools is None else tools)
        return value["opening"]

    def start_state(self) -> object:
        return self._ask_now("start_state")

    def close(self) -> None:
        """Close the instance, and end its process."""
        try:
            if self._dead is None and not self._waiting:
                self._ask_now("close", seconds=None)
        finally:
            self._kill("it was closed")


def remote_class(host: Host, described: Message, name: str) -> type[Remote]:
    """The class that stands for the environment ``described`` by its own process.

    Raises:
        EnvironmentContractError: it scores siblings together, which live in one process each.
    """
    if "group_reward" in described["members"]:
        raise EnvironmentContractError(
            f"{name} has group_reward, which reads all siblings of a group, and in processes of their own they cannot "
            "see each other: use environment_executor='thread'"
        )
    described = described | {"counts": {}}
    members: dict[str, object] = {"host": host, "described": described, "determinism": described["determinism"]}
    members["reset"] = _reset_member(described)
    wanted = {"step": described["step_protocol"], "num_tasks": described["finite"]}
    wanted |= dict.fromkeys(described["members"], True) | {"close": False}
    if described["has_state"]:
        wanted |= {"state_dict": True, "load_state_dict": True}
    members |= {member: _MEMBERS[member] for member, has in wanted.items() if has}
    base: type[Remote] = _FreeText if described["step_protocol"] else Remote
    return type(name, (base,), members)


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


def _fork(self: Remote) -> Remote:
    ours, theirs = socket.socketpair()
    with theirs:
        frame = self._begin("fork", {})
        try:
            self._connection.settimeout(QUICK_SECONDS)
            send(self._connection, frame)
            socket.send_fds(self._connection, [b"f"], [theirs.fileno()])
            value = self._read(receive(self._connection))
        except (OSError, Closed) as error:
            ours.close()
            raise self._died("fork") from error
        finally:
            if self._dead is None:
                self._connection.setblocking(False)
    copy = type(self)(ours, int(value["pid"]))
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
    "fork": _fork,
}


def _reset_member(described: Message) -> object:
    """``reset`` with the names of the environment's own, so that the contract reads it as that."""

    async def reset(self: Remote, **given: object) -> object:
        return await self._reset(given)

    kind, required = inspect.Parameter, set(described["reset_required"])
    named = [
        kind(name, kind.KEYWORD_ONLY, default=kind.empty if name in required else None)
        for name in described["reset_names"]
    ]
    first, rest = kind("self", kind.POSITIONAL_OR_KEYWORD), kind("given", kind.VAR_KEYWORD)
    reset.__signature__ = inspect.Signature([first, *named, rest])  # type: ignore[attr-defined]
    return reset


def _tool_specs(described: Sequence[Message]) -> tuple[ToolSpec, ...]:
    """The schemas as they are there; enums are made from their values there too."""
    return tuple(
        ToolSpec(
            name=tool["name"],
            schema=tool["schema"],
            method="_call_tool",
            is_async=True,
            by_name=True,
            takes_extra=tool["takes_extra"],
            none_defaults=frozenset(tool["none_defaults"]),
        )
        for tool in described
    )


def _await_greeting(connection: socket.socket) -> Message:
    """Wait for the instance's description.

    Raises:
        EnvironmentFailure: its factory raised, or it did not start in time.
    """
    ready, _, _ = select.select([connection], [], [], START_SECONDS)
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


def describe_remote(host: Host) -> Message:
    """What an instance of ``host`` says of itself; that instance is closed again."""
    connection = host.connect()
    with connection:
        described: Message = _await_greeting(connection)["described"]
    return described
