"""An agent that owns its loop, in a check: somebody without a clue answers its calls, and what it asked is compared."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from envgrad.environments.boundary import Ok, Raised
from envgrad.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One call of the agent's, and what it was answered."""

    messages: tuple[Message, ...]
    tools: tuple[str, ...]
    answer: str

    def text(self) -> str:
        """As it is compared; ids of calls do not tell agents apart."""
        told = [{key: value for key, value in one.items() if key != "tool_call_id"} for one in self.messages]
        return json.dumps([told, self.tools], default=str, sort_keys=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPlayed:
    """How an agent's run went."""

    outcome: Ok | Raised
    asked: tuple[Asked, ...]
    limited: bool
    """whether it was told that no more is answered: it may then end by an error"""


class AgentStage(Protocol):
    """Answers agents in a check: ``agents.checking.Stage``."""

    async def play(
        self, run: Callable[[object], Awaitable[Ok | Raised]], messages: Sequence[Message], answers: int
    ) -> AgentPlayed:
        """Call ``run`` with an endpoint that answers so many calls."""
        ...
