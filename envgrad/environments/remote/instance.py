"""One instance in its process: it reads requests from its socket and answers them, one at a time, in order.

User code runs in the main thread, so that ``SIGUSR1`` can interrupt a call whose caller has given up; a loop of its own
runs what is async. A watching thread ends the process, and all that it started, when the socket closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import inspect
import io
import os
import random
import select
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn, cast

from envgrad.environments.boundary import Ok, Raised, as_exception, guard, guard_in_thread
from envgrad.environments.closing import call_all_now
from envgrad.environments.contract import inspect_environment
from envgrad.environments.copy_safety import attributes_of, is_copy_safe
from envgrad.environments.members import ToolResult
from envgrad.environments.policy import use_policy
from envgrad.environments.remote.wire import Closed, Message, describe_error, encode, receive, send, unpack
from envgrad.environments.results import read_reward, read_step
from envgrad.environments.spec import EnvironmentSpec
from envgrad.environments.start import fork_instance
from envgrad.environments.state_walk import Walker
from envgrad.environments.tools import ToolSpec, check_arguments, find_tool, result_text
from envgrad.errors import EnvironmentContractError, EnvironmentFailure, EpisodeDone

SHORT = 120
"""characters of a state's value that are shown where two differ"""

PROBE_CLOSE_SECONDS = 10.0
FINALLY_SECONDS = 2.0
"""that interrupted async calls get for their ``finally``"""
INSIST = 15
"""interrupts after which one is raised again, for the first may have gone unheard, as in a finalizer; until then the
call has time for its ``finally``"""


class Interrupted(BaseException):
    """The caller has given up waiting: raised in the middle of user code, past its ``except Exception``."""


def serve_instance(connection: socket.socket, factory: Callable[[], object]) -> None:
    """Build an instance, describe it, and answer requests until the socket closes."""
    os.setsid()  # what user code starts is in this process's group, and ends with it
    _watch(connection)
    for stream in (sys.stdout, sys.stderr):  # what it prints is seen when it is printed, whatever becomes of it
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    reseed_generators()
    made = _build(factory)
    if isinstance(made, Raised):
        send(connection, encode({"error": describe_error(made.error)}, "an error"))
        return
    spec, instance = cast(tuple[EnvironmentSpec, object], made.value)
    desk = _Desk(connection=connection, instance=instance, spec=spec, loop=asyncio.new_event_loop())
    send(connection, encode({"pid": os.getpid(), "described": describe(spec, instance)}, "the description"))
    with use_policy(_FarPolicy()):
        desk.serve()


def _build(factory: Callable[[], object]) -> Ok | Raised:
    """An instance and its spec. A factory that raises is a failure of this instance, not a break of the contract."""
    made = guard_in_thread(factory)
    if isinstance(made, Raised):
        if isinstance(made.error, EnvironmentContractError):
            return made
        error = EnvironmentFailure(f"the factory raised {type(made.error).__name__}: {made.error}")
        return Raised(error, made.seconds)
    found = guard(inspect_environment, "", lambda: made.value)
    if isinstance(found, Raised):
        return found
    spec, instance = cast(tuple[EnvironmentSpec, Any], found.value)
    why = _refused(spec, type(instance).__name__)
    if why is not None and spec.has_close:
        call_all_now([instance.close], timeout=PROBE_CLOSE_SECONDS)
    return found if why is None else Raised(EnvironmentContractError(why), found.seconds)


def _refused(spec: EnvironmentSpec, name: str) -> str | None:
    """Why an environment cannot live in a process of its own."""
    if spec.has_group_reward:
        return (
            f"{name} has group_reward, which reads all siblings of a group, and in processes of their own they cannot "
            "see each other: use environment_executor='thread'"
        )
    if spec.runs_agent:
        return (
            f"{name} has run_agent, which asks the sampler in the trainer's process, and cannot play from another one: "
            "use environment_executor='thread'"
        )
    return None


class _FarPolicy:
    """Answers an environment that asks the policy, which is in another process."""

    async def __call__(self, messages: Sequence[Mapping[str, Any]], /, *, max_tokens: int | None = None) -> str:
        raise EnvironmentFailure(
            "the policy is in the trainer's process and this environment in one of its own, so it cannot ask: play it "
            "with environment_executor='thread'"
        )


