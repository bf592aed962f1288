"""Instances on a Ray cluster: the contract is that of threads and processes, whatever lies between."""

from __future__ import annotations

import asyncio
import copy
import functools
import os
import random
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from envgrad.environments.boundary import Raised, TimedOut, WorkerPool, call_user
from envgrad.environments.contract import inspect_environment
from envgrad.environments.executors.ray_actor import EnvironmentActor, _Chair
from envgrad.environments.executors.ray_factory import RayFactory
from envgrad.environments.executors.ray_options import RayOptions, Resources
from envgrad.environments.isolation import Stream
from envgrad.environments.members import StepResult, ToolResult
from envgrad.environments.policy import ask_policy
from envgrad.environments.pool import InstancePool
from envgrad.environments.sources import hash63
from envgrad.environments.start import StartMode, decide_start, fork_instance
from envgrad.environments.tools import check_arguments, find_tool
from envgrad.errors import ConfigurationError, EnvironmentContractError, EnvironmentFailure, EpisodeDone
from envgrad.starter.compass import Compass
from envgrad.types import Task
from helpers.ray_worlds import Notes, Slow, ray_cluster
from helpers.zygote import gone

pytest.importorskip("ray")

TASK = Task(position=0, split="train", environment="e", group_id=1, seed=2)
MANY = RayOptions(concurrency=64, per_actor=16)


@pytest.fixture(scope="module")
def cluster() -> Any:
    with ray_cluster(one={"games": 4}) as cluster:
        yield cluster


@pytest.fixture
def make(cluster: Any) -> Any:
    """Factories; all are closed behind the test."""
    factories: list[RayFactory] = []

    def make(factory: Any, options: RayOptions = MANY, **more: Any) -> RayFactory:
        factories.append(RayFactory(factory, "e", options, **more))
        return factories[-1]

    yield make
    for factory in factories:
        factory.close()


def play(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


def call(instance: Any, name: str, timeout: float | None = 30.0, **arguments: object) -> Any:
    async def outcome() -> Any:
        tool = find_tool(name, instance.tools)
        bound, given = tool.bind(instance), check_arguments(tool, arguments)
        workers = WorkerPool()
        try:
            return await call_user(name, bound, workers=workers, timeout=timeout, arguments=given)
        finally:
            workers.close()

    return play(outcome())


class Ways:
    """Each way in which a call can end."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    def reset(self, seed: int) -> str:
        self.count = 0
        self.log = {"moves": [1, 2]}
        self.dealt = random.random()
        return "Go."

    def pay(self, coin: Literal["penny", "pound"] = "penny") -> ToolResult:
        """
        Pay.

        Args:
            coin: Which.
        """
        return ToolResult("paid", reward=0.5)

    def finish(self) -> str:
        """End."""
        raise EpisodeDone("over")

    def fail(self) -> str:
        """Raise."""
        raise KeyError("board")

    def break_down(self) -> str:
        """Fail as an environment."""
        raise EnvironmentFailure("the board burnt")

    def vanish(self) -> str:
        """Die."""
        os._exit(9)

    def hang(self) -> str:
        """Hang."""
        time.sleep(3600)
        return "never"

    def hang_hard(self) -> str:
        """Hang where no signal arrives."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        time.sleep(3600)
        return "never"

    async def inc(self, by: int = 1) -> str:
        """
        Count.

        Args:
            by: How much.
        """
        await asyncio.sleep(0)
        self.count += by
        return str(self.count)

    async def ask(self) -> str:
        """Ask the policy."""
        return await ask_policy([{"role": "user", "content": "?"}])

    @property
    def done(self) -> bool:
        return self.count > 3

    def score(self, factor: float = 2.0) -> float:
        return 21 * factor

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]

    def fork(self) -> Ways:
        return copy.deepcopy(self)

    def get_reward(self) -> dict[str, float | None]:
        return {"count": float(self.count), "style": None}


