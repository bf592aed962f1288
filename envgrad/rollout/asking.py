"""How an environment's questions to the policy are sampled, and its other parts kept: see ``environments.policy``.

A part's chats become token rows as an episode's do: what was sampled is never encoded again, and a row only grows::

    play_part("b", [user])                    row 0: opening | b0
    play_part("b", [user, b0, user])          row 0: opening | b0 | suffix | b1
    play_part("b", [user: "a new chat"])      row 1: opening'| c0
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isfinite

from envgrad.environments.arguments import clean_text
from envgrad.environments.tasks import hash63
from envgrad.errors import EnvironmentFailure
from envgrad.rollout.context import EpisodeContext
from envgrad.rollout.row import TokenRow
from envgrad.sampling.sampler import Completion, Session
from envgrad.types import Episode, EpisodeRow, Message, Turn


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
    record: PartRecord
    """of this attempt, over its reset and its play"""
    asked: int = field(init=False, default=0)

    async def __call__(self, messages: Sequence[Message], /, *, max_tokens: int | None = None) -> str:
        context = self.context
        prompt = context.renderer.open([dict(message) for message in messages], None)
        room = self._room(len(prompt), 0, max_tokens)
        if room <= 0:
            raise EnvironmentFailure(
                f"ask_policy: a chat of {len(prompt)} tokens leaves no room for an answer in a context of "
                f"{context.limits.max_context} (max_tokens={max_tokens}): show the policy less"
            )
        completion = await self._sample(prompt, room)
        content = context.renderer.read(completion.token_ids, None, turn=0).message.get("content")
        return content if isinstance(content, str) else ""

    async def play(self, part: str, messages: Sequence[Message], max_tokens: int | None) -> str | None:
        """``policy.Parts.play``."""
        if not part:
            raise EnvironmentFailure(f"play_part: part={part!r} must be a name, such as 'seat_1'")
        move = self.record.find(part, messages, self.context)
        row = move.chat.row
        room = self._room(len(row) + len(move.suffix), row.completion_length + len(move.suffix), max_tokens)
        if room <= 0:
            return None
        began, move.chat.busy = time.perf_counter(), True
        try:
            completion = await self._sample([*row.token_ids, *move.suffix], room)
        finally:
            move.chat.busy = False
        return self.record.add(part, move, completion, self.context, time.perf_counter() - began)

    def reward(self, part: str, reward: float | None) -> None:
        """``policy.Parts.reward``."""
        self.record.reward(part, reward)

    def forget(self, part: str) -> None:
        """``policy.Parts.forget``."""
        self.record.chats.pop(part, None)
        self.record.rewards.pop(part, None)

    def _room(self, held: int, spent: int, max_tokens: int | None) -> int:
        """Tokens that an answer may have behind ``held``, of which ``spent`` count as completion."""
        limits = self.context.limits
        room = min(limits.max_context - held, limits.max_completion_length - spent)
        return min([room, *(limit for limit in (max_tokens, limits.max_turn_tokens) if limit is not None)])

    async def _sample(self, prompt: Sequence[int], room: int) -> Completion:
        seed = hash63("asked", self.seed, self.asked)
        self.asked += 1
        params = replace(self.context.sampling, max_tokens=room, seed=seed)
        return await self.context.sampler.sample(prompt, params, self.session)


@dataclass(slots=True, eq=False)
class _Chat:
    """A chat of a part's, and its row."""

    messages: list[Message]
    row: TokenRow
    turns: list[Turn] = field(default_factory=list)
    turn_ids: tuple[int, ...] = ()
    """the last answer as it was sampled"""
    busy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """What a call adds to a chat; taken over once it is answered."""

    chat: _Chat
    added: tuple[Message, ...]
    suffix: tuple[int, ...]


