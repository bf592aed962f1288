"""OpenEnv's harness sessions: agents that own the loop, recognized by what their sessions can do."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from envgrad import check_environment
from envgrad.agents import AgentEndpoint
from envgrad.agents.openenv import OpenEnvHarnessEnvironment, _post, harness_step
from envgrad.environments.check import Determinism
from envgrad.errors import ConfigurationError, EnvironmentFailure, TooManyFailures
from envgrad.types import StopReason
from helpers.world import call, play, play_one, turn

PROGRAM = Path(__file__).parents[1] / "helpers" / "agent_program.py"
INC = [turn(call("inc", n=2)), turn(call("inc", n=3), call("inc", n=4)), turn("That is all.")]


class Session:
    """A session whose agent is a program that counts; ``task`` says how it goes."""

    closed: list[Any] = []

    def __init__(self, endpoint: AgentEndpoint, task: Any, seed: int | None) -> None:
        self.task, self.seed = task, seed
        environ = {**os.environ, **endpoint.environ, "NO_PROXY": "127.0.0.1", "MODE": str(task or "plain")}
        environ["PIDS"] = os.devnull
        command = [sys.executable, str(PROGRAM), "Count."]
        self.process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def initial_messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": "Count."}]

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError from error

    def verify(self, transcript: list[dict[str, Any]], final_state: Any = None) -> SimpleNamespace:
        if self.process.poll() is None:
            return SimpleNamespace(env_reward=0.25)
        said = self.process.stdout.read().decode().strip() if self.process.stdout else ""
        return SimpleNamespace(env_reward=float(said) if said else None)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.closed.append(self.task)


class Factory:
    def __init__(self, endpoint: AgentEndpoint) -> None:
        self.endpoint = endpoint

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> Session:
        return Session(self.endpoint, task, seed)


@pytest.fixture(autouse=True)
def closed() -> list[Any]:
    Session.closed.clear()
    return Session.closed


def test_a_session_that_plays_by_itself_is_recorded_and_scored(closed: list[Any]) -> None:
    episode = play_one(OpenEnvHarnessEnvironment(Factory, tasks=["plain"]), INC)
    assert episode.reward == 9.0 and episode.stop_reason is StopReason.ANSWER and not episode.branches
    sampled = [token for token, own in zip(episode.token_ids, episode.mask, strict=True) if own]
    assert sampled == [token for answer in INC for token in answer]
    assert [len(one.outcomes) for one in episode.turns] == [1, 2, 0] and closed == ["plain"]


def test_a_session_past_its_time_limit_is_truncated_and_its_reward_stands(closed: list[Any]) -> None:
    episode = play_one(OpenEnvHarnessEnvironment(Factory, tasks=["hang"], time_limit=1.0), INC)
    assert (episode.stop_reason, episode.reward) == (StopReason.EPISODE_TIMEOUT, 0.25) and closed == ["hang"]


def test_an_agent_that_crashes_is_a_failure_and_an_unscored_session_is_none(closed: list[Any]) -> None:
    with pytest.raises(TooManyFailures) as raised:
        play(
            OpenEnvHarnessEnvironment(Factory, tasks=["crash"]), INC, siblings=2, retries=0,
            max_consecutive_failed_groups=1,
        )  # fmt: skip
    assert isinstance(raised.value.__cause__, EnvironmentFailure)
    assert "ended with exit code 1" in str(raised.value.__cause__) and closed == ["crash", "crash"]

    class Unscored(Session):
        def verify(self, transcript: Any, final_state: Any = None) -> SimpleNamespace:
            return SimpleNamespace(env_reward=None)

    def sessions(endpoint: AgentEndpoint) -> Any:
        return SimpleNamespace(create=lambda task, seed, episode_id: Unscored(endpoint, task, seed))

    with pytest.raises(TooManyFailures, match="scored none of them"):
        play(OpenEnvHarnessEnvironment(sessions), INC * 2, siblings=1, retries=0, max_consecutive_failed_groups=1)


def test_a_session_that_is_driven() -> None:
    seen: list[Any] = []

    class Driven:
        def __init__(self, task: Any, seed: int | None) -> None:
            self.seed = seed

        def initial_messages(self) -> list[dict[str, Any]]:
            return [{"role": "user", "content": "Say it."}]

        def verify(self, transcript: list[dict[str, Any]], final_state: Any = None) -> SimpleNamespace:
            seen.append((self.seed, transcript))
            return SimpleNamespace(env_reward=float(len(transcript)))

        def close(self) -> None:
            seen.append("closed")

    def sessions(endpoint: AgentEndpoint) -> Any:
        return SimpleNamespace(create=lambda task, seed, episode_id: Driven(task, seed))

    def drive(session: Any, endpoint: AgentEndpoint) -> list[dict[str, Any]]:
        return [*session.initial_messages(), {"role": "assistant", "content": "it"}]

    played = play(OpenEnvHarnessEnvironment(sessions, drive=drive), [], siblings=2).groups[0]
    assert [episode.reward for episode in played.episodes] == [2.0, 2.0]
    seeds = [entry[0] for entry in seen if entry != "closed"]
    assert seeds[0] == seeds[1] < 1 << 31 and seen.count("closed") == 2
    undriven = OpenEnvHarnessEnvironment(sessions)
    with pytest.raises(TooManyFailures) as raised:
        play(undriven, [], retries=0, max_consecutive_failed_groups=1)
    assert "Driven has no wait_for_completion" in str(raised.value.__cause__)


def test_tasks_of_training_and_evaluation() -> None:
    instance: Any = OpenEnvHarnessEnvironment(Factory, tasks=[f"task {number}" for number in range(20)])()
    assert (instance.num_tasks("train"), instance.num_tasks("eval"), instance.determinism) == (18, 2, "task")
    assert instance.reset(seed=1, task_index=1, split="eval") == "task 19"
    own: Any = OpenEnvHarnessEnvironment(Factory, tasks=["a"], eval_tasks=[{"b": 1}])()
    assert own.reset(seed=1, task_index=0, split="eval") == '{"b": 1}' and own.num_tasks("train") == 1


def test_the_check_plays_sessions_and_finds_what_decides_them() -> None:
    def sessions(endpoint: AgentEndpoint) -> Any:
        return SimpleNamespace(create=lambda task, seed, episode_id: Said(seed))

    class Said:
        def __init__(self, seed: int | None) -> None:
            self.seed = seed

        def verify(self, transcript: list[dict[str, Any]], final_state: Any = None) -> SimpleNamespace:
            return SimpleNamespace(env_reward=float(transcript[-1]["content"] == "no"))

        def close(self) -> None:
            pass

    def drive(session: Any, endpoint: AgentEndpoint) -> list[dict[str, Any]]:
        asked = [{"role": "user", "content": f"Number {session.seed % 5}?"}]
        body = {"messages": asked}
        return [*asked, _post(endpoint, "/chat/completions", body, 10.0)["choices"][0]["message"]]

    report = check_environment(OpenEnvHarnessEnvironment(sessions, drive=drive), groups=2)
    assert report.ok and report.determinism is Determinism.SEEDED, str(report)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tasks": []}, r"tasks=\[\] must have a task"),
        ({"eval_tasks": ["a"]}, "eval_tasks cannot act without tasks"),
        ({"time_limit": 0}, "time_limit=0 must be above 0"),
    ],
)
def test_what_cannot_work_is_said_at_construction(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        OpenEnvHarnessEnvironment(Factory, **options)


@pytest.mark.skipif(importlib.util.find_spec("openenv") is not None, reason="the package openenv is there")
def test_a_white_box_step_needs_the_package() -> None:
    with pytest.raises(ConfigurationError, match="pip install openenv"):
        harness_step(AgentEndpoint(base_url="http://127.0.0.1:9/v1", api_key="k", messages=()))
