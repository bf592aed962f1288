"""OpenEnv's harness sessions (``openenv.core.harness``): an agent in a session that ends by itself and is then scored.

::

    reset          draws the task
    run_agent      sessions(endpoint).create(task, seed=..., episode_id=...)     its model is the policy
                   drive(session, endpoint), or session.wait_for_completion(...)
                   session.verify(transcript).env_reward -> get_reward;          session.close() on every way out

Sessions are recognized by their methods; the package ``openenv`` is needed by those who make them.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from envgrad.agents.endpoint import AgentEndpoint, AgentTimeLimit
from envgrad.agents.program import ProgramFailed
from envgrad.environments.adapters.task_splits import task_ranges
from envgrad.errors import ConfigurationError, EnvironmentFailure
from envgrad.types import Message


class Verdict(Protocol):
    """What ``verify`` tells: openenv's ``VerifyResult``."""

    env_reward: float | None


class HarnessSession(Protocol):
    """One episode's session: openenv's ``ResourceSession``."""

    def initial_messages(self) -> list[Message]: ...

    def verify(self, transcript: list[Message], final_state: Any | None = None) -> Verdict: ...

    def close(self) -> None: ...


@runtime_checkable
class LoopOwningSession(HarnessSession, Protocol):
    """A session whose agent is already at work: openenv's ``LoopOwningSession``."""

    def wait_for_completion(self, timeout_s: float | None = None) -> int: ...


class SessionFactory(Protocol):
    """Makes sessions: openenv's ``ResourceSessionFactory``."""

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> HarnessSession: ...


Sessions: TypeAlias = Callable[[AgentEndpoint], SessionFactory]
Drive: TypeAlias = Callable[[HarnessSession, AgentEndpoint], Sequence[Message]]
_SEED_MASK = 0x7FFFFFFF
"""sessions hand seeds to generators that take 32 bits"""


@dataclass(frozen=True)
class OpenEnvHarnessEnvironment:
    """An ``environment_factory`` over OpenEnv's harness sessions, whose agents own the loop.

    Every call that an agent makes to the endpoint is recorded token by token, as with any agent; the tokens that the
    session captures by itself are not read. The reward is what the session's ``verify`` forwards; None there leaves the
    episode unscored.

    Args:
        sessions: the episode's endpoint -> a factory of sessions whose agents ask it, as
            ``lambda endpoint: OpenCodeSessionFactory(base_url=endpoint.base_url, api_key=endpoint.api_key, ...)``.
        tasks: what ``create`` takes as its task, one after another; None: it draws by its seed alone.
        eval_tasks: for evaluation; None: the last tenth of ``tasks``, which training then leaves out.
        drive: plays a session that does not play by itself, and returns the transcript: a white-box harness with
            ``harness_step``, a program with the endpoint's address. None: the session's ``wait_for_completion``.
        time_limit: seconds that the agent may take: then the episode is truncated, and its reward stands.

    Raises:
        ConfigurationError: no task, ``eval_tasks`` without ``tasks``, or a time limit that is none.

    Example:
        >>> OpenEnvHarnessEnvironment(lambda endpoint: None, tasks=[])
        Traceback (most recent call last):
        envgrad.errors.ConfigurationError: tasks=[] must have a task; None lets sessions draw by their seed
    """

    sessions: Sessions
    _: KW_ONLY
    tasks: Sequence[Any] | None = None
    eval_tasks: Sequence[Any] | None = None
    drive: Drive | None = None
    time_limit: float = 600.0

    def __post_init__(self) -> None:
        for option in ("tasks", "eval_tasks"):
            value = getattr(self, option)
            if value is not None and not len(value):
                raise ConfigurationError(f"{option}={value!r} must have a task; None lets sessions draw by their seed")
        if self.tasks is None and self.eval_tasks is not None:
            raise ConfigurationError("eval_tasks cannot act without tasks: give both, or neither")
        if not (self.time_limit > 0 and math.isfinite(self.time_limit)):
            raise ConfigurationError(f"time_limit={self.time_limit} must be above 0 seconds")

    @property
    def __name__(self) -> str:
        """What reports and metrics call it."""
        return "OpenEnvHarnessEnvironment"

    def __call__(self) -> HarnessEpisode:
        return SeededEpisode(self) if self.tasks is None else IndexedEpisode(self)

    def split(self, split: str) -> Sequence[Any]:
        """The tasks of ``train`` or ``eval``."""
        tasks = self.tasks or ()
        if self.eval_tasks is not None:
            return tasks if split == "train" else self.eval_tasks
        part = task_ranges("tasks", None, ["tasks"], lambda _: len(tasks))["train" if split == "train" else "eval"]
        return tasks[part.start : part.start + part.count]