@dataclass(slots=True)
class PartRecord:
    """What the policy's other parts said in one attempt of one sibling, and what they earned."""

    chats: dict[str, list[_Chat]] = field(default_factory=dict)
    rewards: dict[str, float | None] = field(default_factory=dict)

    def find(self, part: str, messages: Sequence[Message], context: EpisodeContext) -> _Move:
        """The part's last chat and what ``messages`` add to it; else a chat that they begin."""
        given = tuple({"role": one["role"], "content": clean_text(one["content"])} for one in messages)
        last = self.chats[part][-1] if self.chats.get(part) else None
        if last is not None and not last.busy:
            known = len(last.messages)
            added = given[known:]
            if list(given[:known]) == last.messages and added and all(one["role"] == "user" for one in added):
                suffix = tuple(context.renderer.suffix(last.turn_ids, added, None))
                return _Move(chat=last, added=added, suffix=suffix)
        row = TokenRow(context.renderer.open(given, None))
        return _Move(chat=_Chat([*given], row), added=(), suffix=())

    def add(self, part: str, move: _Move, completion: Completion, context: EpisodeContext, seconds: float) -> str:
        """Append a sampled answer to its row; the answer's text."""
        chat, chats = move.chat, self.chats.setdefault(part, [])
        if not chat.turns:
            chats.append(chat)
        if move.added:
            said = "\n".join(str(one["content"]) for one in move.added)
            chat.turns[-1] = replace(chat.turns[-1], observation=said)
        chat.messages += move.added
        chat.row.add_given(move.suffix)
        start = len(chat.row)
        chat.row.add_sampled(
            completion.token_ids,
            completion.logprobs,
            version=completion.policy_version,
            versions=completion.versions,
        )
        number = sum(message["role"] == "assistant" for message in chat.messages)
        read = context.renderer.read(completion.token_ids, None, turn=number)
        content = read.message.get("content")
        text = content if isinstance(content, str) else ""
        chat.turns.append(
            Turn(
                start=start,
                num_tokens=len(completion.token_ids),
                policy_version=completion.policy_version,
                message=read.message,
                text=read.text,
                sample_seconds=seconds,
            )
        )
        chat.messages.append({"role": "assistant", "content": text})
        chat.turn_ids = completion.token_ids
        return text

    def reward(self, part: str, reward: float | None) -> None:
        """
        Raises:
            EnvironmentFailure: the part has not played, or the reward is not finite.
        """
        if part not in self.chats:
            played = ", ".join(self.chats) or "none"
            raise EnvironmentFailure(f"reward_part: the part {part!r} has not played; those that have: {played}")
        if reward is not None and not isfinite(reward):
            raise EnvironmentFailure(f"reward_part: {part!r} earned {reward}; a reward is finite, or None")
        self.rewards[part] = None if reward is None else float(reward)

    def episodes(self, agent: Episode, context: EpisodeContext) -> tuple[Episode, ...]:
        """The parts as episodes beside the agent's: of the same task and sibling, and ended as it ended."""
        name = context.spec.name
        weight = context.reward_weights.of(name)
        found = []
        for part, chats in self.chats.items():
            reward = self.rewards.get(part)
            weighted = None if reward is None else weight * reward
            found.append(replace(_episode(agent, part, chats), reward=weighted, rewards={name: reward}))
        return tuple(found)


def _episode(agent: Episode, part: str, chats: Sequence[_Chat]) -> Episode:
    """The last chat is the main row, as where an agent owns the loop."""
    ranked = [chats[-1], *chats[:-1]]
    main, *branches = (
        EpisodeRow(
            token_ids=tuple(chat.row.token_ids),
            mask=tuple(chat.row.mask),
            logprobs=tuple(chat.row.logprobs),
            versions=tuple(chat.row.versions),
            prompt_length=chat.row.prompt_length,
        )
        for chat in ranked
    )
    turns = [
        replace(turn, row=ranked.index(chat)) for chat in chats for turn in chat.turns
    ]  # chats of one part follow one another
    return Episode(
        task=agent.task,
        sibling=agent.sibling,
        attempt=agent.attempt,
        token_ids=main.token_ids,
        mask=main.mask,
        logprobs=main.logprobs,
        versions=main.versions,
        prompt_length=main.prompt_length,
        messages=tuple(chats[-1].messages),
        turns=tuple(turns),
        stop_reason=agent.stop_reason,
        reward=None,
        branches=tuple(branches),
        part=part,
    )
