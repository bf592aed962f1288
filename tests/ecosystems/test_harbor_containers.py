"""Harbor's own docker and podman backends over a stand-in for the engine: what they are asked to do, and when.

No engine runs where these tests must pass. The stand-in (``helpers/fake_docker.py``) does what it is asked in a folder,
so that commands, files, mounts and the verifier are real; images, networks and limits are not.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("harbor")

from envgrad.environments.adapters.harbor import HarborEnvironment
from envgrad.environments.sandbox import unavailable
from envgrad.errors import ConfigurationError, EnvironmentFailure
from helpers.harbor_tasks import DOCKERFILE, write_task

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no sandbox here: {unavailable()}")
SCRIPT = Path(__file__).parents[1] / "helpers" / "fake_docker.py"


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """The stand-in's folder; its programs are the first on the path."""
    home, programs = tmp_path / "engine", tmp_path / "programs"
    home.mkdir()
    programs.mkdir()
    for name in ("docker", "podman"):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {SCRIPT} {name} "$@"\n')
        program.chmod(0o755)
    monkeypatch.setenv("FAKE_DOCKER", str(home))
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return home


def commands(home: Path) -> list[list[str]]:
    return [json.loads(line) for line in (home / "log").read_text().splitlines()]


def projects(home: Path) -> list[str]:
    return [entry.name for entry in home.iterdir() if entry.is_dir()]


async def episode(instance, command: str):
    await instance.reset(task_index=0)
    said = await instance.shell(command)
    return said, await instance.get_reward()


@pytest.mark.parametrize("backend", ["docker", "podman"])
def test_episodes_in_containers(backend, engine, tmp_path):
    # Such a task needs an engine that builds: ours refuses RUN.
    task = write_task(tmp_path, dockerfile=DOCKERFILE + "RUN apt-get update\n")
    with pytest.raises(ConfigurationError, match="refuses 'RUN apt-get update'"):
        HarborEnvironment(task)
    instance = HarborEnvironment(task, backend=backend)()
    said, reward = asyncio.run(episode(instance, "pwd; cat data/numbers.txt /ran; echo 7 > answer.txt"))
    assert (said, reward) == ("/app\n3 4apt-get update", 1.0)
    assert asyncio.run(episode(instance, "echo 8 > answer.txt"))[1] == 0.0
    assert instance.get_feedback() == "the answer is wrong"
    instance.close()
    asked = commands(engine)
    assert {one[0] for one in asked} == {backend} and projects(engine) == []
    ups = [one for one in asked if "up" in one and "--help" not in one]
    downs = [one for one in asked if "down" in one and "--rmi" in one]
    assert len(ups) == len(downs) == 2 and any("build" in one for one in asked)
    assert len({one[one.index("--project-name") + 1] for one in ups}) == 2  # a container for each episode


def test_siblings_have_containers_of_their_own_and_none_is_left(engine, tmp_path):
    make = HarborEnvironment(write_task(tmp_path), backend="docker")
    instances = [make() for _ in range(3)]

    async def one(number, instance):
        await instance.reset(task_index=0)
        await instance.shell(f"echo {number} > mine; echo 7 > answer.txt")
        seen = await instance.shell("cat mine")
        assert len(projects(engine)) >= 1
        return seen, await instance.get_reward() if number else None

    async def together():
        return await asyncio.gather(*(one(number, instance) for number, instance in enumerate(instances)))

    assert asyncio.run(together()) == [("0", None), ("1", 1.0), ("2", 1.0)]
    for instance in instances:
        instance.close()  # the first is in the middle of its episode
    assert projects(engine) == []


def test_an_engine_that_fails_is_a_failure_of_the_environment(engine, tmp_path):
    instance = HarborEnvironment(write_task(tmp_path), backend="docker")()
    Path(tmp_path / "programs" / "docker").write_text("#!/bin/sh\necho no space left; exit 1\n")
    with pytest.raises(EnvironmentFailure, match="no space left"):
        asyncio.run(instance.reset(task_index=0))
    instance.close()
    with pytest.raises(ConfigurationError, match="backend='docker' cannot work here: Docker daemon is not running"):
        HarborEnvironment(write_task(tmp_path / "other"), backend="docker")
