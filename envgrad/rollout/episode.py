"""One episode: prompts the sampler, runs its tool calls or ``step``, and scores the result.

Consumes a started instance (``opening.start``), produces an ``Episode``; raises ``EpisodeFailure`` if the environment
failed.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from envgrad.chat.renderer import SampledTurn
from envgrad.environments.arguments import clean_text
from envgrad.environments.boundary import Ok, Outcome, Raised, TimedOut, call_user, guard, is_async
from envgrad.environments.contract import ToolResult, read_reward, read_step
from envgrad.environments.tasks import hash63
from envgrad.environments.tools import ToolSpec, check_arguments, find_tool, result_text
from envgrad.errors import EnvironmentFailure, EpisodeDone, EpisodeFailure, RewardTimeout, ToolCallError
from envgrad.rollout.context import EpisodeContext, value_or_failure
from envgrad.rollout.feedback import read_feedback, show_chat
from envgrad.rollout.opening import EpisodeStart
from envgrad.rollout.row import TokenRow
from envgrad.rollout.scoring import add_component
from envgrad.sampling.sampler import Session
from envgrad.types import Episode, Message, StopReason, Task, ToolCall, ToolOutcome, Turn


def session_of(task: Task, sibling: int, attempt: int) -> Session:
    """The sampler's view of one attempt of one sibling."""
    return Session(
        key=f"{task.key}/{sibling}/{attempt}",
        group=f"{task.key}/{task.group_id}",
        order=(task.position, sibling, attempt),
    )


async def play(context: EpisodeContext, begin: EpisodeStart, task: Task, sibling: int, attempt: int) -> Episode:
    """Play a started instance to its end and score it. Its session must have begun at the sampler.

    Raises:
        EpisodeFailure: the environment failed, or the sampler could not answer.
    """
    if context.spec.runs_agent:
        if context.agents is None:
            raise AssertionError(f"{context.spec.label} has run_agent, and its context has no host for agents")
        return await context.agents.play(context, begin, task, sibling, attempt)
    player = _Player(context, begin, task, sibling, attempt)
    stop = await player.play()
    context.sampler.end(player.session)
    with context.activity.during("reward"):
        await show_chat(context, begin, player.messages)
        reward, rewards = await score(context, begin, player.turns)
        feedback = await read_feedback(context, begin, task)
    return replace(player.episode(stop, reward, rewards), feedback=feedback)


async def score(
    context: EpisodeContext, begin: EpisodeStart, turns: Sequence[Turn]
) -> tuple[float | None, dict[str, float | None]]:
    """The episode's reward (turn rewards plus ``get_reward``) and its named components; None is unscorable.

    An environment that only pays for turns scores 0 where it paid for none.

    Raises:
        EpisodeFailure: ``get_reward`` raised, took too long, or returned what is no reward.
    """
    spec, limits = context.spec, context.limits
    given = [turn.reward for turn in turns if turn.reward is not None]
    rewards: dict[str, float | None] = {"turns": sum(given)} if given else {}
    if not begin.usable:
        return None, rewards
    if spec.has_get_reward:
        where = f"{spec.name}.get_reward"
        get_reward: Callable[..., object] = begin.instance.get_reward  # type: ignore[attr-defined]
        outcome = await call_user(where, get_reward, workers=context.workers, timeout=limits.reward_timeout)
        value = read_reward(value_or_failure(outcome, where, RewardTimeout, limits.reward_timeout), where)
        if value is None:
            return None, rewards | {spec.name: None}
        for name, component in (value if isinstance(value, dict) else {spec.name: value}).items():
            rewards = add_component(rewards, name, component)
    elif spec.has_group_reward and not given:
        return None, rewards
    scored = [value for value in rewards.values() if value is not None]
    return (sum(scored) if scored or not rewards else None), rewards


