"""One episode without a model: actions in, what the environment answers out. It follows the rollout's rules.

::

    Game.open(bench, instance, task) -> act(action), act(action), ... -> finish() -> Trajectory
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from envgrad.environments.arguments import clean_text
from envgrad.environments.boundary import Ok, Raised
from envgrad.environments.check.actions import Action, Call, Say
from envgrad.environments.check.agent_play import AgentStage
from envgrad.environments.check.bench import Bench, CallFailed, contract_parts, method_of, told
from envgrad.environments.check.report import Level, Rule
from envgrad.environments.isolation import Stream, use
from envgrad.environments.members import StepResult, ToolResult
from envgrad.environments.results import Reward, opening_messages, read_reward, read_step
from envgrad.environments.spec import copied
from envgrad.environments.start import StartFingerprint, fingerprint
from envgrad.environments.tools import ToolSpec, check_arguments, find_tool, result_text
from envgrad.errors import (
    EnvironmentContractError,
    EnvironmentFailure,
    EpisodeDone,
    EpisodeFailure,
    ToolCallError,
)
from envgrad.types import Message, Prompt, Task

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One action and the answer to it."""

    action: str
    observation: str
    reward: float | None
    done: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """A whole episode, as it is compared: equal ids and equal actions must give equal trajectories."""

    messages: tuple[Message, ...]
    tools: tuple[str, ...]
    events: tuple[Event, ...]
    reward: Reward
    """what ``get_reward`` gave; None without it"""
    total: float | None
    """the episode's reward: turn rewards and ``get_reward``; None if it cannot be scored"""