def test_outcomes_are_those_of_a_thread(make: Any) -> None:
    factory = make(Ways)
    instance = factory()
    assert play(instance.reset(seed=1)) == "Go."
    assert call(instance, "pay", coin="pound").value == ToolResult("paid", 0.5)
    over = call(instance, "finish").error
    assert isinstance(over, EpisodeDone) and over.observation == "over"
    assert repr(call(instance, "fail").error) == repr(KeyError("'board'"))
    burnt = call(instance, "break_down").error
    assert type(burnt) is EnvironmentFailure and str(burnt) == "the board burnt"
    assert call(instance, "inc").value == "1" and not instance.done
    assert play(instance.get_reward()) == {"count": 1.0, "style": None}
    assert "environment_executor='thread'" in str(call(instance, "ask").error)

    # Attributes and methods, for reward functions; states, for checkpoints.
    assert (instance.count, instance.log) == (1, {"moves": [1, 2]}) and instance.pid != os.getpid()
    assert instance.score() == 42 and instance.score(factor=1) == 21
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = instance.nothing
    assert instance.state_dict() == {"count": 1}
    instance.load_state_dict({"count": 2})

    # A fork goes its own way, on the same actor; both draw from the same place of the global generators.
    other = fork_instance(instance)
    assert other.pid == instance.pid, "an attribute, copied"
    assert call(other, "inc", by=5).value == "7" and other.done and call(instance, "inc").value == "3"
    assert instance.start_state()["count"] != other.start_state()["count"]
    assert [post.load for post in factory.actors] == [2]
    other.close()
    assert [post.load for post in factory.actors] == [1]

    # What hangs is stopped; what does not obey is killed; a death costs nobody else.
    late = call(instance, "hang", timeout=0.3)
    assert isinstance(late, TimedOut) and late.killable
    assert call(instance, "inc").value == "4", "the instance goes on"
    pid, sibling = instance.pid, factory()
    play(sibling.reset(seed=1))
    killed = call(instance, "hang_hard", timeout=0.3)
    assert isinstance(killed, TimedOut) and killed.killable and gone(pid)
    after = call(instance, "inc")
    assert isinstance(after, Raised) and isinstance(after.error, EnvironmentFailure) and instance.process_lost
    dead = call(sibling, "vanish")
    assert isinstance(dead.error, EnvironmentFailure)
    assert "died in call: its process on actor 1 of 'e' (process" in str(dead.error)
    third = factory()
    assert play(third.reset(seed=1)) == "Go." and len(factory.actors) == 1
    third.close()


class Draws:
    """Owns its generator, names nothing, and can be copied."""

    def __init__(self) -> None:
        self.generator = random.Random()

    def reset(self) -> str:
        self.card = self.generator.randrange(10**9)
        return f"Card {self.card}, {random.random()}."

    def draw(self) -> str:
        """Draw."""
        return str(self.generator.randrange(10**9)) + str(random.random())

    def get_reward(self) -> float:
        return 1.0


def test_siblings_are_copies_where_that_is_safe_and_generators_are_the_groups(make: Any) -> None:
    class Local(Draws):  # goes by value, its base too
        pass

    spec, first = inspect_environment("e", make(Local))
    given = {"group_id": 5, "seed": 77, "task_index": None, "split": "train"}
    opening = play(first.reset(**given))
    stream = Stream(hash63("generators", 77))
    assert opening.endswith(f", {stream.run(random.random)}.")
    assert decide_start(spec, TASK, first) is StartMode.COPY
    other = fork_instance(first)
    assert [call(other, "draw").value for _ in range(2)] == [call(first, "draw").value for _ in range(2)]
    assert first.start_state().keys() == {"card", "generator"}


def test_free_text_closures_and_what_is_printed(make: Any, capfd: Any) -> None:
    words = ["before"]

    class Talks:
        def reset(self) -> str:
            return " ".join(words)

        def step(self, message: str) -> StepResult:
            words.append(message)
            return StepResult(message.upper(), reward=0.5, done=message == "bye")

    words.append("then")
    spec, talks = inspect_environment("talks", make(Talks))
    assert spec.step_protocol and play(talks.reset()) == "before then"
    assert play(talks.step("a")) == StepResult("A", 0.5, False)
    assert play(talks.step("bye")) == StepResult("BYE", 0.5, True)
    assert words == ["before", "then"], "its process has its own"

    lock = threading.Lock()
    with pytest.raises(ConfigurationError, match=r"cannot go to a Ray cluster: .*environment_executor='process'"):
        make(functools.partial(Compass, lock))()


