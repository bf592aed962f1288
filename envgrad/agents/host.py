"""Plays episodes whose agent owns the loop: a server on the loopback interface, one base URL for each episode.

Consumes a started instance, produces an ``Episode``; waits for the instance's ``run_agent``. The server runs on the
rollouts' loop, starts with the first episode, and ends with the loop.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from envgrad.agents.endpoint import AgentEndpoint, AgentTimeLimit
from envgrad.agents.recorder import Recorder
from envgrad.agents.server import Server, check_installed
from envgrad.agents.wire import ApiError, ChatRequest, Reply
from envgrad.environments.boundary import Ok, Outcome, Raised, TimedOut, call_user
from envgrad.environments.isolation import use
from envgrad.errors import EnvironmentFailure, EpisodeFailure
from envgrad.rollout.context import EpisodeContext
from envgrad.rollout.episode import score
from envgrad.rollout.feedback import read_feedback
from envgrad.rollout.opening import EpisodeStart
from envgrad.types import Episode, StopReason, Task


@dataclass(slots=True, eq=False)
class _Door:
    """An episode's way in: its key, its recorder, and the calls that are being answered."""

    key: str
    recorder: Recorder
    calls: set[asyncio.Task[Reply]] = field(default_factory=set)
    fault: BaseException | None = None
    """an error of ours while a call was answered: it ends the run"""


class LoopbackHost:
    """The ``AgentHost`` of a trainer.

    Args:
        address: The interface to listen on.

    Raises:
        ConfigurationError: starlette or uvicorn is not installed.
    """

    def __init__(self, address: str = "127.0.0.1") -> None:
        check_installed()
        self._server = Server(self, address)
        self._doors: dict[str, _Door] = {}

    async def play(
        self, context: EpisodeContext, begin: EpisodeStart, task: Task, sibling: int, attempt: int
    ) -> Episode:
        """Let the agent play a started instance, and score it. Its session must have begun at the sampler.

        Raises:
            EpisodeFailure: the agent raised, the environment failed, or the sampler could not answer.
        """
        base = await self._server.start()
        recorder = Recorder(context, begin.opening, task, sibling, attempt)
        name, door = secrets.token_hex(8), _Door(secrets.token_urlsafe(24), recorder)
        endpoint = AgentEndpoint(
            base_url=f"{base}/episodes/{name}/v1", api_key=door.key, messages=begin.opening.messages
        )
        self._doors[name] = door
        began = time.perf_counter()
        try:
            with use(None):  # an agent runs for long: it cannot hold the process's random generators meanwhile
                stop = await self._run(context, begin, recorder, endpoint)
        finally:
            del self._doors[name]
            await _shut(door)
        if door.fault is not None:
            raise door.fault
        context.sampler.end(recorder.session)
        seconds = time.perf_counter() - began
        return await self._episode(begin, recorder, stop, seconds)

    async def _run(
        self, context: EpisodeContext, begin: EpisodeStart, recorder: Recorder, endpoint: AgentEndpoint
    ) -> StopReason:
        where, timeout = f"{context.spec.name or 'environment'}.run_agent", context.limits.episode_timeout
        run_agent: Callable[..., object] = begin.instance.run_agent  # type: ignore[attr-defined]
        with context.activity.during("tools"):
            outcome: Outcome = await call_user(where, run_agent, endpoint, workers=context.workers, timeout=timeout)
        if recorder.failure is not None:
            raise recorder.failure
        match outcome:
            case Ok():
                return recorder.stop_reason()
            case TimedOut(killable=killable):
                begin.usable &= killable
                return StopReason.EPISODE_TIMEOUT
            case Raised(error=AgentTimeLimit()):
                return StopReason.EPISODE_TIMEOUT
            case Raised(error=EpisodeFailure() as failure):
                raise failure
            case Raised(error=error):
                # Told that a limit is reached, many agents can only give up: the limit ended the episode, not they.
                if recorder.stop is not None:
                    return recorder.stop
                raise EnvironmentFailure(f"{where} raised {type(error).__name__}: {error}") from error

    async def _episode(self, begin: EpisodeStart, recorder: Recorder, stop: StopReason, seconds: float) -> Episode:
        context, task = recorder.context, recorder.task
        turns, (main, *branches) = recorder.turns(), recorder.rows()
        with context.activity.during("reward"):
            reward, rewards = await score(context, begin, turns)
            feedback = await read_feedback(context, begin, task)
        return Episode(
            task=task,
            sibling=recorder.sibling,
            attempt=recorder.attempt,
            token_ids=main.token_ids,
            mask=main.mask,
            logprobs=main.logprobs,
            versions=main.versions,
            prompt_length=main.prompt_length,
            messages=recorder.messages(),
            turns=turns,
            stop_reason=stop,
            reward=reward,
            rewards=rewards,
            feedback=feedback,
            tools=recorder.tools(),
            branches=tuple(branches),
            seconds={
                "reset": begin.reset_seconds,
                "sample": recorder.sample_seconds,
                "tools": max(0.0, seconds - recorder.sample_seconds),
            },
        )

    # -- the server's side

    def admit(self, name: str, key: str) -> _Door:
        """The episode that a request may speak to.

        Raises:
            ApiError: 404 for an episode that is not played (any more), 401 for a wrong key.
        """
        door = self._doors.get(name)
        if door is None:
            raise ApiError(404, "no such episode is being played: it is over, or the URL is wrong", code="not_found")
        if not hmac.compare_digest(key.encode(), door.key.encode()):
            raise ApiError(401, "the key is not this episode's; use the api_key that came with base_url", code="key")
        return door

    def begin_answer(self, door: _Door, request: ChatRequest) -> asyncio.Task[Reply]:
        """Start to answer one call. Whoever waits for it may cancel it: then nothing is recorded."""
        call = asyncio.ensure_future(door.recorder.answer(request))
        door.calls.add(call)
        call.add_done_callback(lambda done: _ended(door, done))
        return call


def _ended(door: _Door, call: asyncio.Task[Reply]) -> None:
    door.calls.discard(call)
    error = None if call.cancelled() else call.exception()
    if error is not None and not isinstance(error, ApiError):
        door.fault = error


async def _shut(door: _Door) -> None:
    """Answer no more calls, and wait until those under way have let go of the sampler."""
    calls = list(door.calls)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    door.recorder.close()
