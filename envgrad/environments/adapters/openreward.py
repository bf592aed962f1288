"""Environments behind an OpenReward (ORS) server, as environments of ours.

The package ``openreward`` speaks to the server, on the background loop; a session lasts from ``reset`` until the
episode is scored.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args
from urllib.parse import urlsplit

from envgrad.environments.adapters.background import (
    background_loop,
    in_background,
    obtain_in_background,
    run_in_background,
)
from envgrad.environments.adapters.openreward_chat import block_text, candidate, last_answer, opening
from envgrad.environments.adapters.openreward_link import CLOSE_SECONDS, Link, ServerFacts, client_errors
from envgrad.environments.adapters.task_splits import check_split
from envgrad.environments.foreign_tools import foreign_tool
from envgrad.environments.members import ToolResult
from envgrad.environments.tools import ToolSpec
from envgrad.errors import ConfigurationError, EnvironmentFailure, ToolCallError, first_line
from envgrad.types import Message

if TYPE_CHECKING:
    from openreward.api.environments.client import AsyncSession

Paid = Literal["sum", "last"]
Determinism = Literal["fixed", "task", "seeded", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rules:
    server: ServerFacts
    reward: Paid
    no_reward: float | None
    secrets: Mapping[str, str] = field(hash=False, repr=False)
    toolset: str | None
    determinism: str
    patience: float
    """seconds to wait for a place"""


class OpenRewardInstance:
    """One session at the server at a time."""

    def __init__(self, link: Link, rules: _Rules) -> None:
        self._link = link
        self._rules = rules
        self._session: AsyncSession | None = None
        self._closed = False
        self._forget()
        self.determinism = rules.determinism
        link.enter()

    def _forget(self) -> None:
        self.done = False
        self._lost = False
        self._rewards: list[float] = []
        self._tools: tuple[ToolSpec, ...] = ()
        self._chat: Sequence[Message] = ()
        self._opening_length = 0

    @property
    def tools(self) -> Sequence[ToolSpec]:
        """The session's: a task may have some of its own."""
        return self._tools

    def num_tasks(self, split: str) -> int:
        return self._rules.server.ranges[split].count

    def start_state(self) -> dict[str, object]:
        """What siblings' starts are compared by, beside their openings and tools."""
        return {"done": self.done}

    async def reset(self, task_index: int, split: str) -> list[Message]:
        await self._end()
        self._forget()
        chosen = self._rules.server.ranges[split]
        entering = self._enter(chosen.name, chosen.index(task_index))
        try:
            self._session, messages, specs = await obtain_in_background(entering, give_up=self._leave_soon)
        except client_errors() as error:
            raise EnvironmentFailure(f"no session for task {task_index} of {split}: {first_line(error)}") from error
        self._tools = tuple(
            foreign_tool(spec.name, spec.description, spec.input_schema, method="_call") for spec in specs
        )
        opened = opening(messages)
        self._opening_length = len(opened)
        return opened

    async def _enter(self, split: str, index: int) -> tuple[AsyncSession, list[dict[str, Any]], list[Any]]:
        environment = await self._link.environment()
        session = environment.session(
            split=split, index=index, secrets=self._rules.secrets or None, toolset=self._rules.toolset
        )
        await self._link.places.take(self._rules.patience, self._link.name)
        entered = False
        try:
            await session.__aenter__()
            found = session, await session.get_messages("openai"), await session.list_tools()
            entered = True
            return found
        finally:
            if not entered:
                await self._left(session)

    async def _left(self, session: AsyncSession) -> None:
        """Leave a session, and give its place back. On the background loop."""
        try:
            await session.__aexit__(None, None, None)
        finally:
            self._link.places.give()

    def _leave_soon(self, entered: tuple[AsyncSession, object, object]) -> None:
        background_loop().create_task(self._left(entered[0]))

    async def _call(self, tool: str, /, **arguments: object) -> ToolResult:
        text, reward = await self._run(tool, arguments)
        return ToolResult(text, reward=reward if self._rules.reward == "sum" else None)

    async def _run(self, tool: str, arguments: Mapping[str, object]) -> tuple[str, float | None]:
        """Run a tool of the session's.

        Raises:
            ToolCallError: the server refused the call; the model may do better.
            EnvironmentFailure: the tool raised, or the server was lost. The session is of no use any more.
        """
        from openreward.api.errors import ToolCallError as RefusedCall

        session, answered = self._now(), False
        try:
            output = await in_background(session.call_tool(tool, arguments))
            answered = True
        except RefusedCall as refused:
            answered = True
            self.done = self.done or refused.reason == "episode_finished"
            raise ToolCallError(refused.detail) from refused
        except client_errors() as error:
            raise EnvironmentFailure(f"tool {tool!r} of the server failed: {first_line(error)}") from error
        finally:
            if not answered:  # given up on its way, or broken: what it did at the server is not known
                self._lost = self.done = True
        self.done = output.finished
        if output.reward is not None:
            self._rewards.append(output.reward)
        return block_text(output.blocks), output.reward

    def read_chat(self, messages: Sequence[Message]) -> None:
        self._chat = messages

    async def get_reward(self) -> float | None:
        """None after a call that was given up."""
        answer = last_answer(self._chat)
        paid = len(self._rewards) if self._rules.reward == "sum" else 0  # turn by turn
        if self._rules.server.has_terminal and answer is not None and not self.done:
            await self._answer(answer)
        if not self._rules.server.scores_groups:
            await self._end()
        if self._lost:
            return None
        if not self._rewards:
            return self._rules.no_reward
        return self._rewards[-1] if self._rules.reward == "last" else math.fsum(self._rewards[paid:])

    async def _answer(self, text: str) -> None:
        """The terminal tool takes the model's answer."""
        terminal = await in_background(self._now().terminal_tool())
        if terminal is not None:
            await self._run(terminal.name, {} if terminal.arg is None else {terminal.arg: text})

    def _now(self) -> AsyncSession:
        if self._session is None:
            raise EnvironmentFailure("the session at the server has ended")
        return self._session

    async def _end(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await in_background(self._left(session))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        session, self._session = self._session, None
        try:
            if session is not None:
                run_in_background(self._left(session), timeout=CLOSE_SECONDS)
        finally:
            self._link.leave()


class JudgedInstance(OpenRewardInstance):
    """An environment that also compares the episodes of one task."""

    @classmethod
    async def group_reward(cls, environments: Sequence[JudgedInstance]) -> list[float | None]:
        """Score the siblings together; added to what each earned by itself."""
        from openreward.api.errors import ScoreGroupUnsupported

        judge = next((member._session for member in environments if member._session and not member._lost), None)
        if judge is None:
            raise EnvironmentFailure("no session is left that could compare the siblings")
        chats = [member._chat[member._opening_length :] for member in environments]
        try:
            try:
                scores = await in_background(judge.score_group([candidate(chat, text_only=False) for chat in chats]))
            except ScoreGroupUnsupported:
                scores = await in_background(judge.score_group([candidate(chat, text_only=True) for chat in chats]))
        except client_errors() as error:
            raise EnvironmentFailure(f"the server could not compare the siblings: {first_line(error)}") from error
        for member in environments:
            await member._end()
        return [score.reward for score in scores]


@dataclass(frozen=True)
class OpenRewardEnvironment:
    """An ``environment_factory`` that plays an environment behind an OpenReward server.

    Tools, prompt and rewards are the session's; a task may have tools of its own. A call that the server refuses goes
    back to the model in words; a tool that raises there ends its session, and is a failure of the environment. Where
    the environment has a terminal tool, the model's answer without a call goes into it. Where it scores groups, that is
    ``group_reward``.

    Args:
        name: the environment's, as ``owner/name`` at openreward.ai, or any name at a server of your own.
        url: the server's address, as ``http://127.0.0.1:8080``; None: openreward.ai. Several servers may be used in one
            process.
        variant: which environment of a server with several; None: its first.
        split: the server's split for training, or a part of it, ``train[:80]``. None: ``train``, or its first.
        eval_split: for evaluation. None: see ``task_splits.task_ranges``.
        reward: the episode's is the ``sum`` of all that was paid, turn by turn, or the ``last``.
        no_reward: what an episode earns in which nothing was paid; None: it cannot be scored.
        toolset: a built-in toolset of OpenReward's that the session gets.
        secrets: passed on to the environment.
        api_key: of openreward.ai; None: the environment variable ``OPENREWARD_API_KEY``.
        determinism: what decides an episode beside the actions; ``check_environment`` probes it.
        start_timeout: seconds for what is asked of the server at construction.
        max_sessions: sessions at once from this process; further episodes wait for one, ``capacity_timeout`` seconds at
            most. No more groups are played at once than have a session for each sibling. None: no limit. (Requests
            share a pool of connections in any case.)
        capacity_timeout: see there.

    Raises:
        ConfigurationError: an option that cannot work; the package ``openreward`` is not there. When called: a server
            that does not answer, or that has no such split.

    Example:
        >>> OpenRewardEnvironment("sums", "localhost")
        Traceback (most recent call last):
        envgrad.errors.ConfigurationError: url='localhost' must be a server's address, as http://127.0.0.1:8080
    """

    name: str
    url: str | None = None
    split: str | None = None
    _: KW_ONLY
    variant: str | None = None
    eval_split: str | None = None
    reward: Paid = "sum"
    no_reward: float | None = 0.0
    toolset: str | None = None
    secrets: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False)
    api_key: str | None = field(default=None, repr=False)
    determinism: Determinism = "task"
    start_timeout: float = 60.0
    max_sessions: int | None = None
    capacity_timeout: float = 60.0
    _link: Link = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigurationError(f"name={self.name!r} must be the environment's name")
        if self.url is not None and (
            urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).hostname
        ):
            raise ConfigurationError(f"url={self.url!r} must be a server's address, as http://127.0.0.1:8080")
        if self.reward not in get_args(Paid):
            raise ConfigurationError(f"reward={self.reward!r} must be 'sum' or 'last'")
        if self.determinism not in get_args(Determinism):
            raise ConfigurationError(
                f"determinism={self.determinism!r} must be one of {', '.join(get_args(Determinism))}"
            )
        for option in ("split", "eval_split"):
            if (value := getattr(self, option)) is not None:
                check_split(option, value)
        if not self.start_timeout > 0:
            raise ConfigurationError(f"start_timeout={self.start_timeout!r} must be more than 0 seconds")
        if importlib.util.find_spec("openreward") is None:
            raise ConfigurationError(
                "OpenRewardEnvironment needs the package openreward: pip install 'envgrad[openreward]'"
            )
        if not self.capacity_timeout >= 0:
            raise ConfigurationError(f"capacity_timeout={self.capacity_timeout!r} must be seconds, at least 0")
        options = (self.name, self.url, self.variant, self.api_key)
        object.__setattr__(self, "_link", Link(options, self.max_sessions))

    @property
    def __name__(self) -> str:
        """What reports and metrics call it."""
        return "OpenRewardEnvironment"

    def __call__(self) -> OpenRewardInstance:
        self._link.enter()
        try:
            server = self._link.server(self.split, self.eval_split, self.start_timeout)
            rules = _Rules(
                server=server,
                reward=self.reward,
                no_reward=self.no_reward,
                secrets=self.secrets,
                toolset=self.toolset,
                determinism=self.determinism,
                patience=self.capacity_timeout,
            )
            return (JudgedInstance if server.scores_groups else OpenRewardInstance)(self._link, rules)
        finally:
            self._link.leave()  # the instance has entered on its own
