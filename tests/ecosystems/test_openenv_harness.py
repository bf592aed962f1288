"""Harness sessions of the package openenv itself, played by its own white-box harness against our endpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openenv")
pytest.importorskip("starlette")

from openenv.core.client_types import StepResult
from openenv.core.env_server.mcp_types import Tool
from openenv.core.harness import (
    HarnessRunLimits,
    MCPHarnessAdapter,
    ResourceSessionFactory,
    StepEnvSessionAdapter,
)

from envgrad.agents import AgentEndpoint
from envgrad.agents.openenv import OpenEnvHarnessEnvironment, harness_step
from helpers.world import call, play, turn

TOOL = Tool(
    name="guess",
    description="Guess the number.",
    input_schema={"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
)


class Client:
    """A client of an OpenEnv environment: guess a number that the seed hides."""

    def reset(self, seed: int, **options: Any) -> StepResult[Any]:
        self.hidden = 1 + seed % 9
        return StepResult(observation="From 1 to 9.", reward=0.0, done=False)

    def step(self, action: int) -> StepResult[Any]:
        right = action == self.hidden
        return StepResult(observation="right" if right else "wrong", reward=float(right), done=right)


class Sessions(ResourceSessionFactory[StepEnvSessionAdapter]):
    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> StepEnvSessionAdapter:
        return StepEnvSessionAdapter(
            Client(), task=task, seed=seed, tool_specs=[TOOL],
            action_builder=lambda name, arguments: int(arguments["number"]),
            initial_messages_builder=lambda result, task: [{"role": "user", "content": result.observation}],
        )  # fmt: skip


def drive(session: Any, endpoint: AgentEndpoint) -> list[Any]:
    harness = MCPHarnessAdapter()
    return harness.run_white_box(harness_step(endpoint), session, HarnessRunLimits(max_turns=12)).messages


def test_the_block_of_the_page() -> None:
    page = Path(__file__).parents[2] / "docs" / "openenv.md"
    _, block = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {"sessions": Sessions()}
    exec(compile(block, "openenv", "exec"), names)
    group = play(names["guesses"], lambda *_: turn(call("guess", number=3)), siblings=2).groups[0]
    assert all(episode.turns and episode.reward is not None for episode in group.episodes)


def test_the_packages_own_harness_plays_and_its_session_scores() -> None:
    asked: dict[str, int] = {}

    def script(prompt_ids: Any, params: Any, session: Any) -> list[int]:
        number = asked[session.key] = asked.get(session.key, 0) + 1
        if session.order[1] == 0:
            return turn(call("guess", number=number))
        return turn(call("guess", number=10)) if number == 1 else turn("I give up.")

    played = play(OpenEnvHarnessEnvironment(lambda endpoint: Sessions(), drive=drive), script, siblings=2).groups[0]
    winner, loser = played.episodes
    assert winner.reward == 1.0 and len(winner.turns) <= 9 and not winner.branches
    outcome = winner.turns[-1] if winner.turns[-1].outcomes else winner.turns[-2]
    assert winner.num_sampled_tokens == sum(one.num_tokens for one in winner.turns)
    assert outcome is not None and winner.tools[0]["function"]["name"] == "guess"  # type: ignore[index]
    assert loser.reward == 0.0 and [len(one.outcomes) for one in loser.turns] == [1, 0]
