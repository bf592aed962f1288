"""Our client against servers of the package openenv itself, run by the Python that has it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from envgrad import check_environment
from envgrad.environments.adapters.openenv import OpenEnvEnvironment
from envgrad.environments.adapters.openenv_server import Server
from envgrad.environments.check.report import Determinism
from envgrad.environments.contract import inspect_environment
from envgrad.errors import EnvironmentFailure, ToolCallError

PYTHON = os.environ.get("ENVGRAD_ECOSYSTEM_PYTHON", "")
FOLDER = str(Path(__file__).parent)


def _has_openenv() -> bool:
    return (
        bool(PYTHON) and not subprocess.run([PYTHON, "-c", "import openenv, uvicorn"], capture_output=True).returncode
    )


pytestmark = pytest.mark.skipif(
    not _has_openenv(), reason="ENVGRAD_ECOSYSTEM_PYTHON names no Python that has the package openenv"
)


@pytest.fixture(scope="module")
def url_of() -> Iterator[Any]:
    servers: dict[str, Server] = {}

    def url(name: str) -> str:
        if name not in servers:
            servers[name] = Server(f"openenv_echo:{name}", python=PYTHON, folder=FOLDER, timeout=120)
        return servers[name].url

    yield url
    for server in servers.values():
        server.stop()


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


def test_echo(url_of: Any) -> None:
    factory = OpenEnvEnvironment(url_of("echo"), prompt="Say hello.", reward="sum", no_reward=None)
    spec, instance = inspect_environment("echo", factory)
    game: Any = instance
    assert run(game.reset(seed=3)) == "Say hello."
    assert [tool.signature for tool in spec.tools_of(game)] == [
        "echo_message(message: string)", "echo_with_length(message: string, times?: integer)",
    ]  # fmt: skip
    said = run(game._call("echo_message", message="hello"))
    assert (said.content, said.reward, game.done) == ("hello", 1.0, False)
    said = run(game._call("echo_with_length", message="ab", times=2))
    assert said.reward == 0.0 and '"length"' in said.content and "abab" in said.content
    assert "nope" in run(game._call("nope")).content
    assert game.done and run(game.get_reward()) == 0.0
    game.close()


def test_the_environments_of_the_registry_that_run(tmp_path: Path) -> None:
    listed = json.loads((Path(FOLDER) / "openenv_registry.json").read_text())
    assert [entry["package"] for entry in listed["runs"]] == ["openenv 0.10.0"]
    found = subprocess.run([PYTHON, "-c", "import openenv; print(openenv.__path__[0])"], capture_output=True, text=True)
    template = Path(found.stdout.strip()) / "cli" / "templates" / "openenv_env"
    words = {"__ENV_CLASS_NAME__": "Parrot", "__ENV_TITLE_NAME__": "Parrot", "__ENV_NAME__": "parrot"}
    for source in template.rglob("*.py"):
        name, text = str(source.relative_to(template)), source.read_text()
        for mark, word in words.items():
            name, text = name.replace(mark, word), text.replace(mark, word)
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    factory = OpenEnvEnvironment(
        start="server.app:app", python=PYTHON, folder=str(tmp_path), observation="echoed_message"
    )
    game: Any = factory()
    assert run(game.reset(seed=1)) == "Parrot environment ready!"
    said = run(game.step("Hello"))
    assert (said.observation, said.done) == ("Hello", False)
    assert run(game.get_reward()) == pytest.approx(0.5)
    game.close()


def test_a_typed_action_and_its_refusals(url_of: Any) -> None:
    factory = OpenEnvEnvironment(url_of("guess"))
    spec, instance = inspect_environment("guess", factory)
    game: Any = instance
    assert run(game.reset(seed=3)) == "I think of a number from 1 to 16."
    assert [tool.signature for tool in spec.tools_of(game)] == ["guess(number: integer)"]
    with pytest.raises(ToolCallError, match=r"^number: Input should be less than or equal to 16$"):
        run(game._call("guess", number=17))
    for number in range(1, 17):
        if run(game._call("guess", number=number)).content == "correct":
            break
        if game.done:
            run(game.reset(seed=3))  # the same number again: five guesses an episode
    assert game.done and run(game.get_reward()) == 1.0
    game.close()
    report = check_environment(factory, groups=4, turns=4)
    assert report.ok and report.determinism is Determinism.SEEDED, str(report)


def test_tasks_and_capacity(url_of: Any) -> None:
    factory = OpenEnvEnvironment(url_of("words"), capacity_timeout=10)
    spec, instance = inspect_environment("words", factory)
    assert spec.num_tasks is not None and (spec.num_tasks("train"), spec.num_tasks("eval")) == (3, 1)
    games: list[Any] = [instance, *(factory() for _ in range(4))]

    async def play(game: Any) -> float | None:
        prompt = await game.reset(seed=1, task_index=1, split="train")
        assert prompt == "Say bee."
        await asyncio.sleep(0.05)
        assert (await game.step("a bee")).done
        reward = await game.get_reward()
        assert isinstance(reward, float)
        return reward

    async def all_at_once() -> list[float | None]:
        return await asyncio.gather(*(play(game) for game in games))

    assert run(all_at_once()) == [1.0] * 5  # two places

    async def hold() -> None:
        impatient: Any = OpenEnvEnvironment(url_of("words"), capacity_timeout=0.1)()
        for game in games[:2]:
            await game.reset(seed=1, task_index=0, split="train")
        with pytest.raises(EnvironmentFailure, match="its 2 places are taken"):
            await impatient.reset(seed=1, task_index=0, split="train")
        impatient.close()

    run(hold())
    for game in games:
        game.close()
