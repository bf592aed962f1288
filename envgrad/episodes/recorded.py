"""A recorded episode in the place of a model: the rollout's own code plays it, so that a replay follows its rules.

Token ids mean nothing here: each answer is one token, and what it says is read from the record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from envgrad.chat.tool_calls import SampledTurn
from envgrad.episodes.records import EpisodeRecord, TurnRecord
from envgrad.errors import EnvironmentFailure
from envgrad.rollout.actor import Actor
from envgrad.sampling.sampler import Completion, SamplingParams, Session
from envgrad.types import Message, StopReason, ToolCall

if TYPE_CHECKING:
    from envgrad.chat.template import ToolSchemas

ROOM = 1 << 12
"""tokens of a replayed episode, of which each turn takes two"""
OF_TOKENS = (StopReason.MAX_COMPLETION_LENGTH, StopReason.MAX_TURN_TOKENS, StopReason.CONTEXT)


class Tape(Actor):
    """The recorded answers, in order."""

    def __init__(self, record: EpisodeRecord) -> None:
        self._record = record
        self._played = 0
        self.ran_out = False
        """the environment wanted another answer than were recorded"""
        self.results: list[list[str]] = []
        """what the environment answered so far, turn by turn"""

    @property
    def max_context(self) -> int:
        return self.room

    @property
    def room(self) -> int:
        """Tokens for the whole episode; more than the answers take."""
        return max(ROOM, 4 * len(self._record.turns) + 8)

    # -- as a sampler

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams, session: Session) -> Completion:
        """The next recorded answer; behind the last one, an empty answer that ends the episode."""
        if self._played == len(self._record.turns):
            self.ran_out = True
            return Completion(token_ids=(0,), logprobs=(0.0,), stop_reason="length", policy_version=0)
        turn = self._record.turns[self._played]
        self._played += 1
        return Completion(
            token_ids=(0,),
            logprobs=(0.0,),
            stop_reason="length" if self._was_cut(turn) else "stop",
            policy_version=turn.policy_version,
        )

    def _was_cut(self, turn: TurnRecord) -> bool:
        """Whether the answer itself was cut off by a limit, so that the environment never saw it."""
        is_last = self._played == len(self._record.turns)
        unseen = not turn.calls and turn.observation is None
        return is_last and unseen and self._record.summary.stop_reason in OF_TOKENS

    # -- as a renderer

    def open(self, messages: Sequence[Message], tools: ToolSchemas) -> list[int]:
        """One token."""
        return [0]

    def open_text(self, text: str) -> list[int]:
        """One token."""
        return [0]

    def suffix(self, turn_ids: Sequence[int], results: Sequence[Message], tools: ToolSchemas) -> list[int]:
        """One token; more than there is room for, where the recorded results were too long."""
        self.results.append([str(message.get("content")) for message in results])
        over = self._played == len(self._record.turns) and self._record.summary.stop_reason in OF_TOKENS
        return [0] * (self.room if over else 1)

    def read(self, token_ids: Sequence[int], tools: ToolSchemas, *, turn: int = 0) -> SampledTurn:
        """The recorded turn."""
        if turn >= len(self._record.turns):
            return SampledTurn(message={"role": "assistant", "content": ""}, calls=(), text="")
        recorded = self._record.turns[turn]
        return SampledTurn(message=dict(recorded.message), calls=self._calls(recorded), text=recorded.text)

    def read_text(self, token_ids: Sequence[int]) -> SampledTurn:
        """The recorded turn behind plain text."""
        return self.read(token_ids, None, turn=len(self._record.turns) if self.ran_out else self._played - 1)

    def _calls(self, turn: TurnRecord) -> tuple[ToolCall, ...]:
        """What was called, then what the episode's end left uncalled."""
        ran = [ToolCall(id=call.id, name=call.name, arguments=call.arguments, error=call.error) for call in turn.calls]
        known = {call.id for call in ran}
        for call in turn.message.get("tool_calls") or ():
            function = call.get("function", call)
            if call.get("id") not in known:
                ran.append(ToolCall(id=str(call.get("id")), name=function.get("name"), arguments=function["arguments"]))
        if not ran and turn is self._record.turns[-1] and self._record.summary.stop_reason == StopReason.MAX_TURNS:
            ran.append(ToolCall(id="unread", name=None, arguments=None, error="it could not be read"))
        return tuple(ran)


class RecordedPolicy:
    """Answers the environment's questions to the policy: parts from their records; other answers were not recorded."""

    def __init__(self, parts: Mapping[str, EpisodeRecord]) -> None:
        self._answers = {name: iter(record.turns) for name, record in parts.items()}
        self.asked_unrecorded = False

    async def __call__(self, messages: Sequence[Message], /, *, max_tokens: int | None = None) -> str:
        """
        Raises:
            EnvironmentFailure: always.
        """
        self.asked_unrecorded = True
        raise EnvironmentFailure("ask_policy: its answers are not recorded, so this episode cannot be replayed")

    async def play(self, part: str, messages: Sequence[Message], max_tokens: int | None) -> str | None:
        """The part's next recorded answer; None where it has none, as where there was no room for one."""
        turn = next(self._answers.get(part, iter(())), None)
        content = None if turn is None else turn.message.get("content")
        return content if isinstance(content, str) else None

    def reward(self, part: str, reward: float | None) -> None:
        """Parts are not scored again."""

    def forget(self, part: str) -> None:
        """What was forgotten is not in the record."""