@dataclass(slots=True, kw_only=True)
class Game:
    """An episode in play on one instance."""

    bench: Bench
    instance: object
    task: Task
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    stream: Stream | None = None
    """its own generators in place of the process's"""
    events: list[Event] = field(default_factory=list)
    chat: list[Message] = field(default_factory=list)
    """what came after the opening"""
    over: bool = False

    @classmethod
    async def open(cls, bench: Bench, instance: object, task: Task) -> Game:
        """Reset ``instance`` to ``task``.

        Raises:
            CallFailed: ``reset`` raised or gave no prompt, or the tools cannot be read.
        """
        arguments = bench.spec.reset_arguments(task)
        stream = Stream(task.seed) if bench.isolated else None
        with use(stream):
            result = await bench.value("reset", method_of(instance, "reset"), arguments=arguments)
        prompt: Prompt = task.row.get("prompt") if task.row else None
        try:
            messages = opening_messages(result, prompt, "reset")
        except EnvironmentContractError as error:
            raise bench.fail(Rule.PROMPT, "reset", *contract_parts(error)) from error
        game = cls(bench=bench, instance=instance, task=task, messages=tuple(messages), tools=(), stream=stream)
        await game.read_tools()
        return game

    async def forked(self, instance: object) -> Game:
        """The game on a fork of this one's instance."""
        stream = None if self.stream is None else self.stream.copy()
        bench, task, messages = self.bench, self.task, self.messages
        game = Game(bench=bench, instance=instance, task=task, messages=messages, tools=(), stream=stream)
        await game.read_tools()
        return game

    async def read_tools(self) -> None:
        self.tools = self.bench.spec.tools
        if self.bench.spec.dynamic_tools:
            with use(self.stream):
                read = await self.bench.value("tools", self.bench.spec.tools_of, self.instance)
            self.tools = read if isinstance(read, tuple) else ()

    @property
    def prompt(self) -> str:
        """The opening's last text."""
        return _text(self.messages[-1].get("content"))

    @property
    def last_text(self) -> str:
        """What the agent read last."""
        return self.events[-1].observation if self.events else self.prompt

    @property
    def signatures(self) -> tuple[str, ...]:
        return tuple(tool.signature for tool in self.tools)

    async def picture(self) -> StartFingerprint:
        """The state as it is now, by value."""
        schemas = [tool.schema for tool in self.tools]
        take = partial(fingerprint, self.instance, self.bench.spec, self.messages, schemas)
        picture = await self.bench.value("start_state" if self.bench.spec.has_start_state else "its state", take)
        if not isinstance(picture, StartFingerprint):
            raise AssertionError(picture)
        return picture

    async def act(self, action: Action) -> None:
        """One turn; nothing once the episode is over. An agent that owns its loop acts by itself, in ``finish``."""
        if self.over or self.bench.spec.runs_agent:
            return
        with use(self.stream):
            event = await self._event(action)
        self._note_chat(action, event)
        self.events.append(replace(event, observation=_ADDRESS.sub("0x...", event.observation)))
        self.over = event.done

    async def _event(self, action: Action) -> Event:
        if isinstance(action, Call):
            return await self._call(action)
        if self.bench.spec.step_protocol:
            return await self._step(action)
        return Event(action=f"answer {action.text[:40]!r}", observation="", reward=None, done=True)

    def _note_chat(self, action: Action, event: Event) -> None:
        if isinstance(action, Say):
            self.chat.append({"role": "assistant", "content": action.text})
            answers = [{"role": "user", "content": event.observation}] if self.bench.spec.step_protocol else []
        else:
            call = {"id": f"call_{len(self.events)}", "type": "function"}
            function = {"name": action.name, "arguments": dict(action.arguments)}
            self.chat.append({"role": "assistant", "content": "", "tool_calls": [{**call, "function": function}]})
            known = {"role": "tool", "tool_call_id": call["id"], "name": action.name}
            answers = [{**known, "content": event.observation}]
        self.chat.extend(answers)

    async def play(self, actions: Sequence[Action]) -> Trajectory:
        """Play a script to its end, and score."""
        for action in actions:
            await self.act(action)
        return await self.finish()

    async def finish(self) -> Trajectory:
        """Score the episode.

        Raises:
            CallFailed: ``get_reward`` raised, or an agent's ``run_agent``.
        """
        reward: Reward = None
        if self.bench.spec.runs_agent and self.bench.agents is not None:
            await self._run_agent(self.bench.agents)
        if self.bench.spec.has_read_chat:
            chat = [*self.messages, *self.chat]
            with use(self.stream):
                await self.bench.value("read_chat", method_of(self.instance, "read_chat"), copied(chat))
        if self.bench.spec.has_get_reward:
            with use(self.stream):
                value = await self.bench.value("get_reward", method_of(self.instance, "get_reward"))
            reward = read_checked(self.bench, value, "get_reward")
        return Trajectory(
            messages=self.messages,
            tools=self.signatures,
            events=tuple(self.events),
            reward=reward,
            total=self._total(reward),
        )

    async def _run_agent(self, agents: AgentStage) -> None:
        """Let the agent play, and note what it asked.

        Raises:
            CallFailed: it raised, though its calls were answered.
        """
        bench, run = self.bench, method_of(self.instance, "run_agent")
        played = await agents.play(partial(bench.outcome, "run_agent", run), self.messages, bench.agent_answers)
        if isinstance(played.outcome, Raised) and not played.limited:
            fix = "Mend the line, or catch what it raises: an agent must live with any answer, as one without a call."
            seen = f"it raised {told(played.outcome.error)}, after {len(played.asked)} answers without a tool call."
            raise bench.fail(Rule.RAISED, "run_agent", seen, fix) from played.outcome.error
        for asked in played.asked:
            text = _ADDRESS.sub("0x...", asked.text())
            self.events.append(Event(action=f"answer {asked.answer!r}", observation=text, reward=None, done=False))
        self.over = True

    def _total(self, reward: Reward) -> float | None:
        paid = [event.reward for event in self.events if event.reward is not None]
        if not self.bench.spec.has_get_reward:
            return math.fsum(paid)
        values = list(reward.values()) if isinstance(reward, dict) else [reward]
        scored = [value for value in values if value is not None]
        return math.fsum([*paid, *scored]) if scored else None

    async def _call(self, call: Call) -> Event:
        try:
            tool = find_tool(call.name, self.tools)
            arguments = check_arguments(tool, dict(call.arguments))
        except ToolCallError as error:
            return Event(action=str(call), observation=str(error), reward=None, done=False)
        outcome = await self.bench.outcome(tool.name, tool.bind(self.instance), arguments=arguments)
        match outcome:
            case Raised(error=EpisodeFailure() as failure):
                raise self._failed(tool.name, failure) from failure
            case Raised(error=EpisodeDone(observation=observation)):
                return await self._result(call, observation, ended=True)
            case Raised(error=raised):
                text = clean_text(f"{call.name} failed: {type(raised).__name__}: {raised}")
                self._note_error(tool.name, raised)
                return Event(action=str(call), observation=text, reward=None, done=await self.done())
            case Ok(value=value):
                return await self._result(call, value, ended=False)
        raise AssertionError(outcome)

    def _note_error(self, member: str, error: Exception) -> None:
        self.bench.find(
            Level.NOTE,
            Rule.RAISED,
            member,
            f"a valid call raised {told(error)}; the agent reads it as the tool's result.",
            "Nothing, if the text helps the agent to do better; else return words of your own.",
        )

    def _failed(self, member: str, failure: EpisodeFailure) -> CallFailed:
        fix = "Raise it only for a fault of the environment; an agent's mistake is a text that it can read."
        return self.bench.fail(Rule.RAISED, member, f"it raised {told(failure)}, which fails the episode.", fix)

    async def _result(self, call: Call, value: object, *, ended: bool) -> Event:
        content, reward = value, None
        if isinstance(value, ToolResult):
            content = value.content
            reward = self._turn_reward(value.reward, call.name)
        text = await self.bench.value(call.name, result_text, content)
        done = ended or await self.done()
        return Event(action=str(call), observation=str(text), reward=reward, done=done)

    async def _step(self, action: Say) -> Event:
        outcome = await self.bench.outcome("step", method_of(self.instance, "step"), action.text)
        value: object
        match outcome:
            case Raised(error=EpisodeDone(observation=observation)):
                text = await self.bench.value("step", result_text, observation)
                value = StepResult(str(text), done=True)
            case Raised(error=EpisodeFailure() as failure):
                raise self._failed("step", failure) from failure
            case Raised(error=error):
                seen = f"for the text {action.text[:60]!r} it raised {told(error)}."
                fix = "Answer any text: an error here is a failed episode, and agents write anything."
                raise self.bench.fail(Rule.RAISED, "step", seen, fix) from error
            case Ok(value=returned):
                value = returned
        try:
            result = read_step(value, "step")
        except EnvironmentContractError as error:
            raise self.bench.fail(Rule.STEP, "step", *contract_parts(error)) from error
        except EnvironmentFailure as error:
            fix = "Pay a turn with a finite number, or None."
            raise self.bench.fail(Rule.REWARD, "step", str(error), fix) from error
        if isinstance(value, StepResult):
            note_nan(self.bench, value.reward, "step")
        done = result.done or await self.done()
        return Event(action=str(action), observation=clean_text(result.observation), reward=result.reward, done=done)

    def _turn_reward(self, value: object, member: str) -> float | None:
        reward = read_checked(self.bench, value, member)
        if isinstance(reward, dict):
            fix = "Pay a turn with one number."
            raise self.bench.fail(Rule.REWARD, member, f"it paid a turn with {reward!r}.", fix)
        return reward

    async def done(self) -> bool:
        """Whether the environment says that the episode is over."""
        if not self.bench.spec.has_done and not self.bench.has(self.instance, "done"):
            return False
        outcome = await self.bench.outcome("done", self.bench.spec.read_done, self.instance)
        if isinstance(outcome, Ok):
            return bool(outcome.value)
        fix = "Make it an attribute or a property that is true or false."
        if isinstance(outcome.error, EnvironmentContractError):
            raise self.bench.fail(Rule.DONE, "done", contract_parts(outcome.error)[0], fix) from outcome.error
        raise self.bench.fail(Rule.RAISED, "done", f"it raised {told(outcome.error)}.", fix) from outcome.error


