"""A sampler that plays given answers: for tests, docs and checks of an environment. Imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

from envgrad.errors import ConfigurationError, SamplerFailure
from envgrad.sampling.sampler import Completion, SamplingParams, Session
from envgrad.sampling.sessions import OpenSessions

if TYPE_CHECKING:
    from torch import Tensor

Answer: TypeAlias = Sequence[int] | tuple[Sequence[int], Sequence[float]]
"""Token ids, or ``(token ids, log-probs)``; without log-probs each token gets 0.0 (certain)."""

AnswerFunction: TypeAlias = Callable[[Sequence[int], SamplingParams, Session], Answer]
"""``(prompt_ids, params, session) -> answer``"""

Script: TypeAlias = Sequence[Answer] | Mapping[str, Sequence[Answer]] | AnswerFunction
"""One answer per turn, played by every session; the same by ``session.key``; or a function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedRequest:
    """A request as it arrived, with its number (0, 1, ...) in its session."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    session: Session
    turn: int


class ScriptedSampler:
    """Plays a script. ``requests`` keeps what was asked, ``open_sessions`` who has begun and not ended.

    An answer is cut to ``params.max_tokens`` (``stop_reason`` is then ``length``), as a model's would be. ``latency``
    is in seconds, or a function of the session.

    Raises:
        ConfigurationError: the script is too short, or an answer goes on after a stop token, is empty, or has log-probs
            of another length.

    Example:
        >>> import asyncio
        >>> sampler = ScriptedSampler([[5, 6, 2], ([7, 2], [-0.1, -0.2])])
        >>> session = Session(key="train/0/0", group="train/0", order=(0, 0, 0))
        >>> sampler.begin(session)
        >>> params = SamplingParams(max_tokens=8, stop_token_ids=(2,))
        >>> asyncio.run(sampler.sample([1], params, session)).token_ids
        (5, 6, 2)
        >>> asyncio.run(sampler.sample([1, 5, 6, 2, 9], params, session)).logprobs
        (-0.1, -0.2)
        >>> sampler.end(session)
    """

    def __init__(
        self, script: Script, *, max_context: int = 1 << 20, latency: float | Callable[[Session], float] = 0.0
    ) -> None:
        self._script = script
        self._max_context = max_context
        self._latency = latency
        self._version = 0
        self._sessions = OpenSessions()
        self._turns: dict[str, int] = {}
        self._closed = False
        self.requests: list[ScriptedRequest] = []

    @property
    def open_sessions(self) -> frozenset[str]:
        return self._sessions.keys

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def exact_logprobs(self) -> bool:
        return True

    @property
    def max_context(self) -> int:
        return self._max_context

    def begin(self, session: Session) -> None:
        self._sessions.begin(session)
        self._turns[session.key] = 0

    def end(self, session: Session) -> None:
        self._sessions.end(session)
        self._turns.pop(session.key, None)

    def update_weights(self, version: int, named_tensors: Mapping[str, Tensor] | None) -> None:
        self._version = version

    def close(self) -> None:
        self._closed = True

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams, session: Session) -> Completion:
        if self._closed:
            raise SamplerFailure("the sampler is closed")
        self._sessions.check(session)
        room = self._max_context - len(prompt_ids)
        if room < 1:
            raise SamplerFailure(
                f"a prompt of {len(prompt_ids)} tokens leaves no room in a context of {self.max_context}"
            )
        turn = self._turns[session.key]
        self._turns[session.key] += 1
        version = self._version
        self.requests.append(ScriptedRequest(prompt_ids=tuple(prompt_ids), params=params, session=session, turn=turn))
        ids, logprobs = self._answer(prompt_ids, params, session, turn)
        await asyncio.sleep(self._latency(session) if callable(self._latency) else self._latency)
        limit = min(params.max_tokens, room)
        stopped = len(ids) < limit or (len(ids) == limit and ids[-1] in params.stop_token_ids)
        return Completion(
            token_ids=ids[:limit],
            logprobs=logprobs[:limit],
            stop_reason="stop" if stopped else "length",
            policy_version=version,
        )

    def _answer(
        self, prompt_ids: Sequence[int], params: SamplingParams, session: Session, turn: int
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        where = f"answer {turn} of session {session.key!r}"
        if callable(self._script):
            answer = self._script(prompt_ids, params, session)
        else:
            turns = self._script[session.key] if isinstance(self._script, Mapping) else self._script
            if turn >= len(turns):
                raise ConfigurationError(
                    f"{where} was asked for, but the script has {len(turns)}; add the missing ones"
                )
            answer = turns[turn]
        if isinstance(answer, tuple) and len(answer) == 2 and not isinstance(answer[0], int):
            ids, logprobs = tuple(answer[0]), tuple(answer[1])
        else:
            ids = tuple(cast("Sequence[int]", answer))
            logprobs = (0.0,) * len(ids)
        if not ids or len(ids) != len(logprobs):
            raise ConfigurationError(
                f"{where} has {len(ids)} token ids and {len(logprobs)} log-probs; give one log-prob per id"
            )
        stray = [index for index, token in enumerate(ids[:-1]) if token in params.stop_token_ids]
        if stray:
            raise ConfigurationError(
                f"{where} goes on after stop token {ids[stray[0]]} at index {stray[0]}; end it there, as a model does"
            )
        return ids, logprobs
