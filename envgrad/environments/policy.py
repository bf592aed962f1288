"""The policy that is being trained, for environments in which it has more than one part: self-play, a simulated user.

::

    rollout:      with use_policy(ask):  reset / step / a tool
    environment:      text = await ask_policy(messages)          an async method, any number of times
                      text = await play_part("black", messages)  the same, and trained by its own reward:
                      reward_part("black", -1.0)

What is asked by ``ask_policy`` is sampled by the run's own rules and with the weights of the moment, and is not
trained: the episode's row holds only what the agent itself was asked. A part is an episode of its own beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from envgrad.errors import EnvironmentFailure
from envgrad.types import Message


class Ask(Protocol):
    """Answers a chat with the policy's text."""

    async def __call__(self, messages: Sequence[Message], /, *, max_tokens: int | None = None) -> str: ...


class Parts(Protocol):
    """Answers the policy's other parts, and keeps what they said."""

    async def play(self, part: str, messages: Sequence[Message], max_tokens: int | None) -> str | None:
        """As ``play_part``."""
        ...

    def reward(self, part: str, reward: float | None) -> None:
        """As ``reward_part``."""
        ...

    def forget(self, part: str) -> None:
        """As ``forget_part``."""
        ...


@dataclass(frozen=True, slots=True)
class _Policy:
    ask: Ask
    parts: Parts | None


_CURRENT: ContextVar[_Policy | None] = ContextVar("envgrad_policy", default=None)


@contextmanager
def use_policy(ask: Ask, parts: Parts | None = None) -> Iterator[None]:
    """Async user code in the block reaches ``ask`` through ``ask_policy``, and ``parts`` through ``play_part``.

    Without ``parts`` other parts are answered by ``ask`` too, and their rewards are dropped.
    """
    token = _CURRENT.set(_Policy(ask, parts))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def _current(where: str) -> _Policy:
    policy = _CURRENT.get()
    if policy is None:
        raise EnvironmentFailure(
            f"{where}: no policy is being rolled out here. It answers in async methods (reset, step, tools) during "
            "training and evaluation; by hand, wrap the call in use_policy(...) with a function that answers."
        )
    return policy


async def ask_policy(messages: Sequence[Message], *, max_tokens: int | None = None) -> str:
    """The policy's answer to a chat of its own, as text (reasoning and terminator left out).

    Call it from an async method of an environment. In ``reset`` all siblings of a group get the same answers to the
    same questions, since their starts must be equal; later each sibling gets its own.

    Args:
        messages: the whole chat, without tools.
        max_tokens: of this answer; None: what the model's context leaves, at most the run's ``max_completion_length``.

    Raises:
        EnvironmentFailure: nothing is being rolled out here (a check, a call by hand), or the chat does not fit.

    Example:
        >>> import asyncio
        >>> async def echo(messages, *, max_tokens=None):
        ...     return messages[-1]["content"]
        >>> with use_policy(echo):
        ...     asyncio.run(ask_policy([{"role": "user", "content": "Your move."}]))
        'Your move.'
    """
    return await _current("ask_policy").ask(messages, max_tokens=max_tokens)


async def play_part(part: str, messages: Sequence[Message], *, max_tokens: int | None = None) -> str | None:
    """The policy's answer as another part of the game, such as another seat, which is trained too.

    As ``ask_policy``; and what is said is kept, token by token, as an episode of its own. Where ``messages`` are the
    part's last chat, its answer, and user messages behind it, they extend its token row; else they begin a row. The
    part is trained by the reward that ``reward_part`` gives it, compared with the same part of the siblings.

    Args:
        part: a name that all siblings share, such as ``"seat_1"``.
        messages: the part's whole chat, without tools.
        max_tokens: of this answer; None: as long as the run's limits leave.

    Returns:
        None where the limits of the run (``max_completion_length``, for the part's tokens as for the agent's; the
        context) leave no room for an answer: the game cannot go on, and should end.

    Raises:
        EnvironmentFailure: nothing is being rolled out here.

    Example:
        >>> import asyncio
        >>> async def echo(messages, *, max_tokens=None):
        ...     return messages[-1]["content"]
        >>> with use_policy(echo):
        ...     asyncio.run(play_part("black", [{"role": "user", "content": "Your move."}]))
        'Your move.'
    """
    policy = _current("play_part")
    if policy.parts is None:
        return await policy.ask(messages, max_tokens=max_tokens)
    return await policy.parts.play(part, messages, max_tokens)


def reward_part(part: str, reward: float | None) -> None:
    """Say what a part has earned; None, or nothing said, leaves it out of training.

    Call it from an async method, at the latest in ``get_reward``. The last word counts.

    Raises:
        EnvironmentFailure: nothing is being rolled out here, the part has not played, or the reward is not finite.
    """
    policy = _current("reward_part")
    if policy.parts is not None:
        policy.parts.reward(part, reward)


def forget_part(part: str) -> None:
    """Leave out what a part has said so far, and its reward: for a game that is begun anew.

    Raises:
        EnvironmentFailure: nothing is being rolled out here.
    """
    policy = _current("forget_part")
    if policy.parts is not None:
        policy.parts.forget(part)
