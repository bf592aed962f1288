"""How the siblings of one group are started: alike, each with its own view of the global random generators.

Consumes a task; produces ``EpisodeStart``s, and the first difference between them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from envgrad.environments.boundary import Ok, Outcome, Raised, call_user, guard
from envgrad.environments.isolation import Stream, loaded_generators, use
from envgrad.environments.pool import InstancePool
from envgrad.environments.sources import hash63
from envgrad.environments.start import SiblingStart, start_difference, told_state
from envgrad.errors import EnvironmentContractError, EpisodeFailure, ResetTimeout
from envgrad.rollout.context import EpisodeContext, value_or_failure
from envgrad.rollout.opening import EpisodeStart, Opening, start
from envgrad.types import Task


@dataclass(slots=True)
class Starter:
    """Starts instances of one group."""

    context: EpisodeContext
    pool: InstancePool
    task: Task
    opening: Opening | None = None
    """the first sibling's: equal ones are not rendered again"""
    pristine: EpisodeStart | None = None
    """a fork that is never played, for retries"""

    async def fresh(self) -> EpisodeStart:
        """An instance of the pool, reset to the task.

        An environment's first start shows whether it draws from the global generators; others wait for it.

        Raises:
            EpisodeFailure: there is no instance, or it cannot be reset; it is closed then.
        """
        isolation = self.context.isolation
        if isolation.settled:
            return await self._start(isolation.stream(self._seed))
        if isolation.probing is not None:
            await isolation.probing.wait()
            # A first start that failed has shown nothing: then each looks for itself.
            return await (self._start(isolation.stream(self._seed)) if isolation.settled else self._probe())
        isolation.probing = probing = asyncio.Event()
        try:
            return await self._probe()
        finally:
            isolation.probing = None
            probing.set()

    @property
    def _seed(self) -> int:
        """Of the group's streams: retries and siblings begin with the same numbers."""
        return hash63("generators", self.task.seed)

    async def _probe(self) -> EpisodeStart:
        """Start with a stream swapped in, and see what is drawn from it. The start is good whatever is found."""
        spec, isolation, known = self.context.spec, self.context.isolation, loaded_generators()
        if not isolation.settled:
            # No more than a hint: the factory's first call may only have imported something that draws.
            isolation.draws_at_birth = bool(spec.factory_draws)
        stream = Stream(self._seed)
        begin: EpisodeStart | None = None
        try:
            begin = await self._start(stream)
            while loaded_generators() - known:  # it was the first to import numpy, say: nobody saw what it drew
                known, stream = loaded_generators(), Stream(self._seed)
                again, begin = begin, None
                await self.pool.discard(again.instance)
                begin = await self._start(stream)
        finally:
            if begin is not None or stream.drawn():
                isolation.settle(stream.drawn(), spec.name)
        begin.stream = stream.copy(isolation.names) if isolation.active else None
        return begin

    async def _start(self, stream: Stream | None) -> EpisodeStart:
        instance = await self._acquire(stream)
        begin: EpisodeStart | None = None
        try:
            with use(stream):
                begin = await start(self.context, instance, self.task, self.opening)
        finally:
            if begin is None:
                await self.pool.discard(instance)
        begin.stream = stream
        return begin

    async def _acquire(self, stream: Stream | None) -> object:
        """An instance of the pool; a new one, built with ``stream``, if the factory draws."""
        isolation = self.context.isolation
        if stream is None or not isolation.draws_at_birth:
            return await self.pool.acquire()
        await self.pool.close_free()
        with use(stream):
            instance = await self.pool.acquire()
        if not isolation.settled:
            isolation.draws_at_birth = bool(stream.drawn())
        return instance

    async def fork(self, begin: EpisodeStart) -> EpisodeStart:
        """A new instance in the state of ``begin``, from which the pool closes it.

        Raises:
            EnvironmentFailure: ``fork()`` raised or took too long.
        """
        stream = None if begin.stream is None else begin.stream.copy()
        with use(stream):
            copy = await self.pool.fork(begin.instance, timeout=self.context.limits.reset_timeout)
        return EpisodeStart(instance=copy, opening=begin.opening, stream=stream)

    async def end(self, begin: EpisodeStart) -> None:
        """Give an instance back, or close it if it cannot be reset to another task."""
        isolation = self.context.isolation
        # Forked instances are not reset again: another group is forked from its own.
        if begin.usable and self.pristine is None and not isolation.draws_at_birth:
            self.pool.release(begin.instance)
        else:
            await self.pool.discard(begin.instance)

    async def end_pristine(self) -> None:
        pristine, self.pristine = self.pristine, None
        if pristine is not None:
            await self.pool.discard(pristine.instance)


async def start_states(context: EpisodeContext, begun: Sequence[EpisodeStart]) -> list[Ok | EpisodeFailure]:
    """What stands for each sibling's state right after its reset, or why that cannot be told.

    ``start_state()`` is asked on a copy of the sibling's stream: to look at a start does not change it.

    Raises:
        EnvironmentContractError: ``start_state`` is async.
    """
    if not context.spec.has_start_state:
        return [Ok(begin.instance, 0.0) for begin in begun]
    found: list[Ok | EpisodeFailure] = []
    while len(found) < len(begun):
        late = [one for one in found if isinstance(one, ResetTimeout)]
        if len(late) > 1:  # what they need does not answer: the others would wait for it as long, one by one
            return found + [late[-1]] * (len(begun) - len(found))
        left = begun[len(found) :]
        found += await _next_states(context, left if left[0].stream is None else left[:1])
    return found


async def _next_states(context: EpisodeContext, begun: Sequence[EpisodeStart]) -> list[Ok | EpisodeFailure]:
    """Those of ``begun`` in one call, up to the first that takes too long."""
    spec, timeout = context.spec, context.limits.reset_timeout
    where, stream = f"{spec.name}.start_state", begun[0].stream
    told: list[Outcome] = []
    given_up = threading.Event()

    def tell() -> None:
        for begin in begun:
            if not given_up.is_set():  # else others are asked elsewhere
                told.append(guard(told_state, begin.instance, spec))

    with use(None if stream is None else stream.copy()):
        try:
            outcome = await call_user(where, tell, workers=context.workers, timeout=timeout)
        finally:
            given_up.set()
    outcomes = list(told)
    if not isinstance(outcome, Ok):
        outcomes = [*outcomes[: len(begun) - 1], outcome]
    return [_state_or_failure(one, where, timeout) for one in outcomes]


def _state_or_failure(outcome: Outcome, where: str, timeout: float | None) -> Ok | EpisodeFailure:
    if isinstance(outcome, Raised) and isinstance(outcome.error, EnvironmentContractError):
        raise outcome.error
    try:
        return Ok(value_or_failure(outcome, where, ResetTimeout, timeout), outcome.seconds)
    except EpisodeFailure as failure:
        return failure


def find_mismatch(context: EpisodeContext, begun: Sequence[EpisodeStart], states: Sequence[object]) -> str | None:
    """Where a sibling's start differs first from the first sibling's: see ``environments.start``; None if none does."""
    starts = [
        SiblingStart(
            messages=begin.opening.messages,
            tools=begin.opening.schemas or (),
            state=state,
            state_path="start_state()" if context.spec.has_start_state else "",
            stream=begin.stream,
        )
        for begin, state in zip(begun, states, strict=True)
    ]
    return next((found for other in starts[1:] if (found := start_difference(starts[0], other))), None)
