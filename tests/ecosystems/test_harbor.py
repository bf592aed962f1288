"""Tasks of Harbor, played in sandboxes and scored by Harbor's own verifier."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import time
from pathlib import Path

import pytest

pytest.importorskip("harbor")

from envgrad.environments.adapters.harbor import HarborEnvironment
from envgrad.environments.check import check_environment
from envgrad.environments.sandbox import unavailable
from envgrad.errors import ConfigurationError, EnvironmentContractError, EnvironmentFailure, ToolCallError
from helpers.harbor_tasks import DOCKERFILE, write_task, write_tasks

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no sandbox here: {unavailable()}")


def play(coroutine):
    return asyncio.run(coroutine)


async def episode(instance, *commands: str, index: int = 0):
    await instance.reset(task_index=index)
    texts = [await instance.shell(command) for command in commands]
    return texts, await instance.get_reward()


def leftovers() -> set[str]:
    return {path.name for path in Path("/tmp").glob("envgrad-*")} | {
        path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline") if b"bwrap" in quietly(path)
    }


def quietly(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.fixture(autouse=True)
def nothing_left():
    before = leftovers()
    yield
    end = time.monotonic() + 60
    while leftovers() - before and time.monotonic() < end:
        time.sleep(0.05)
    assert leftovers() <= before


def test_a_right_file_earns_one_and_a_wrong_one_nothing(tmp_path):
    instance = HarborEnvironment(write_tasks(tmp_path / "few", 3))()
    assert (instance.num_tasks("train"), instance.num_tasks("eval")) == (2, 1)
    assert play(instance.reset(task_index=0, split="eval")).endswith("(sum-02)\n")
    instance.close()
    tasks, held = write_tasks(tmp_path / "tasks", 3), write_task(tmp_path / "held", "held")
    instance = pickle.loads(pickle.dumps(HarborEnvironment(tasks, eval_tasks=[held])))()
    assert (instance.num_tasks("train"), instance.num_tasks("eval")) == (3, 1)
    assert play(instance.reset(task_index=1)).startswith("Write the sum of /app/data/numbers.txt")
    texts, reward = play(episode(instance, "pwd; cat data/numbers.txt; whoami", "echo 4 > answer.txt", index=1))
    assert (texts, reward) == (["/app\n1 3root", "(no output)"], 1.0)
    assert play(episode(instance, "echo 5 > /app/answer.txt", index=1))[1] == 0.0
    assert instance.get_feedback() == "the answer is wrong"
    assert play(episode(instance, "cat answer.txt", index=1)) == (
        ["cat: answer.txt: No such file or directory\n[exit code 1]"], 0.0,
    )  # fmt: skip
    instance.close()


def test_files_by_tools(tmp_path):
    instance = HarborEnvironment(write_task(tmp_path), tool_seconds=2, output_chars=200)()

    async def run():
        await instance.reset(task_index=0)
        long = "".join(str(n) for n in range(40_000))
        await instance.write_file(path="deep/it's here.txt", content=long)
        counted = await instance.shell('wc -c < "deep/it\'s here.txt"')
        read = await instance.read_file(path="/app/deep/it's here.txt")
        with pytest.raises(ToolCallError, match="no file"):
            await instance.read_file(path="nothing")
        with pytest.raises(ToolCallError, match="cannot be written"):
            await instance.write_file(path="data", content="x")
        late = await instance.shell("echo begun; sleep 60")
        await instance.write_file(path="answer.txt", content="7")
        return len(long), counted, read, late, await instance.get_reward()

    count, counted, read, late, reward = play(run())
    assert int(counted) == count and "characters left out" in read and read.startswith("0123")
    assert (late, reward) == ("begun\n[ended after 2 seconds]", 1.0)
    instance.close()


@pytest.mark.parametrize(
    "test",
    [
        "#!/bin/bash\nexit 3\n",
        "#!/bin/bash\n: > /logs/verifier/reward.txt\n",
        "#!/bin/bash\necho nan > /logs/verifier/reward.txt\n",
        "#!/bin/bash\necho good > /logs/verifier/reward.txt\n",
        '#!/bin/bash\necho \'{"reward": "high"}\' > /logs/verifier/reward.json\n',
        "#!/bin/bash\nsleep 60\necho 1 > /logs/verifier/reward.txt\n",
    ],
)
def test_a_verifier_that_tells_no_reward_leaves_the_episode_unscored(tmp_path, test):
    task = write_task(tmp_path, test=test)
    instance = HarborEnvironment(task, verifier={"override_timeout_sec": 1 if "sleep" in test else 30})()
    # a reward that the policy writes for itself is removed before the verifier runs
    cheat = "echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 1}' > /logs/verifier/reward.json"
    assert play(episode(instance, cheat))[1] is None
    instance.close()


def test_the_policy_cannot_prepare_the_verdict(tmp_path):
    instance = HarborEnvironment(write_task(tmp_path))()
    tricks = [
        "(while true; do echo 1 > /logs/verifier/reward.txt; done) & disown",
        "echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod 555 /tests/test.sh /tests",
        "rm -rf /tests; ln -s /app /tests",
        "rm -rf /tests; mkdir -p /tests/test.sh/deep",
        "rm -rf /tests; mkfifo /tests",
    ]
    for trick in tricks:
        assert play(episode(instance, trick))[1] == 0.0, trick
    instance.close()


def test_several_rewards(tmp_path):
    tell = '#!/bin/bash\necho \'{"style": 0.5, "hit": 1}\' > /logs/verifier/reward.json\n'
    task = write_task(tmp_path, test=tell)
    named, unnamed = HarborEnvironment(task, reward="style")(), HarborEnvironment(task)()
    assert play(episode(named))[1] == 0.5
    with pytest.raises(EnvironmentContractError, match=r"\['hit', 'style'\]: name one of them"):
        play(episode(unnamed))
    named.close()


def test_eight_sandboxes_at_once_know_nothing_of_each_other(tmp_path):
    make = HarborEnvironment(write_task(tmp_path))
    instances = [make() for _ in range(8)]

    async def one(number, instance):
        await instance.reset(task_index=0)
        began = time.monotonic()
        await instance.shell(f"echo {number} > /app/mine; sleep 1")
        seen = await instance.shell("cat /app/mine; ls /app; ls /proc | grep -c '^[0-9]'")
        await instance.shell(f"echo {7 if number % 2 else 8} > answer.txt")
        return seen, await instance.get_reward(), began, time.monotonic()

    async def all_of_them():
        return await asyncio.gather(*(one(number, instance) for number, instance in enumerate(instances)))

    results = play(all_of_them())
    assert [seen.split("\n")[:3] for seen, *_ in results] == [[str(n), "data", "mine"] for n in range(8)]
    assert [reward for _, reward, *_ in results] == [float(n % 2) for n in range(8)]
    assert max(began for *_, began, _ in results) < min(ended for *_, ended in results)  # side by side
    for instance in instances:
        instance.close()


def test_closing_in_the_middle_removes_the_sandbox(tmp_path):
    instance = HarborEnvironment(write_task(tmp_path))()

    async def give_up():
        await instance.reset(task_index=0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(instance.shell("sleep 50"), 0.5)

    play(give_up())
    instance.close()
    instance.close()
    with pytest.raises(EnvironmentFailure, match="no sandbox"):
        play(instance.shell("true"))


def test_a_reset_that_is_given_up_leaves_nothing(tmp_path):
    instance = HarborEnvironment(write_task(tmp_path))()

    async def give_up():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(instance.reset(task_index=0), 0.02)

    play(give_up())
    instance.close()


def test_a_sandbox_has_no_network_and_nothing_of_this_machine(tmp_path):
    instance = HarborEnvironment(write_task(tmp_path))()
    secret = tmp_path / "secret.txt"
    secret.write_text("s")
    texts, _ = play(
        episode(
            instance,
            f"cat {secret}",
            "ls /tmp",
            "python3 -c \"import socket; socket.create_connection(('127.0.0.1', 22), 1)\"",
            "touch /usr/bin/x",
        )
    )
    assert "No such file" in texts[0] and texts[1] == "(no output)"
    assert "refused" in texts[2] and "Read-only" in texts[3]
    instance.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dockerfile": DOCKERFILE + "RUN apt-get update\n"}, "refuses 'RUN apt-get update'"),
        ({"dockerfile": "FROM tensorflow/tensorflow:latest\n"}, "it has no images"),
        ({"dockerfile": "FROM debian\nCOPY nothing.txt /app/\n"}, "no such file"),
        ({"dockerfile": "FROM debian\nCOPY ../../secret /app/\n"}, "no such file|leads out of the context"),
        ({"config": '[agent]\nuser = "agent"\n'}, "one user, root"),
        ({"config": '[environment]\nos = "windows"\n'}, "no task of Harbor's|Windows"),
        ({"config": "[broken\n"}, "no task of Harbor's"),
    ],
)
def test_tasks_that_cannot_be_played_are_named(tmp_path, change, words):
    with pytest.raises(ConfigurationError, match=words):
        HarborEnvironment(write_task(tmp_path, **change))()


def test_places_and_backends_that_are_not_there(tmp_path):
    task = write_task(tmp_path)
    with pytest.raises(ConfigurationError, match="no such folder"):
        HarborEnvironment("no-such-folder")()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match="has no task"):
        HarborEnvironment(tmp_path / "empty")()
    with pytest.raises(ConfigurationError, match="must be 'bubblewrap'"):
        HarborEnvironment(task, backend="clouds")()
    with pytest.raises(ConfigurationError, match="cannot work here"):
        HarborEnvironment(task, backend="no.such:Thing")()
    if not any(os.access(Path(folder) / "podman", os.X_OK) for folder in os.environ["PATH"].split(":")):
        with pytest.raises(ConfigurationError, match=r"backend='podman' cannot work here: .*not installed"):
            HarborEnvironment(task, backend="podman")()


def test_a_registry_of_ones_own(tmp_path):
    write_tasks(tmp_path / "tasks", 2)
    tasks = [
        {
            "name": f"sum-{n:02d}",
            "path": str(tmp_path / "tasks" / f"sum-{n:02d}"),
            "git_url": None,
            "git_commit_id": None,
        }
        for n in range(2)
    ]
    registry = tmp_path / "registry.json"
    registry.write_text(json.dumps([{"name": "sums", "version": "1.0", "description": "sums", "tasks": tasks}]))
    instance = HarborEnvironment("sums@1.0", registry=str(registry))()
    assert instance.num_tasks("train") == instance.num_tasks("eval") == 1
    assert play(episode(instance, "echo 3 > answer.txt", index=0))[1] == 1.0
    instance.close()
    with pytest.raises(ConfigurationError, match="cannot be had from the registry"):
        HarborEnvironment("products@1.0", registry=str(registry))()


def test_the_check_finds_nothing_wrong(tmp_path):
    report = check_environment(HarborEnvironment(write_tasks(tmp_path, 4), tool_seconds=5), groups=1, turns=3)
    assert report.ok, str(report)
