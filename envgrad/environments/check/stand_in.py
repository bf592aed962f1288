"""Who answers in a check where an environment asks the policy: somebody without a clue."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from envgrad.environments.policy import use_policy
from envgrad.types import Message

T = TypeVar("T")


async def with_stand_in(play: Coroutine[Any, Any, T]) -> T:
    """Await ``play``, in which ``ask_policy`` always gets one answer: self-play and simulated users can be checked."""
    with use_policy(_clueless):
        return await play


async def _clueless(messages: Sequence[Message], /, *, max_tokens: int | None = None) -> str:
    return "I do not know."
