"""How an environment's questions to the policy are sampled: see ``environments.policy``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from envgrad.environments.tasks import hash63
from envgrad.errors import EnvironmentFailure
from envgrad.rollout.context import EpisodeContext
from envgrad.sampling.sampler import Session
from envgrad.types import Message


@dataclass(slots=True, kw_only=True)
class SessionPolicy:
    """Answers in the session of one episode, which waits for its environment meanwhile.

    A sampler thus never waits for an episode that itself waits for another of its requests. The session's cached row is
    lost to the other chat as far as the two differ.
    """

    context: EpisodeContext
    session: Session
    seed: int
    """equal seeds, chats and weights give equal answers"""
    asked: int = field(init=False, default=0)

    async def __call__(self, messages: Sequence[Message], /, *, max_tokens: int | None = None) -> str:
        context = self.context
        prompt = context.renderer.open([dict(message) for message in messages], None)
        limits = context.limits
        room = min(limits.max_context - len(prompt), limits.max_completion_length)
        room = min([room, *(limit for limit in (max_tokens, limits.max_turn_tokens) if limit is not None)])
        if room <= 0:
            raise EnvironmentFailure(
                f"ask_policy: a chat of {len(prompt)} tokens leaves no room for an answer in a context of "
                f"{limits.max_context} (max_tokens={max_tokens}): show the policy less"
            )
        seed = hash63("asked", self.seed, self.asked)
        self.asked += 1
        params = replace(context.sampling, max_tokens=room, seed=seed)
        completion = await context.sampler.sample(prompt, params, self.session)
        content = context.renderer.read(completion.token_ids, None, turn=0).message.get("content")
        return content if isinstance(content, str) else ""