def test_close_runs_once_within_its_limit(make: Any, tmp_path: Path) -> None:
    notes = Notes(tmp_path / "notes")

    class Closes:
        def __init__(self) -> None:
            self.pid = os.getpid()
            if notes.write("open", str(self.pid)) == 4:
                raise OSError("no more licences")

        def reset(self, how: str) -> str:
            self.how = how
            return "x"

        def act(self) -> str:
            """Act."""
            return "x"

        def close(self) -> None:
            notes.write("close", str(self.pid))
            if self.how == "badly":
                raise OSError("the door is stuck")
            if self.how == "never":
                time.sleep(3600)

    factory = make(Closes, close_seconds=1.5)

    async def run() -> Any:
        spec, probe = inspect_environment("e", factory)
        pool = InstancePool(spec, probe, limit=8, workers=WorkerPool(), close_timeout=20.0)
        instances = [await pool.acquire() for _ in range(4)]
        pids = [instance.pid for instance in instances]
        for instance, how in zip(instances, ("well", "badly", "never", "well"), strict=True):
            await instance.reset(how=how)
        with pytest.raises(EnvironmentFailure, match="the factory raised OSError: no more licences"):
            await pool.acquire()
        await pool.close()
        return pool, pids

    pool, pids = play(run())
    assert [notes.closes()[str(pid)] for pid in pids] == [1, 1, 1, 1]
    assert pool.num_close_errors == 2
    assert all(gone(pid) for pid in pids) and [post.load for post in factory.actors] == [0]
    (post,) = factory.actors
    factory.close()
    assert gone(post.pid) and factory.actors == ()
    again = factory()  # a closed factory begins anew
    assert [post.load for post in factory.actors] == [1]
    factory.close()
    with pytest.raises(EnvironmentFailure, match="was closed"):
        play(again.reset(how="well"))


@pytest.mark.parametrize("member", ["group_reward", "run_agent"])
def test_what_cannot_cross_is_refused_by_name(make: Any, member: str) -> None:
    class Base:
        def reset(self) -> str:
            return "x"

        def act(self) -> str:
            """Act."""
            return "x"

        def get_reward(self) -> float:
            return 0.0

    if member == "group_reward":
        Base.group_reward = classmethod(lambda cls, environments: [0.0])  # type: ignore[attr-defined]
    else:

        async def run_agent(self: Any, endpoint: Any) -> None: ...

        Base.run_agent = run_agent  # type: ignore[attr-defined]
    with pytest.raises(EnvironmentContractError, match=rf"has {member}, .*environment_executor='thread'"):
        inspect_environment("e", make(Base))


# -- places


def test_a_full_cluster_lets_wait_and_says_what_is_asked_and_what_is_there(make: Any, tmp_path: Path) -> None:
    """The node has 4 games: two environments of 2. The third waits for a released one, not for the bound."""
    options = RayOptions(resources=Resources(custom={"games": 2.0}), concurrency=8, placement_seconds=60.0)
    factory = make(functools.partial(Slow, tmp_path / "notes"), options)

    async def run() -> None:
        spec, probe = inspect_environment("e", factory)
        pool = InstancePool(spec, probe, limit=8, workers=WorkerPool(), close_timeout=20.0)
        one, two = await pool.acquire(), await pool.acquire()
        assert len(factory.actors) == 2
        waiting = asyncio.ensure_future(pool.acquire())
        while len(factory.actors) < 3:  # asked of the cluster; the test's own limit ends it
            await asyncio.sleep(0.02)
        assert not waiting.done()
        pool.release(one)
        assert await asyncio.wait_for(waiting, 20.0) is one
        await pool.discard(two)
        pool.release(one)
        await pool.close()
        factory.close()

    play(run())
    assert set(Notes(tmp_path / "notes").closes().values()) == {1}

    greedy = RayOptions(resources=Resources(custom={"games": 5.0}), concurrency=2, placement_seconds=0.5)
    with pytest.raises(EnvironmentFailure) as failed:
        make(Compass, greedy)()
    text = str(failed.value)
    assert "no actor of 'e' could be placed and started within 0.5 s: it asks for games 5 (environments_per_a" in text
    assert "2 nodes are alive" in text and "games 4" in text and "Lower environment_resources" in text


