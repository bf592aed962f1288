"""Agents that own their loop, in ``check_environment``: played, compared, and ended in time."""

from __future__ import annotations

import random
from typing import Any

import pytest

from envgrad import check_environment
from envgrad.agents import AgentEndpoint, AgentTimeLimit
from envgrad.environments.check import Determinism, Level, Rule
from envgrad.environments.check.run import check_environment as check_without
from helpers.agents import CompassAgent, client_of


class Asking:
    """Asks for as many words as its seed says, and is paid for answers."""

    determinism: str | None = "seeded"

    def reset(self, seed: int) -> str:
        self.count, self.answers = 1 + seed % 3, 0
        return f"Say {self.count} words."

    async def run_agent(self, endpoint: AgentEndpoint) -> None:
        messages: list[Any] = list(endpoint.messages)
        async with client_of(endpoint) as client:
            for number in range(self.count):
                said = await client.chat.completions.create(model=endpoint.model, messages=messages)
                answer = said.choices[0].message.content or ""
                self.answers += answer == "I do not know."
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": self.next(number)}]

    def next(self, number: int) -> str:
        return f"Another, after {number}."

    def get_reward(self) -> float:
        return float(self.answers == self.count)


def test_an_agent_is_played_and_what_decides_its_task_is_found() -> None:
    report = check_environment(Asking, groups=3)
    assert report.ok and report.determinism is Determinism.SEEDED, str(report)
    assert {one.rule for one in report.findings} <= {Rule.SPLIT}, str(report)  # three tasks are few


def test_the_starters_game_through_an_agent_passes() -> None:
    report = check_environment(CompassAgent, groups=2)
    assert report.ok and report.determinism is Determinism.SEEDED, str(report)


def test_calls_that_differ_between_equal_starts_are_found() -> None:
    class Restless(Asking):
        def next(self, number: int) -> str:
            return f"Another, after {random.SystemRandom().random()}."

    report = check_environment(Restless, groups=4)
    assert report.determinism is Determinism.NONE and not report.ok, str(report)


@pytest.mark.parametrize("error", [RuntimeError("it knows no way out"), AgentTimeLimit("its time is up")])
def test_an_agent_that_raises_is_a_breach_unless_its_time_is_up(error: Exception) -> None:
    class Raising(Asking):
        async def run_agent(self, endpoint: AgentEndpoint) -> None:
            await super().run_agent(endpoint)
            raise error

    report = check_environment(Raising, groups=1)
    breaches = [one for one in report.findings if one.level is Level.BREACH]
    if isinstance(error, AgentTimeLimit):
        assert not breaches, str(report)
    else:
        assert [one.member for one in breaches] == ["run_agent"] and "it knows no way out" in breaches[0].seen
        assert "answers without a tool call" in breaches[0].seen


def test_an_agent_that_never_stops_is_told_that_no_more_is_answered() -> None:
    asked = []

    class Endless(Asking):
        async def run_agent(self, endpoint: AgentEndpoint) -> None:
            async with client_of(endpoint) as client:
                while True:
                    asked.append(1)
                    await client.chat.completions.create(model=endpoint.model, messages=list(endpoint.messages))  # type: ignore[arg-type]

    report = check_environment(Endless, groups=1, turns=2)
    assert not [one for one in report.findings if one.level is Level.BREACH], str(report)
    assert len(asked) % 3 == 0  # two answers and a refusal in each episode


def test_without_somebody_who_answers_it_is_said_that_nothing_is_played() -> None:
    report = check_without(Asking)
    assert "started and scored unplayed" in str(report)
