"""The class that stands for an environment in another process: ``Remote`` with the members that the environment has."""

from __future__ import annotations

from typing import Any

from envgrad.environments.members import StepResult
from envgrad.environments.remote.client import Remote
from envgrad.environments.remote.described import reset_signature
from envgrad.environments.remote.host import ServerHost
from envgrad.environments.remote.wire import Message


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
    return self.__deepcopy__({})


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
