"""What is said about a finished episode: the environment reads the chat, and may answer in words, ``get_feedback()``.

``read_chat`` runs before ``get_reward``, ``get_feedback`` after it and only where trainers ask, on an instance that can
still be used; it produces ``Episode.feedback``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from envgrad.environments.arguments import clean_text
from envgrad.environments.boundary import call_user
from envgrad.environments.spec import copied
from envgrad.errors import EnvironmentFailure, RewardTimeout
from envgrad.rollout.context import EpisodeContext, value_or_failure
from envgrad.rollout.opening import EpisodeStart
from envgrad.types import Message, Task


async def show_chat(context: EpisodeContext, begin: EpisodeStart, messages: Sequence[Message]) -> None:
    """Hand the finished chat to an environment that reads it: ``read_chat(messages)``, within ``reward_timeout``.

    Raises:
        EpisodeFailure: ``read_chat`` raised or took too long.
    """
    spec, limits = context.spec, context.limits
    if not (spec.has_read_chat and begin.usable):
        return
    where = f"{spec.name}.read_chat"
    read_chat: Callable[..., object] = begin.instance.read_chat  # type: ignore[attr-defined]
    chat = copied(list(messages))
    outcome = await call_user(where, read_chat, chat, workers=context.workers, timeout=limits.reward_timeout)
    value_or_failure(outcome, where, RewardTimeout, limits.reward_timeout)


async def read_feedback(context: EpisodeContext, begin: EpisodeStart, task: Task) -> str | None:
    """The environment's feedback on the episode that just ended; None if it has none, or nobody asks.

    Only of training tasks: nothing learns from an evaluation. Sync or async, within ``reward_timeout``: it is part of
    scoring. Blank text is no feedback.

    Raises:
        EpisodeFailure: ``get_feedback`` raised, took too long, or returned what is no text.
    """
    spec, limits = context.spec, context.limits
    asked = context.ask_feedback and task.split == "train"
    if not (asked and spec.has_get_feedback and begin.usable):
        return None
    where = f"{spec.name}.get_feedback"
    get_feedback: Callable[..., object] = begin.instance.get_feedback  # type: ignore[attr-defined]
    outcome = await call_user(where, get_feedback, workers=context.workers, timeout=limits.reward_timeout)
    value = value_or_failure(outcome, where, RewardTimeout, limits.reward_timeout)
    if value is None:
        return None
    if not isinstance(value, str):
        raise EnvironmentFailure(f"{where} returned {value!r}: feedback is a text, or None where there is none")
    text = clean_text(value)
    return text if text.strip() else None
