"""A person in the place of a model. One token is one message, so that a row of ids tells what was read and said."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from envgrad.chat.template import ToolSchemas
from envgrad.chat.tool_calls import SampledTurn
from envgrad.cli.typed import Answer
from envgrad.rollout.actor import Actor
from envgrad.sampling.sampler import Completion, SamplingParams, Session
from envgrad.types import Message, ToolCall

ROOM = 1 << 20
"""messages of an episode: more than anybody types"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A chat that waits for an answer."""

    chat: int
    """the id of its first message"""
    new: tuple[Message, ...]
    """its messages that were not shown yet"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    message: Message
    calls: tuple[ToolCall, ...] = ()


@dataclass(slots=True)
class Person(Actor):
    """Asks ``ask`` where a model would be sampled, one question at a time."""

    ask: Callable[[Question], Awaitable[Answer]]
    _said: list[_Said] = field(init=False, default_factory=list)
    _shown: set[int] = field(init=False, default_factory=set)
    _turn: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)

    @property
    def max_context(self) -> int:
        return ROOM

    # -- as a sampler

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams, session: Session) -> Completion:
        """The person's answer to the chat that ``prompt_ids`` are."""
        async with self._turn:
            new = tuple(self._said[one].message for one in prompt_ids if one not in self._shown)
            answer = await self.ask(Question(chat=prompt_ids[0], new=new))
            said = self._keep_answer(answer)
            self._shown.update((*prompt_ids, said))
        return Completion(token_ids=(said,), logprobs=(0.0,), stop_reason="stop", policy_version=0)

    def _keep_answer(self, answer: Answer) -> int:
        """Calls get ids that no other call of the episode has."""
        number = len(self._said)
        calls = tuple(replace(call, id=f"call_{number}_{place}") for place, call in enumerate(answer.calls))
        return self._keep(_Said(message=replace(answer, calls=calls).message(), calls=calls))

    def _keep(self, said: _Said) -> int:
        self._said.append(said)
        return len(self._said) - 1

    # -- as a renderer

    def open(self, messages: Sequence[Message], tools: ToolSchemas) -> list[int]:
        """One id for each message."""
        return [self._keep(_Said(message=dict(message))) for message in messages]

    def open_text(self, text: str) -> list[int]:
        """One id."""
        return self.open([{"role": "user", "content": text}], None)

    def suffix(self, turn_ids: Sequence[int], results: Sequence[Message], tools: ToolSchemas) -> list[int]:
        """One id for each result."""
        return self.open(results, tools)

    def read(self, token_ids: Sequence[int], tools: ToolSchemas, *, turn: int = 0) -> SampledTurn:
        """What was typed."""
        said = self._said[token_ids[0]]
        return SampledTurn(message=dict(said.message), calls=said.calls, text=str(said.message["content"]))

    def read_text(self, token_ids: Sequence[int]) -> SampledTurn:
        """What was typed."""
        return self.read(token_ids, None)