def read_checked(bench: Bench, value: object, member: str) -> Reward:
    """A reward as the library reads it.

    Raises:
        CallFailed: it is no reward; the finding names the member.
    """
    try:
        reward = read_reward(value, member)
    except EnvironmentFailure as error:
        fix = "Return a finite number, a dict of them, or None where the episode cannot be scored."
        raise bench.fail(Rule.REWARD, member, str(error), fix) from error
    note_nan(bench, value, member)
    return reward


def note_nan(bench: Bench, value: object, member: str) -> None:
    """A breach where a reward is NaN: the library takes it for None, and the episode is lost without a word."""
    parts = value.items() if isinstance(value, Mapping) else [("", value)]
    for name, part in parts:
        if part is not None and part != part:
            where = f" in the component {name!r}" if name else ""
            bench.find(
                Level.BREACH,
                Rule.REWARD,
                member,
                f"it gave NaN{where}, which counts as no reward at all.",
                "Return a finite number; return None where the episode cannot be scored.",
            )


def first_change(first: Trajectory, other: Trajectory) -> str | None:
    """The first place where two trajectories differ, with both values; None if they do not.

    Example:
        >>> empty = Trajectory(messages=(), tools=(), events=(), reward=0.0, total=0.0)
        >>> first_change(empty, replace(empty, reward=1.0))
        'the reward is 0.0 once and 1.0 once'
    """
    if first.messages != other.messages:
        mine, theirs = _parted(_all_text(first.messages), _all_text(other.messages))
        return f"the opening is {mine} once and {theirs} once"
    if first.tools != other.tools:
        return f"the tools are {list(first.tools)} once and {list(other.tools)} once"
    for turn, (mine_, theirs_) in enumerate(zip(first.events, other.events, strict=False), start=1):
        if mine_.observation != theirs_.observation:
            mine, theirs = _parted(mine_.observation, theirs_.observation)
            return f"turn {turn}, {mine_.action}: the answer is {mine} once and {theirs} once"
        if mine_.reward != theirs_.reward:
            return f"turn {turn}, {mine_.action}: it pays {mine_.reward} once and {theirs_.reward} once"
        if mine_.done != theirs_.done:
            return f"turn {turn}, {mine_.action}: done is {mine_.done} once and {theirs_.done} once"
    if len(first.events) != len(other.events):
        return f"the episode has {len(first.events)} turns once and {len(other.events)} once"
    if first.reward != other.reward:
        return f"the reward is {first.reward} once and {other.reward} once"
    return None


def _parted(first: str, other: str) -> tuple[str, str]:
    """Both texts from a little before they part."""
    same = next((i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), min(len(first), len(other)))
    start = max(0, same - 20) if max(len(first), len(other)) > 60 else 0
    lead = "..." if start else ""
    return repr(lead + first[start : start + 60]), repr(lead + other[start : start + 60])


def _all_text(messages: Sequence[Message]) -> str:
    return "\n".join(_text(message.get("content")) for message in messages)


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(str(block.get("text", "")) for block in content if isinstance(block, dict))
    return ""
