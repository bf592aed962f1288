"""Instances of an OpenEnv environment: each is one session at the server, from ``reset`` until it is scored."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from envgrad.environments.adapters.background import in_background, obtain_in_background, run_in_background
from envgrad.environments.adapters.openenv_link import Link
from envgrad.environments.adapters.openenv_text import (
    ActionForm,
    Json,
    Render,
    listed_tool,
    new_part,
    observation_text,
)
from envgrad.environments.adapters.openenv_wire import (
    CLOSE_SECONDS,
    INVALID,
    RAISED,
    Address,
    Patience,
    Refused,
    Session,
)
from envgrad.environments.adapters.task_splits import TaskRange
from envgrad.environments.members import StepResult, ToolResult
from envgrad.environments.tools import ToolSpec
from envgrad.errors import EnvironmentContractError, EnvironmentFailure, ToolCallError

T = TypeVar("T")

_SEED_MASK = 0x7FFFFFFF
"""servers hand seeds to generators that take 32 bits"""
_NO_TASK = frozenset({"episode_id", "step_count"})
"""of a server's state: what differs between equal starts"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How sessions are played; the fields are ``OpenEnvEnvironment``'s."""

    form: ActionForm
    ranges: Mapping[str, TaskRange] | None
    determinism: str
    prompt: str
    observation: str | Render | None
    cumulative: bool
    reward: Literal["last", "sum"]
    no_reward: float | None
    reset_options: Mapping[str, object] = field(hash=False)
    keep_session: bool
    compare_state: bool
    patience: Patience


class OpenEnvInstance:
    """What free text and tools have in common."""

    def __init__(self, link: Link, rules: Rules) -> None:
        self._link = link
        self._rules = rules
        self._session: Session | None = None
        self._closed = False
        self._forget()
        self.determinism = rules.determinism
        link.enter()

    def _forget(self) -> None:
        self.done = False
        self._lost = False
        self._last: float | None = None
        self._whole = ""
        """the last observation, before the earlier part was cut off"""
        self._state: Json = {}
        self._listed: tuple[ToolSpec, ...] = ()

    async def get_reward(self) -> float | None:
        """None after a call that was given up: what it did at the server is not known."""
        await self._end()
        if self._lost:
            return None
        if self._last is None:
            return self._rules.no_reward
        return self._last if self._rules.reward == "last" else 0.0  # each turn was paid its part

    def start_state(self) -> Json:
        """What siblings' starts are compared by, beside their openings."""
        return {"observation": self._whole, "done": self.done, "state": self._state}

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            try:
                run_in_background(session.close(), timeout=2 * CLOSE_SECONDS)
            except TimeoutError:
                session.drop()
            self._link.places.give_soon()
        self._link.leave()

    async def _begin(self, ids: Json) -> str:
        """Reset to the task that ``ids`` name, in a session of its own; the opening prompt."""
        await self._end()
        self._forget()
        first = await self._open({**self._rules.reset_options, **ids})
        text, _ = self._read(first)
        if self._rules.compare_state:
            state = await self._ask("state")
            self._state = {key: value for key, value in state.items() if key not in _NO_TASK}
        if self._rules.form.lists_tools:
            self._listed = tuple(listed_tool(tool) for tool in await self._guarded(self._now().list_tools()))
        opening = "\n\n".join(part for part in (self._rules.prompt, text) if part)
        if not opening:
            raise EnvironmentContractError(
                f"reset's observation {first.get('observation')!r:.200} shows nothing to read: give prompt= to "
                "OpenEnvEnvironment, or observation= the field that has the task"
            )
        return opening

    async def _act(self, action: Json) -> tuple[str, float | None]:
        """One step: what it shows, and its reward where turns are paid.

        Raises:
            Refused: the server would not, or could not, do it.
        """
        text, reward = self._read(await self._ask("step", action))
        if reward is not None:
            self._last = reward
        return text, reward if self._rules.reward == "sum" else None

    def _read(self, data: Json) -> tuple[str, float | None]:
        observation = data.get("observation")
        if not isinstance(observation, dict):
            raise EnvironmentFailure(f"the server answered without an observation: {data!r:.200}")
        self.done = bool(data.get("done", False))
        before, self._whole = self._whole, observation_text(observation, self._rules.observation)
        text = new_part(before, self._whole) if self._rules.cumulative else self._whole
        return text, data.get("reward")

    async def _ask(self, kind: str, data: Json | None = None) -> Json:
        return await self._guarded(self._now().ask(kind, data))

    def _now(self) -> Session:
        if self._session is None:
            raise EnvironmentFailure("the session at the server has ended")
        return self._session

    async def _open(self, reset: Json) -> Json:
        address = await asyncio.to_thread(lambda: self._link.address)  # it may start the server
        opened = await obtain_in_background(self._enter(address, reset), give_up=self._drop)
        self._session, first = opened
        return first

    async def _enter(self, address: Address, reset: Json) -> tuple[Session, Json]:
        """A session, kept or new, and its first observation. On the background loop."""
        places, patience = self._link.places, self._rules.patience
        kept = await places.take(patience.full, address.http)
        opened: tuple[Session, Json] | None = None
        try:
            if kept is not None:
                with contextlib.suppress(EnvironmentFailure, Refused):  # closed meanwhile, or broken: a new one
                    opened = kept, await kept.ask("reset", reset)
            if opened is None:
                opened = await Session.open(address, reset, patience)
            return opened
        finally:
            if kept is not None and (opened is None or opened[0] is not kept):
                kept.drop()
            if opened is None:
                places.give()

    def _drop(self, opened: tuple[Session, Json]) -> None:
        opened[0].drop()
        self._link.places.give()

    async def _guarded(self, call: Coroutine[object, object, T]) -> T:
        """A call that is given up on its way ends the session: its answer would be taken for that of the next."""
        answered = False
        try:
            value = await in_background(call)
            answered = True
            return value
        except Refused:
            answered = True
            raise
        finally:
            if not answered:
                self._lost = self.done = True
                session, self._session = self._session, None
                if session is not None:
                    session.drop()
                    self._link.places.give_soon()

    async def _end(self) -> None:
        """Close the session, or keep it for the next episode."""
        session, self._session = self._session, None
        if session is None:
            return
        if self._rules.keep_session:
            self._link.places.give_soon(session)
            return
        try:
            await in_background(session.close())
        finally:
            self._link.places.give_soon()


