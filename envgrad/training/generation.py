"""Answers of the policy as it is now, for a user's own rollouts: ``trainer.generate``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

from envgrad.environments.tasks import hash63
from envgrad.errors import ConfigurationError
from envgrad.rollout.context import EpisodeContext
from envgrad.rollout.loop import gather_or_cancel
from envgrad.sampling.sampler import Session
from envgrad.types import Message

if TYPE_CHECKING:
    from envgrad.training.rollouts import Rollouts

_calls = count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """One answer: its token ids, with the log-prob of each sampled one."""

    prompt_ids: list[int]
    completion_ids: list[int]
    """the sampled terminator included"""
    logprobs: list[float]
    text: str
    """the answer without special tokens"""


def generate(
    rollouts: Rollouts, prompts: Sequence[str | list[Message] | list[int]], *, max_tokens: int | None = None
) -> list[Generated]:
    """One answer to each prompt: a chat, plain text, or token ids. All are sampled at once.

    Temperature and truncation are those of the configuration. From any thread.

    Args:
        rollouts: The trainer's.
        prompts: Chats are rendered with the chat template, text is encoded as it is, ids are taken as they are.
        max_tokens: Longest answer; ``max_completion_length`` if None.

    Raises:
        ConfigurationError: a prompt that leaves no room in the model's context.
    """
    with rollouts.open() as runner:
        context = next(iter(runner.contexts.values()))
        limit = max_tokens or rollouts.config.max_completion_length
        return runner.loop.run(_generate(context, prompts, limit, rollouts.config.seed))


async def _generate(
    context: EpisodeContext, prompts: Sequence[str | list[Message] | list[int]], limit: int, seed: int
) -> list[Generated]:
    call = next(_calls)
    return await gather_or_cancel(
        [
            _answer(context, _prompt_ids(context, prompt), limit, (seed, call, number))
            for number, prompt in enumerate(prompts)
        ]
    )


def _prompt_ids(context: EpisodeContext, prompt: str | list[Message] | list[int]) -> list[int]:
    if isinstance(prompt, str):
        return context.renderer.open_text(prompt)
    chat = [item for item in prompt if isinstance(item, dict)]
    return context.renderer.open(chat, None) if chat else [item for item in prompt if isinstance(item, int)]


async def _answer(context: EpisodeContext, prompt: list[int], limit: int, order: tuple[int, int, int]) -> Generated:
    room = context.limits.max_context - len(prompt)
    if not prompt or room < 1:
        raise ConfigurationError(
            f"a prompt of {len(prompt)} tokens leaves no room for an answer in {context.limits.max_context}; shorten it"
        )
    key = "/".join(map(str, ("generate", *order)))
    session = Session(key=key, group=key, order=order)
    params = replace(context.sampling, max_tokens=min(limit, room), seed=hash63("generate", *order))
    context.sampler.begin(session)
    try:
        completion = await context.sampler.sample(prompt, params, session)
    finally:
        context.sampler.end(session)
    return Generated(
        prompt_ids=prompt,
        completion_ids=list(completion.token_ids),
        logprobs=list(completion.logprobs),
        text=context.renderer.read_text(completion.token_ids).text,
    )
