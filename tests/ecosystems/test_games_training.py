"""Five steps of GRPO with the starter model on an environment of each ecosystem, and on a mixture of all of them.

``ENVGRAD_ECOSYSTEM_PYTHON`` names a Python that has harbor, ``VERIFIERS_PYTHON`` one that has verifiers and uv; without
them these two are left out.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from envgrad.environments.adapters import (
    GymnasiumEnvironment,
    MCPEnvironment,
    OpenEnvEnvironment,
    OpenRewardEnvironment,
    OtherPython,
    ReasoningGymEnvironment,
    TextArenaEnvironment,
)
from envgrad.environments.adapters.openenv_server import Server
from envgrad.environments.sandbox import unavailable
from helpers.ecosystems import five_steps
from helpers.harbor_tasks import write_tasks

TESTS = str(Path(__file__).parents[1])
HARBOR_PYTHON = os.environ.get("ENVGRAD_ECOSYSTEM_PYTHON", "")
VERIFIERS_PYTHON = os.environ.get("VERIFIERS_PYTHON", "")
WORDS = """
import verifiers.v1 as vf


class WordData(vf.TaskData):
    word: str


class WordTask(vf.Task[WordData]):
    @vf.reward
    async def said(self, trace: vf.Trace) -> float:
        return float(self.data.word in (trace.last_reply or ""))


class Words(vf.Taskset[WordTask]):
    def load(self):
        return [WordTask(WordData(idx=n, word=word, prompt=f"Say {word}."), self.config.task)
                for n, word in enumerate(["a", "e", "i", "o"])]


__all__ = ["Words"]
"""


class Made:
    """Makes environments, and ends what they started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.close: list[Callable[[], object]] = []

    def gymnasium(self) -> Any:
        return GymnasiumEnvironment("FrozenLake-v1", prompt="Go.", is_slippery=False)

    def reasoning_gym(self) -> Any:
        return ReasoningGymEnvironment(
            "chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1, system_prompt=""
        )

    def textarena(self) -> Any:
        return TextArenaEnvironment("GuessTheNumber-v0")

    def openenv(self) -> Any:
        return OpenEnvEnvironment(start="helpers.openenv_apps:guess", folder=TESTS, prompt="Guess.", reward="sum")

    def openreward(self) -> Any:
        server = Server("helpers.openreward_apps:sums", python=None, folder=TESTS, timeout=60)
        self.close.append(server.stop)
        return OpenRewardEnvironment("sums", server.url)

    def mcp(self) -> Any:
        from mcp.server.fastmcp import FastMCP

        def notes() -> FastMCP:
            server, kept = FastMCP("notes", log_level="ERROR"), []

            @server.tool()
            def keep(text: str) -> str:
                """Keep a note."""
                kept.append(text)
                return f"{len(kept)} kept"

            return server

        async def reward(server: Any) -> float:
            return float((await server.call("keep", text="last")).split()[0]) - 1.0

        return MCPEnvironment(notes, prompt="Keep two notes.", reward=reward)

    def harbor(self) -> Any:
        tasks = write_tasks(self.folder / "harbor", 4)
        target = "envgrad.environments.adapters.harbor:HarborEnvironment"
        factory = OtherPython(HARBOR_PYTHON, target, {"tasks": str(tasks)})
        self.close.append(factory.close)
        return factory

    def verifiers(self) -> Any:
        from envgrad.agents.verifiers import VerifiersEnvironment

        (self.folder / "words_to_say.py").write_text(WORDS)
        environ, config = {"PYTHONPATH": str(self.folder)}, {"agent": {"max_turns": 1}}
        return VerifiersEnvironment("words_to_say", python=VERIFIERS_PYTHON, environ=environ, config=config)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    made = Made(tmp_path)
    yield made
    for close in made.close:
        close()


NEEDS = {"gymnasium": "gymnasium", "reasoning_gym": "reasoning_gym", "textarena": "textarena", "openenv": "uvicorn",
         "openreward": "openreward", "mcp": "mcp"}  # fmt: skip


def why_not(ecosystem: str) -> str | None:
    """Why an ecosystem cannot be played here; None if it can."""
    if ecosystem == "harbor":
        if not Path(HARBOR_PYTHON).is_file():
            return "ENVGRAD_ECOSYSTEM_PYTHON names no interpreter"
        return unavailable()
    if ecosystem == "verifiers":
        return None if Path(VERIFIERS_PYTHON).is_file() else "VERIFIERS_PYTHON names no interpreter"
    pytest.importorskip(NEEDS[ecosystem])
    return None


@pytest.mark.timeout(380)
@pytest.mark.parametrize("ecosystem", [*NEEDS, "harbor", "verifiers"])
def test_five_steps(ecosystem: str, made: Made, tmp_path: Path) -> None:
    if reason := why_not(ecosystem):
        pytest.skip(reason)
    changes = {"per_device_train_batch_size": 4, "num_generations": 2} if ecosystem in ("harbor", "verifiers") else {}
    trainer = five_steps(tmp_path / "run", getattr(made, ecosystem)(), **changes)
    assert any(record["turns"] for record in trainer.episode_log.read())  # type: ignore[union-attr]


def test_five_steps_of_self_play_train_both_seats(tmp_path: Path) -> None:
    pytest.importorskip("textarena")
    talk = TextArenaEnvironment("TruthAndDeception-v0", opponents="self", move_tokens=12)  # three moves of each
    trainer = five_steps(tmp_path, talk, max_completion_length=800, max_turn_tokens=None, max_turns=6)
    records = list(trainer.episode_log.read())  # type: ignore[union-attr]
    assert {record["stop_reason"] for record in records} == {"done"}
    rewards = {(record["position"], record["sibling"], record["part"]): record["reward"] for record in records}
    seats = {part for *_, part in rewards} - {""}
    assert seats == {"seat_0", "seat_1"}  # over some groups, each is the other
    for (position, sibling, part), reward in rewards.items():
        if part:
            assert reward == -rewards[position, sibling, ""] != 0  # a win for one is a loss for the other


@pytest.mark.timeout(380)
def test_a_mixture_of_all_of_them(made: Made, tmp_path: Path) -> None:
    names = [name for name in [*NEEDS, "harbor", "verifiers"] if why_not(name) is None]
    factories = {name: getattr(made, name)() for name in names}
    trainer = five_steps(tmp_path / "run", factories, per_device_train_batch_size=2 * len(names), num_generations=2)
    played = Counter(record["environment"] for record in trainer.episode_log.read())  # type: ignore[union-attr]
    assert played == dict.fromkeys(names, 10)  # five groups of two


def test_shares_of_a_mixture(made: Made, tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    pytest.importorskip("reasoning_gym")
    factories = {"lake": made.gymnasium(), "sums": made.reasoning_gym()}
    trainer = five_steps(tmp_path, factories, environment_weights={"lake": 0.4, "sums": 0.6})
    records = list(trainer.episode_log.read())  # type: ignore[union-attr]
    assert Counter(record["environment"] for record in records) == {"lake": 16, "sums": 24}