def test_actors_are_shared_and_never_more_than_the_bound(make: Any) -> None:
    factory = make(Compass, RayOptions(concurrency=4, per_actor=2))
    instances = [factory() for _ in range(4)]
    assert [post.load for post in factory.actors] == [2, 2]
    factory._fleet.options = replace(factory._fleet.options, placement_seconds=0.3)
    with pytest.raises(EnvironmentFailure, match="all 2 actors of 'e' kept their 2 environments each"):
        factory()
    instances[0].close()
    factory()
    assert [post.load for post in factory.actors] == [2, 2]


# -- the cluster


OWN = """
import asyncio, os, signal, sys
from envgrad.environments.executors.ray_actor import EnvironmentActor, _Chair
from envgrad.environments.executors.ray_factory import RayFactory
from envgrad.environments.executors.ray_options import RayOptions
path = sys.argv[1]
class Door:
    def reset(self):
        self.usage = os.environ["RAY_USAGE_STATS_ENABLED"]
        return "Knock."
    def knock(self) -> str:
        "Knock."
        return "who?"
    def close(self):
        open(path, "a").write("closed\\n")
factory = RayFactory(Door, "door", RayOptions())
door = factory()
asyncio.run(door.reset())
import ray
kept = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
print(door.usage, kept, len(ray.nodes()), "RAY_USAGE_STATS_ENABLED" in os.environ)
if sys.argv[2] == "close":
    door.close()
    factory.close()
    print(ray.is_initialized())
"""


@pytest.mark.parametrize("end", ["close", "exit"])
def test_a_cluster_that_was_started_is_stopped(tmp_path: Path, end: str) -> None:
    """On closing; and at the interpreter's exit, where instances are closed before."""
    import subprocess

    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    run = subprocess.run(
        [sys.executable, "-c", OWN, str(tmp_path / "log"), end], capture_output=True, text=True, timeout=120, env=env
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split("\n")[0] == "0 True 1 False", run.stdout + run.stderr
    assert (tmp_path / "log").read_text() == "closed\n"
    if end == "close":
        assert run.stdout.split("\n")[1] == "False"


def test_another_cluster_than_the_connected_one_is_refused(make: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"ray_address='10.0.0.9:6379' cannot act: this process is connected"):
        make(Compass, RayOptions(address="10.0.0.9:6379"))()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"per_actor": 0}, "environments_per_actor=0 must be at least 1"),
        ({"placement": "random"}, "environment_placement='random' is not known; choose one of spread, pack"),
        ({"placement_seconds": 0}, "placement_timeout=0 must be above 0 seconds"),
        ({"address": "ray://host:10001"}, "a Ray client"),
        ({"resources": Resources(num_gpus=0.4), "per_actor": 3}, "are 1.2 GPUs"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        RayOptions(**options)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"cpus": 1}, "has 'cpus': only num_cpus, num_gpus, memory, custom"),
        ({"num_cpus": -1}, "num_cpus=-1 must be a number of at least 0"),
        ({"num_cpus": True}, "num_cpus=True must be a number"),
        ({"custom": 3}, "custom=3 must be a mapping"),
        ({"custom": {"arm": float("nan")}}, "custom arm=nan must be a number"),
    ],
)
def test_resources_that_cannot_be(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        Resources.read(given)


def test_an_interrupt_that_comes_late_does_not_hit_the_next_call(monkeypatch):
    killed = []
    monkeypatch.setattr("envgrad.environments.executors.ray_actor.os.kill", lambda pid, number: killed.append(pid))
    actor = EnvironmentActor("game", b"", [])
    ours, theirs = socket.socketpair()
    with ours, theirs:
        actor._chairs[7] = _Chair(ours, pid=12, busy=True, asked=3)
        actor.interrupt(7, 2)
        actor.interrupt(8, 3)
        assert killed == []
        actor.interrupt(7, 3)
        assert killed == [12]
