"""The records of the local engine: what is asked, the slot that serves it, and what has been counted."""

from __future__ import annotations

import time
from asyncio import AbstractEventLoop, Future
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal, NamedTuple

from envgrad.errors import ConfigurationError
from envgrad.sampling.sampler import Completion, SamplingParams, Session

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One answer in the making. ``tokens`` is the prompt and what has been sampled so far."""

    session: Session
    params: SamplingParams
    tokens: list[int]
    prompt_length: int
    limit: int
    """row length at which the answer is cut"""
    stop_ids: frozenset[int]
    future: Future[Completion] | None = None
    loop: AbstractEventLoop | None = None
    asked: float = field(default_factory=time.perf_counter)
    """seconds, on the clock of ``time.perf_counter``"""
    logprobs: list[float] = field(default_factory=list)
    policy_version: int = 0
    """the policy of the first sampled token"""
    versions: list[int] = field(default_factory=list)
    """each sampled token's policy, where an engine notes it"""
    leader: Request | None = None
    """the sibling whose prefill of the same prompt this request waits for"""
    stop_reason: Literal["stop", "length"] | None = None

    @classmethod
    def of(cls, prompt_ids: Sequence[int], params: SamplingParams, session: Session, max_context: int) -> Request:
        return cls(
            session=session,
            params=params,
            tokens=list(prompt_ids),
            prompt_length=len(prompt_ids),
            limit=min(len(prompt_ids) + params.max_tokens, max_context),
            stop_ids=frozenset(params.stop_token_ids),
        )

    @property
    def group(self) -> str:
        return self.session.group

    @property
    def completion(self) -> Completion:
        if self.stop_reason is None:
            raise AssertionError("the answer is not finished")
        return Completion(
            token_ids=tuple(self.tokens[self.prompt_length :]),
            logprobs=tuple(self.logprobs),
            stop_reason=self.stop_reason,
            policy_version=self.policy_version,
            versions=tuple(self.versions) if len(set(self.versions)) > 1 else None,
        )

    def take(self, token: int, logprob: float, stops: StopStrings | None) -> bool:
        """Append a sampled token; whether the answer is finished."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        stop_strings = self.params.stop_strings
        if token in self.stop_ids or (
            stop_strings and stops is not None and stops.reached(self.tokens[self.prompt_length :], stop_strings)
        ):
            self.stop_reason = "stop"
            return True
        if len(self.tokens) >= self.limit:
            self.stop_reason = "length"
            return True
        return False


class SharedPrefix(NamedTuple):
    """The first ``length`` keys and values of all slots with this ``number`` are the same: copies of each other."""

    number: int
    length: int


@dataclass(slots=True, kw_only=True, eq=False)
class Slot:
    """One row of the KV cache: free (no session), idle (its session is out, in a tool), or busy (``request``).

    A free slot keeps its keys and values until it is taken, for siblings that come late.
    """

    index: int
    session: Session | None = None
    group: str = ""
    request: Request | None = None
    tokens: list[int] = field(default_factory=list)
    """the row; its first ``cached`` tokens have keys and values"""
    cached: int = 0
    prefix: SharedPrefix | None = None
    """what the first of them have been copied from, or to"""
    used: int = 0
    """number of the step that last used it"""
    idle_since: float = 0.0

    @property
    def free(self) -> bool:
        return self.session is None

    @property
    def idle(self) -> bool:
        return self.session is not None and self.request is None

    def common(self, row: Sequence[int]) -> int:
        """How many of the cached tokens are the first tokens of ``row``."""
        return common_prefix(self.tokens, row, min(self.cached, len(row)))


def leads(slot: Slot, request: Request) -> bool:
    """Whether the slot's request is still prefilling the very tokens that ``request`` needs."""
    other = slot.request
    return (
        other is not None
        and other.leader is None
        and slot.cached < len(other.tokens)
        and other.tokens == request.tokens
    )


def least_needed(slot: Slot) -> tuple[int, Sequence[int]]:
    """Sort key: free slots, then idle ones (least recently used first), then busy ones of the latest order."""
    if slot.request is None:
        return (0 if slot.free else 1, (slot.used, slot.index))
    return (2, tuple(-part for part in slot.request.session.order))


def common_prefix(left: Sequence[int], right: Sequence[int], limit: int) -> int:
    """Length of the common prefix, at most ``limit``.

    Example:
        >>> common_prefix([1, 2, 3, 4], [1, 2, 9, 4], 4)
        2
    """
    if left[:limit] == right[:limit]:
        return limit
    low, high = 0, limit
    while low + 1 < high:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


@dataclass(slots=True)
class SamplerStats:
    """Counts since the sampler was made.

    ``prefill_tokens + decode_tokens`` is what the model has forwarded. ``decode_tokens`` were sampled by the request
    that forwards them; everything else is prefill: prompts, suffixes, the last token of an earlier turn.
    """

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    copied_tokens: int = 0
    """tokens whose keys and values were copied from a sibling's slot"""
    recomputed_tokens: int = 0
    """prefill tokens that had been in the cache before their slot was evicted"""
    sampled_tokens: int = 0
    evictions: int = 0
    completions: int = 0
    prefill_seconds: float = 0.0
    """seconds in steps that forwarded some prompt or suffix"""
    decode_seconds: float = 0.0
    """seconds in steps that only decoded"""
    linger_seconds: float = 0.0
    """seconds waited for sessions that were about to come back"""

    @property
    def forwarded_tokens(self) -> int:
        return self.prefill_tokens + self.decode_tokens

    def as_dict(self) -> dict[str, float]:
        return {one.name: getattr(self, one.name) for one in fields(self)}


class StopStrings:
    """Finds stop strings in the decoded tail of an answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def reached(self, answer: Sequence[int], stop_strings: Sequence[str]) -> bool:
        """Whether the last token of ``answer`` completes one of ``stop_strings``.

        Every token stands for at least a byte, so a string of n bytes lies in the last n tokens; a few more give
        tokenizers their context, and strings that end before the last token have been found before.
        """
        longest = max(len(one.encode()) for one in stop_strings)
        text = self._tokenizer.decode(list(answer[-longest - 4 :]), skip_special_tokens=False)
        if not isinstance(text, str):
            raise ConfigurationError(f"the tokenizer decoded a list of ids to {type(text).__name__}, not to a string")
        return any(one in text for one in stop_strings)
