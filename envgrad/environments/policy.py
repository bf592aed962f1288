"""The policy that is being trained, for environments in which it has more than one part: self-play, a simulated user.

::

    rollout:      with use_policy(ask):  reset / step / a tool
    environment:      text = await ask_policy(messages)          an async method, any number of times

What is asked here is sampled by the run's own rules and with the weights of the moment, and is not trained: the
episode's row holds only what the agent itself was asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from envgrad.errors import EnvironmentFailure
from envgrad.types import Message


class Ask(Protocol):
    """Answers a chat with the policy's text."""

    async def __call__(self, messages: Sequence[Message], /, *, max_tokens: int | None = None) -> str: ...


_CURRENT: ContextVar[Ask | None] = ContextVar("envgrad_policy", default=None)


@contextmanager
def use_policy(ask: Ask) -> Iterator[None]:
    """Async user code in the block reaches ``ask`` through ``ask_policy``."""
    token = _CURRENT.set(ask)
    try:
        yield
    finally:
        _CURRENT.reset(token)


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
    ask = _CURRENT.get()
    if ask is None:
        raise EnvironmentFailure(
            "ask_policy: no policy is being rolled out here. It answers in async methods (reset, step, tools) during "
            "training and evaluation; by hand, wrap the call in use_policy(...) with a function that answers."
        )
    return await ask(messages, max_tokens=max_tokens)