class HarnessEpisode:
    """One session at a time."""

    determinism: str | None = None

    def __init__(self, environment: OpenEnvHarnessEnvironment) -> None:
        self._environment = environment
        self._task: Any = None
        self._seed = 0
        self._reward: float | None = None

    def _begin(self, task: Any, seed: int) -> str:
        self._task, self._seed, self._reward = task, seed & _SEED_MASK, None
        if task is None:
            return f"A session with seed {self._seed}."
        return task if isinstance(task, str) else json.dumps(task, default=str)

    def start_state(self) -> object:
        """Siblings have the same task and seed; sessions are made when they are played."""
        return {"task": self._task, "seed": self._seed}

    def run_agent(self, endpoint: AgentEndpoint) -> None:
        """In a thread of its own: sessions are synchronous."""
        factory = self._environment.sessions(endpoint)
        session = factory.create(self._task, seed=self._seed, episode_id=uuid.uuid4().hex)
        try:
            transcript, problem = self._play(session, endpoint)
            self._reward = _number(session.verify(transcript).env_reward)
        finally:
            session.close()
        if problem is not None:
            raise problem

    def _play(
        self, session: HarnessSession, endpoint: AgentEndpoint
    ) -> tuple[list[Message], AgentTimeLimit | ProgramFailed | None]:
        drive, limit = self._environment.drive, self._environment.time_limit
        if drive is not None:
            return list(drive(session, endpoint)), None
        if not isinstance(session, LoopOwningSession):
            raise EnvironmentFailure(
                f"{type(session).__name__} has no wait_for_completion: its agent does not play by itself. Give drive= "
                "to OpenEnvHarnessEnvironment"
            )
        try:
            code = session.wait_for_completion(limit)
        except TimeoutError:
            return [], AgentTimeLimit(f"the session's agent ran past its time limit of {limit} s")
        return [], ProgramFailed(f"the session's agent ended with exit code {code}") if code else None

    def get_reward(self) -> float | None:
        """None where the session could not be scored."""
        return self._reward


class SeededEpisode(HarnessEpisode):
    """The session draws its task by its seed."""

    determinism: str | None = "seeded"

    def reset(self, seed: int) -> str:
        return self._begin(None, seed)


class IndexedEpisode(HarnessEpisode):
    """The task is one of a list."""

    determinism: str | None = "task"

    def num_tasks(self, split: str) -> int:
        return len(self._environment.split(split))

    def reset(self, seed: int, task_index: int, split: str = "train") -> str:
        return self._begin(self._environment.split(split)[task_index], seed)


def _number(reward: float | None) -> float | None:
    if reward is None or math.isnan(reward):
        return None
    return float(reward)


def harness_step(endpoint: AgentEndpoint, *, timeout: float = 600.0) -> Callable[..., Any]:
    """The ``model_step`` of OpenEnv's white-box harnesses: samples a turn at the endpoint.

    ``MCPHarnessAdapter().run_white_box(harness_step(endpoint), session)`` plays a session with it. ``sampling`` is
    passed on; the endpoint keeps of it what is the agent's to decide.

    Args:
        endpoint: the episode's.
        timeout: seconds for one answer.

    Raises:
        ConfigurationError: the package ``openenv`` is not installed.
        ProgramFailed: (the step) the endpoint refused the call, as at a limit of the episode.
    """
    if importlib.util.find_spec("openenv") is None:
        raise ConfigurationError("harness_step needs the package openenv: pip install openenv")
    harness = importlib.import_module("openenv.core.harness")
    client = importlib.import_module("openenv.core.llm_client")

    def step(messages: Sequence[Message], tools: Sequence[Any], sampling: Mapping[str, Any]) -> Any:
        shown = [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
            }
            for tool in tools
        ]
        body = {"model": endpoint.model, "messages": list(messages), **sampling, **({"tools": shown} if shown else {})}
        message = _post(endpoint, "/chat/completions", body, timeout)["choices"][0]["message"]
        calls = [
            client.ToolCall(
                id=call["id"], name=call["function"]["name"], args=json.loads(call["function"]["arguments"])
            )
            for call in message.get("tool_calls") or ()
        ]
        return harness.ModelStepResult(response=client.LLMResponse(message.get("content") or "", calls))

    return step


def _post(endpoint: AgentEndpoint, path: str, body: Mapping[str, Any], timeout: float) -> Any:
    request = urllib.request.Request(
        endpoint.base_url + path,
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"},
    )
    try:
        # The endpoint is on this machine, whatever proxy leads out of it.
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            raise ProgramFailed(
                f"the endpoint refused the call: {error.read(2000).decode('utf-8', 'replace')}"
            ) from error