class _Text(OpenEnvInstance):
    """The model's text is the action."""

    async def step(self, message: str) -> StepResult:
        try:
            text, reward = await self._act({self._rules.form.text_field or "": message})
        except Refused as refused:
            if refused.code != INVALID:
                raise EnvironmentFailure(f"the server could not act: {refused}") from refused
            return StepResult(f"Invalid action: {refused.problems}")
        return StepResult(text, reward=reward, done=self.done)


class _Tools(OpenEnvInstance):
    """Tools that the action's schema describes, or that the session lists."""

    @property
    def tools(self) -> Sequence[ToolSpec]:
        return self._listed if self._rules.form.lists_tools else self._rules.form.tools

    async def _call(self, tool: str, /, **arguments: object) -> ToolResult:
        form = self._rules.form
        if form.lists_tools:
            action: Json = {"type": "call_tool", "tool_name": tool, "arguments": arguments}
        else:
            action = {**arguments, **(form.fixed or {}).get(tool, {})}
        try:
            text, reward = await self._act(action)
        except Refused as refused:
            if refused.code not in (INVALID, RAISED):
                raise EnvironmentFailure(f"the server could not act: {refused}") from refused
            raise ToolCallError(refused.problems) from refused
        return ToolResult(text, reward=reward)


class _Fixed(OpenEnvInstance):
    """One task: nothing chooses it."""

    async def reset(self) -> str:
        return await self._begin({})


class _Seeded(OpenEnvInstance):
    async def reset(self, seed: int) -> str:
        return await self._begin({"seed": seed & _SEED_MASK})


class _Indexed(OpenEnvInstance):
    """The server has tasks by split and index."""

    def num_tasks(self, split: str) -> int:
        return self._ranges[split].count

    @property
    def _ranges(self) -> Mapping[str, TaskRange]:
        if self._rules.ranges is None:
            raise AssertionError("an environment with tasks has their ranges")
        return self._rules.ranges

    async def reset(self, seed: int, task_index: int, split: str) -> str:
        chosen = self._ranges[split]
        return await self._begin({"seed": seed & _SEED_MASK, "split": chosen.name, "index": chosen.index(task_index)})


class TextFixed(_Fixed, _Text):
    pass


class TextSeeded(_Seeded, _Text):
    pass


class TextIndexed(_Indexed, _Text):
    pass


class ToolsFixed(_Fixed, _Tools):
    pass


class ToolsSeeded(_Seeded, _Tools):
    pass


class ToolsIndexed(_Indexed, _Tools):
    pass


def instance_class(rules: Rules) -> Callable[[Link, Rules], OpenEnvInstance]:
    """The class whose ``reset`` names what chooses the task, with ``step`` or with tools."""
    text = rules.form.text_field is not None
    if rules.determinism == "fixed":
        return TextFixed if text else ToolsFixed
    if rules.ranges is not None:
        return TextIndexed if text else ToolsIndexed
    return TextSeeded if text else ToolsSeeded