def describe(spec: EnvironmentSpec, instance: object) -> Message:
    """A spec as JSON: what the other side builds its class from."""
    return {
        "name": type(instance).__name__,
        "may_copy": may_copy(spec),
        "reset_names": sorted(spec.reset_names),
        "reset_required": sorted(spec.reset_required),
        "reset_takes_all": spec.reset_takes_all,
        "step_protocol": spec.step_protocol,
        "has_done": spec.has_done,
        "tools": [_tool(tool) for tool in spec.tools],
        "members": [
            name
            for name in ("get_reward", "get_feedback", "read_chat", "fork", "close")
            if getattr(spec, f"has_{name}")
        ],
        "has_state": spec.has_state,
        "finite": spec.num_tasks is not None,
        "determinism": spec.determinism,
    }


def may_copy(spec: EnvironmentSpec) -> bool:
    """Whether siblings may be copies of one instance, if that is safe: see ``environments.start``."""
    return not (spec.has_close or spec.has_fork or spec.uses_task_identity)


def _tool(tool: ToolSpec) -> Message:
    return {
        "name": tool.name,
        "schema": tool.schema,
        "takes_extra": tool.takes_extra,
        "none_defaults": sorted(tool.none_defaults),
    }


def _watch(connection: socket.socket) -> None:
    """End the process group when the other side is gone, even in the middle of a call."""

    def wait() -> None:
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLRDHUP | select.POLLHUP | select.POLLERR)
        poll.poll()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, name="envgrad-watch", daemon=True).start()