@dataclass(slots=True)
class _Player:
    """One episode in play."""

    context: EpisodeContext
    begin: EpisodeStart
    task: Task
    sibling: int
    attempt: int
    session: Session = field(init=False)
    row: TokenRow = field(init=False)
    messages: list[Message] = field(init=False)
    turns: list[Turn] = field(init=False)
    deadline: float | None = field(init=False)
    done: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        opening = self.begin.opening
        self.session = session_of(self.task, self.sibling, self.attempt)
        self.row = TokenRow(opening.prompt_ids)
        self.messages = list(opening.messages)
        self.turns = []
        timeout = self.context.limits.episode_timeout
        self.deadline = None if timeout is None else time.monotonic() + timeout

    async def play(self) -> StopReason:
        """Turn after turn until something ends the episode."""
        while True:
            stop = await self._turn()
            if stop is not None:
                return stop

    async def _turn(self) -> StopReason | None:
        limits, renderer, schemas = self.context.limits, self.context.renderer, self.begin.opening.schemas
        budget, limit = self._budget()
        if budget <= 0:
            return limit
        began = time.perf_counter()
        params = replace(self.context.sampling, max_tokens=budget, seed=self._seed())
        try:
            with self.context.activity.during("sample"):
                async with asyncio.timeout(self._remaining()):
                    completion = await self.context.sampler.sample(self.row.token_ids, params, self.session)
        except TimeoutError:
            return StopReason.EPISODE_TIMEOUT
        index, start_index = len(self.turns), len(self.row)
        self.row.add_sampled(
            completion.token_ids,
            completion.logprobs,
            version=completion.policy_version,
            versions=completion.versions,
        )
        if self.begin.opening.plain_prompt is not None:
            read = renderer.read_text(completion.token_ids)
        else:
            read = renderer.read(completion.token_ids, schemas, turn=index)
        self.messages.append(read.message)
        turn = Turn(
            start=start_index,
            num_tokens=len(completion.token_ids),
            policy_version=completion.policy_version,
            message=read.message,
            text=read.text,
            sample_seconds=time.perf_counter() - began,
        )
        self.turns.append(turn)
        if completion.stop_reason == "length":
            return limit
        last = limits.max_turns is not None and index + 1 >= limits.max_turns
        with self.context.activity.during("tools"):
            stop = await (self._step(read, last) if self.context.spec.step_protocol else self._call_tools(read, last))
        if stop is not None:
            return stop
        return self._append_results(completion.token_ids)

    def _budget(self) -> tuple[int, StopReason]:
        """Tokens the next turn may have, and which limit says so."""
        limits = self.context.limits
        options = [
            (limits.max_completion_length - self.row.completion_length, StopReason.MAX_COMPLETION_LENGTH),
            (limits.max_context - len(self.row), StopReason.CONTEXT),
        ]
        if limits.max_turn_tokens is not None:
            options.append((limits.max_turn_tokens, StopReason.MAX_TURN_TOKENS))
        return min(options, key=lambda option: option[0])

    def _seed(self) -> int:
        return hash63("sample", self.task.seed, self.sibling, self.attempt, len(self.turns))

    def _remaining(self) -> float | None:
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    async def _call_tools(self, read: SampledTurn, last: bool) -> StopReason | None:
        if not read.calls or not self.begin.opening.tools:
            return StopReason.ANSWER
        if last:
            return StopReason.MAX_TURNS
        began = time.perf_counter()
        outcomes: list[ToolOutcome] = []
        stop: StopReason | None = None
        for call in read.calls:
            outcome, stop = await self._call_tool(call)
            outcomes.append(outcome)
            self.messages.append(
                {"role": "tool", "tool_call_id": call.id, "name": call.name or "", "content": outcome.content}
            )
            if stop is not None:
                break
        paid = [outcome.reward for outcome in outcomes if outcome.reward is not None]
        self.turns[-1] = replace(
            self.turns[-1],
            outcomes=tuple(outcomes),
            reward=sum(paid) if paid else None,
            tool_seconds=time.perf_counter() - began,
        )
        return stop

    async def _call_tool(self, call: ToolCall) -> tuple[ToolOutcome, StopReason | None]:
        """Run one call. Its errors are the agent's business: their text is the result."""
        if call.error is not None:
            return ToolOutcome(call=call, content=call.error, ok=False), None
        try:
            tool = find_tool(call.name, self.begin.opening.tools)
        except ToolCallError as error:
            return ToolOutcome(call=call, content=str(error), ok=False), None
        try:
            arguments = check_arguments(tool, call.arguments)
        except ToolCallError as error:
            return ToolOutcome(call=call, content=str(error), ok=False, tool=tool.name), None
        outcome, stop = await self._run_tool(tool, call, arguments)
        return replace(outcome, tool=tool.name), stop

    async def _run_tool(
        self, tool: ToolSpec, call: ToolCall, arguments: dict[str, object]
    ) -> tuple[ToolOutcome, StopReason | None]:
        timeout, limit = self._user_timeout()
        function = self._and_done(tool.bind(self.begin.instance))
        outcome = await call_user(
            self._where(tool.name), function, workers=self.context.workers, timeout=timeout, arguments=arguments
        )
        done: Ok | Raised | None = None
        match outcome:
            case Ok(value=_Ended(value=value, done=done)):
                outcome = replace(outcome, value=value)
        result, stop = self._tool_outcome(call, outcome, limit)
        if stop is not None:
            return result, stop
        ended = await self._read_done() if done is None else value_or_failure(done, self._where("done"), *_NO_LIMIT)
        return result, StopReason.DONE if ended else None

    def _and_done(self, function: Callable[..., object]) -> Callable[..., object]:
        """``function``, which also reads ``done`` behind it: one way to a thread and back instead of two."""
        read_done, instance = self.context.spec.read_done, self.begin.instance
        if is_async(function):
            return function

        def call(**arguments: object) -> object:
            value = function(**arguments)
            return value if inspect.isawaitable(value) else _Ended(value, guard(read_done, instance))

        return call

    def _tool_outcome(
        self, call: ToolCall, outcome: Outcome, limit: StopReason
    ) -> tuple[ToolOutcome, StopReason | None]:
        where, seconds = self._where(call.name or ""), outcome.seconds
        match outcome:
            case Ok(value=value):
                return self._tool_result(call, value, where, seconds), None
            case Raised(error=EpisodeFailure() as failure):
                raise failure
            case Raised(error=EpisodeDone(observation=observation)):
                return self._tool_result(call, observation, where, seconds), StopReason.DONE
            case Raised(error=error):
                content = clean_text(f"{call.name} failed: {type(error).__name__}: {error}")
                return ToolOutcome(call=call, content=content, ok=False, seconds=seconds), None
            case TimedOut(killable=killable):
                content = f"{call.name} was stopped after {seconds:.3g} s: it took too long"
                result = ToolOutcome(call=call, content=content, ok=False, seconds=seconds)
                self.begin.stopped_calls += 1
                self.begin.usable &= killable
                return result, None if killable and limit is StopReason.TOOL_TIMEOUT else limit

    def _tool_result(self, call: ToolCall, value: object, where: str, seconds: float) -> ToolOutcome:
        paid = value.reward if isinstance(value, ToolResult) else None
        content = value.content if isinstance(value, ToolResult) else value
        reward = _turn_reward(paid, where)
        text = guard(result_text, content)  # it may run the value's own __str__
        if isinstance(text, Ok):
            return ToolOutcome(call=call, content=str(text.value), ok=True, reward=reward, seconds=seconds)
        content = clean_text(f"{call.name} returned what cannot be shown: {text.error}")
        return ToolOutcome(call=call, content=content, ok=False, reward=reward, seconds=seconds)

    def _where(self, member: str) -> str:
        return f"{self.context.spec.name or 'environment'}.{member}"

    async def _step(self, read: SampledTurn, last: bool) -> StopReason | None:
        where, began = self._where("step"), time.perf_counter()
        timeout, limit = self._user_timeout()
        step: Callable[..., object] = self.begin.instance.step  # type: ignore[attr-defined]
        text = read.message.get("content") or ""
        outcome = await call_user(where, step, text, workers=self.context.workers, timeout=timeout)
        match outcome:
            case TimedOut(killable=killable):
                self.begin.stopped_calls += 1
                self.begin.usable &= killable
                return limit
            case Raised(error=EpisodeDone(observation=observation)):
                result = read_step((result_text(observation), True), where)
            case _:
                result = read_step(value_or_failure(outcome, where, EnvironmentFailure, timeout), where)
        observation = clean_text(result.observation)
        self.messages.append({"role": "user", "content": observation})
        self.turns[-1] = replace(
            self.turns[-1],
            observation=observation,
            reward=_turn_reward(result.reward, where),
            tool_seconds=time.perf_counter() - began,
        )
        if result.done or await self._read_done():
            return StopReason.DONE
        return StopReason.MAX_TURNS if last else None

    def _user_timeout(self) -> tuple[float | None, StopReason]:
        """Seconds that a call of the environment has, and which limit says so."""
        remaining, tool_timeout = self._remaining(), self.context.limits.tool_timeout
        if remaining is None or (tool_timeout is not None and tool_timeout <= remaining):
            return tool_timeout, StopReason.TOOL_TIMEOUT
        return remaining, StopReason.EPISODE_TIMEOUT

    async def _read_done(self) -> bool:
        instance, spec = self.begin.instance, self.context.spec
        stored = vars(instance).get("done") if hasattr(instance, "__dict__") else None
        if isinstance(stored, bool):  # a plain attribute needs no guard, and no way to a thread and back
            return stored
        if not spec.has_done and stored is None:
            return False
        where = self._where("done")
        outcome = await call_user(
            where, spec.read_done, instance, workers=self.context.workers, timeout=self.context.limits.tool_timeout
        )
        return bool(value_or_failure(outcome, where, EnvironmentFailure, self.context.limits.tool_timeout))

    def _append_results(self, turn_ids: Sequence[int]) -> StopReason | None:
        """Append the suffix; a tool that ran counts, but a result that leaves no room ends the episode."""
        results = []
        for message in reversed(self.messages):
            if message["role"] == "assistant":
                break
            results.append(message)
        suffix = self.context.renderer.suffix(turn_ids, results[::-1], self.begin.opening.schemas)
        limits = self.context.limits
        if self.row.completion_length + len(suffix) >= limits.max_completion_length:
            return StopReason.MAX_COMPLETION_LENGTH
        if len(self.row) + len(suffix) >= limits.max_context:
            return StopReason.CONTEXT
        self.row.add_given(suffix)
        return None

    def episode(self, stop: StopReason, reward: float | None, rewards: dict[str, float | None]) -> Episode:
        return Episode(
            task=self.task,
            sibling=self.sibling,
            attempt=self.attempt,
            token_ids=tuple(self.row.token_ids),
            mask=tuple(self.row.mask),
            logprobs=tuple(self.row.logprobs),
            versions=tuple(self.row.versions),
            prompt_length=self.row.prompt_length,
            messages=tuple(self.messages),
            turns=tuple(self.turns),
            stop_reason=stop,
            reward=reward,
            rewards=rewards,
            tools=tuple(self.begin.opening.schemas or ()),
            plain_prompt=self.begin.opening.plain_prompt,
            seconds={
                "reset": self.begin.reset_seconds,
                "sample": sum(turn.sample_seconds for turn in self.turns),
                "tools": sum(turn.tool_seconds for turn in self.turns),
            },
        )


@dataclass(frozen=True, slots=True)
class _Ended:
    """What a tool returned, and what ``done`` said behind it."""

    value: object
    done: Ok | Raised


_NO_LIMIT = (EnvironmentFailure, None)


def _turn_reward(value: object, where: str) -> float | None:
    reward = read_reward(value, where)
    if isinstance(reward, dict):
        raise EnvironmentFailure(f"{where} gave a turn the reward {reward}: a turn's reward is one number")
    return reward
