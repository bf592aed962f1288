"""``check_environment`` with somebody who answers agents: their episodes are played and compared like all others."""

from __future__ import annotations

import asyncio
import importlib.util
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from envgrad.agents.endpoint import AgentEndpoint, AgentTimeLimit
from envgrad.agents.server import Server
from envgrad.agents.wire import ApiError, ChatRequest, Reply
from envgrad.environments.boundary import Ok, Raised
from envgrad.environments.check.agent_play import AgentPlayed, Asked
from envgrad.environments.check.report import CheckReport
from envgrad.environments.check.run import check_environment as check_with
from envgrad.environments.spec import Factory
from envgrad.types import Message

ANSWER = "I do not know."


@dataclass(slots=True)
class _Door:
    """One agent's way in."""

    key: str
    answers: int
    asked: list[Asked] = field(default_factory=list)
    limited: bool = False


class Stage:
    """Serves one agent at a time on the loopback interface, and gives every call the same answer."""

    def __init__(self) -> None:
        self._doors: dict[str, _Door] = {}

    async def play(
        self, run: Callable[[object], Awaitable[Ok | Raised]], messages: Sequence[Message], answers: int
    ) -> AgentPlayed:
        """``AgentStage.play``."""
        server, name, door = Server(self, "127.0.0.1"), secrets.token_hex(8), _Door(secrets.token_urlsafe(24), answers)
        self._doors[name] = door
        try:
            base = await server.start()
            url = f"{base}/episodes/{name}/v1"
            outcome = await run(AgentEndpoint(base_url=url, api_key=door.key, messages=tuple(messages)))
        finally:
            del self._doors[name]
            await server.stop()
        if isinstance(outcome, Raised) and isinstance(outcome.error, AgentTimeLimit):
            door.limited = True  # it ended itself, which is no fault
        # Calls that are made side by side come in any order.
        asked = sorted(door.asked, key=Asked.text)
        return AgentPlayed(outcome=outcome, asked=tuple(asked), limited=door.limited)

    def admit(self, name: str, key: str) -> _Door:
        """``Gate.admit``."""
        door = self._doors.get(name)
        if door is None or key != door.key:
            raise ApiError(401, "no such episode is being played, or the key is not its own", code="key")
        return door

    def begin_answer(self, door: _Door, request: ChatRequest) -> asyncio.Task[Reply]:
        """``Gate.begin_answer``."""
        return asyncio.ensure_future(self._answer(door, request))

    async def _answer(self, door: _Door, request: ChatRequest) -> Reply:
        if len(door.asked) >= door.answers:
            door.limited = True
            raise ApiError(400, "the check answers no more", code="context_length_exceeded", param="messages")
        tools = tuple(str(tool["function"]["name"]) for tool in request.tools)
        door.asked.append(Asked(messages=request.messages, tools=tools, answer=ANSWER))
        return Reply(
            id=f"chatcmpl-check-{len(door.asked)}",
            message={"role": "assistant", "content": ANSWER},
            finish_reason="stop",
            prompt_tokens=0,
            cached_tokens=0,
            completion_tokens=0,
            policy_version=0,
        )


def check_environment(
    environment: Factory,
    *,
    dataset_row: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    groups: int = 4,
    turns: int = 8,
    seed: int = 0,
    timeout: float = 30.0,
    name: str | None = None,
) -> CheckReport:
    """Play an environment with scripted actions, without any model, and say what breaks the contract.

    Made for a test: ``report = check_environment(Game); assert report.ok, str(report)``. What is checked, and what the
    words of the report mean: ``docs/checking.md``. An agent that owns its loop is answered "I do not know."; where the
    extra ``agents`` is not installed, such an environment is started and scored unplayed.

    Args:
        environment: the class, or what else builds an instance when called without arguments.
        dataset_row: a row of the dataset that the environment is trained with, or several; None if it has none.
        groups: how many tasks are played.
        turns: actions in an episode, or answers to an agent, at most.
        seed: decides tasks and actions.
        timeout: seconds that one call may take, an agent's whole run too; the first that takes longer ends the check.
        name: how the report calls it; the class's name if None.

    Raises:
        ConfigurationError: an argument that cannot work. What the environment does is never raised, but a finding.

    Example:
        >>> class Coin:
        ...     def reset(self, seed):
        ...         self.side, self.right = ("heads", "tails")[seed % 2], False
        ...         return "Heads or tails?"
        ...
        ...     def call(self, side: str) -> str:
        ...         '''Call the side.'''
        ...         self.right = side == self.side
        ...         return "right" if self.right else "wrong"
        ...
        ...     def get_reward(self):
        ...         return float(self.right)
        >>> report = check_environment(Coin)
        >>> report.ok, report.determinism.value, report.start.value
        (True, 'seeded', 'identity')
    """
    installed = all(importlib.util.find_spec(package) is not None for package in ("starlette", "uvicorn"))
    return check_with(
        environment, dataset_row=dataset_row, groups=groups, turns=turns, seed=seed, timeout=timeout, name=name,
        agents=Stage() if installed else None,
    )  # fmt: skip