@dataclass(slots=True)
class _Desk:
    """Requests come in, answers go out."""

    connection: socket.socket
    instance: Any
    spec: EnvironmentSpec
    loop: asyncio.AbstractEventLoop
    busy: bool = False
    """user code runs: an interrupt may hit it"""
    interrupts: int = 0
    """that this call has got"""
    torn: bool = False
    """a call was interrupted again, perhaps in its own cleaning up, or its cleaning up goes on"""
    tools: tuple[ToolSpec, ...] = field(default=())

    def serve(self) -> None:
        signal.signal(signal.SIGUSR1, self._on_interrupt)
        self.tools = self.spec.tools
        while True:
            try:
                request = receive(self.connection)
            except Closed:
                return
            operation = str(request["op"])
            answer = self._answer(operation, request["arguments"])
            if operation != "close" and "interrupted" not in answer:
                answer |= self._done(operation)
            answer |= {"id": request["id"], "torn": self.torn}
            self._reply(answer, operation)
            if operation == "close":
                return

    def _reply(self, answer: Message, what: str) -> None:
        made = guard(encode, answer, f"what {what} returned")
        if isinstance(made, Raised):
            made = guard(encode, {"id": answer["id"], "error": describe_error(made.error)}, "an error")
        if not isinstance(made, Raised):
            send(self.connection, made.value)  # type: ignore[arg-type]

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.busy:
            self.interrupts += 1
            self.torn = self.torn or self.interrupts > INSIST
            if self.interrupts % INSIST == 1:
                raise Interrupted

    def _run_user(self, function: Callable[[], object]) -> Ok | Raised:
        """Call what an interrupt may hit; ``sys.exit()`` in it is the user's too."""
        try:
            self.interrupts, self.busy = 0, True
            made = guard_in_thread(function)
            self.busy = False
        except Interrupted:
            self.busy = False
            made = Raised(as_exception(Interrupted()), 0.0)
        return made

    def _interrupted(self) -> Message:
        self._drop_tasks()
        return {"interrupted": True}

    def _done(self, operation: str) -> Message:
        """What ``done`` says, which may be a property, or come and go."""
        made = self._run_user(
            lambda: self.spec.read_done(self.instance) if self.spec.has_done or hasattr(self.instance, "done") else None
        )
        if not isinstance(made, Raised):
            return {} if made.value is None else {"done": made.value}
        if isinstance(made.error.__cause__, Interrupted):
            return self._interrupted()
        if operation not in ("call", "step"):
            return {}
        failure = EnvironmentFailure(f"done raised {type(made.error).__name__}: {made.error}")
        return {"error": describe_error(failure)}

    def _answer(self, operation: str, arguments: Mapping[str, Any]) -> Message:
        made = self._run_user(functools.partial(getattr(self, f"_do_{operation}"), **arguments))
        if isinstance(made, Raised):
            if isinstance(made.error.__cause__, Interrupted):
                return self._interrupted()
            if isinstance(made.error, EpisodeDone):
                return {"value": {"ended": result_text(made.error.observation)}}
            return {"error": describe_error(made.error)}
        return {"value": made.value}

    def _run(self, value: Any) -> Any:
        """Finish what user code returned, if it is async."""
        if not inspect.isawaitable(value):
            return value

        async def wait() -> object:
            return await value

        return self.loop.run_until_complete(wait())

    def _drop_tasks(self) -> None:
        """What an interrupt left unfinished on the loop must not run on with the next call."""
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        if left:
            _, going = self.loop.run_until_complete(asyncio.wait(left, timeout=FINALLY_SECONDS))
            self.torn = self.torn or bool(going)

    # -- what can be asked

    def _do_reset(self, packed: Message, generators: int) -> Message:
        seed_generators(generators)
        opening = self._run(self.instance.reset(**unpack(packed)))
        self.tools = self.spec.tools_of(self.instance)
        changed = self.tools != self.spec.tools
        return {
            "opening": opening,
            "tools": [_tool(tool) for tool in self.tools] if changed else None,
            "copy_safe": may_copy(self.spec) and is_copy_safe(self.instance),
        }

    def _do_call(self, name: str, given: Mapping[str, Any]) -> Message:
        tool = find_tool(name, self.tools)
        value: object = self._run(tool.bind(self.instance)(**check_arguments(tool, dict(given))))
        reward: float | None = None
        if isinstance(value, ToolResult):
            reward, value = value.reward, value.content
        return {"content": result_text(value), "reward": None if reward is None else float(reward)}

    def _do_step(self, message: str) -> Message:
        result = read_step(self._run(self.instance.step(message)), "step")
        return {"observation": result.observation, "reward": result.reward, "over": result.done}

    def _do_get_reward(self) -> object:
        return read_reward(self._run(self.instance.get_reward()), "get_reward")

    def _do_get_feedback(self) -> object:
        return self._run(self.instance.get_feedback())

    def _do_read_chat(self, messages: list[Any]) -> None:
        self._run(self.instance.read_chat(messages))

    def _do_num_tasks(self, split: str) -> int:
        if self.spec.num_tasks is None:
            raise EnvironmentContractError("it has no num_tasks")
        return self.spec.num_tasks(split)

    def _do_start_state(self) -> Mapping[str, Any]:
        """The state right after ``reset``, attribute by attribute: a digest of each value, and its beginning."""
        if self.spec.has_start_state:
            told = self.instance.start_state()
            state = told if isinstance(told, dict) else {"start_state()": told}
        else:
            state = dict(attributes_of(self.instance) or {})
        return {str(name): _pictured(value, str(name)) for name, value in sorted(state.items(), key=str)}

    def _do_read(self, name: str) -> Message:
        """An attribute, for reward functions that look at their environments; a method is named, and called later."""
        value = getattr(self.instance, name)
        return {"method": True} if callable(value) else {"method": False, "value": value}

    def _do_invoke(self, name: str, packed: Message) -> object:
        given = unpack(packed)
        return self._run(getattr(self.instance, name)(*given["args"], **given["kwargs"]))

    def _do_state_dict(self) -> object:
        return self.instance.state_dict()

    def _do_load_state_dict(self, state: object) -> None:
        self.instance.load_state_dict(state)

    def _do_close(self) -> None:
        if self.spec.has_close:
            self._run(self.instance.close())

    def _do_fork(self) -> Message:
        """Fork the instance as it defines it, or copy it, and fork this process: the new one serves the copy."""
        _, (fd, *_), _, _ = socket.recv_fds(self.connection, 1, 1)  # first of all: the next request begins behind it
        try:
            copy = fork_instance(self.instance)
            drawn = random.getstate()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # the watching thread holds no lock
                child = os.fork()
            if child:
                return {"pid": child}
            try:
                os.setsid()
                self.connection.close()
                self.connection = socket.socket(fileno=os.dup(fd))
                random.setstate(drawn)  # a fork seeds it anew
                self.instance, self.busy, self.loop = copy, False, asyncio.new_event_loop()
                _watch(self.connection)
                self.serve()
            finally:
                end_with_programs(0)
        finally:
            os.close(fd)


def _pictured(value: object, path: str) -> list[str]:
    picture = repr(Walker().walk(value, path))
    shown = repr(value)
    return [hashlib.blake2b(picture.encode(errors="replace"), digest_size=12).hexdigest(), shown[:SHORT]]


def end_with_programs(status: int) -> NoReturn:
    """End this process, and the programs that it has started, whoever sees the socket's end first."""
    flush_streams()
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(status)


def flush_streams() -> None:
    """What was printed is not lost by ``os._exit``, nor printed twice by a fork."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.flush()


def seed_generators(seed: int) -> None:
    """Put the process-global generators at the group's beginning, as ``isolation.Stream`` does in threads."""
    random.seed(seed)
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed([seed & 0xFFFFFFFF, seed >> 32, 1])
    if torch is not None:
        torch.manual_seed(seed)


def reseed_generators() -> None:
    """Not as in the process that this one was forked from, with all its siblings. (``random`` does so by itself.)"""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
