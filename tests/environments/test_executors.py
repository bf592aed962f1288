"""Instances in processes of their own, of classes that can be imported and of those that cannot."""

from __future__ import annotations

import asyncio
import datetime
import functools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import transformers.utils.chat_template_utils  # noqa: F401 - loaded once, and not in each fork

from envgrad.environments.boundary import Ok, Raised, TimedOut, WorkerPool, call_user
from envgrad.environments.contract import inspect_environment
from envgrad.environments.executors import check_executor
from envgrad.environments.executors.hosts import importable, pickled_by_name
from envgrad.environments.executors.process import ProcessFactory
from envgrad.environments.isolation import Stream
from envgrad.environments.members import StepResult, ToolResult
from envgrad.environments.policy import ask_policy
from envgrad.environments.pool import InstancePool
from envgrad.environments.remote import host
from envgrad.environments.sources import hash63
from envgrad.environments.start import StartMode, decide_start, fork_instance
from envgrad.environments.tools import check_arguments, find_tool
from envgrad.errors import ConfigurationError, EnvironmentContractError, EnvironmentFailure, EpisodeDone
from envgrad.starter.compass import Compass
from envgrad.types import Task
from helpers.zygote import gone

TASK = Task(position=0, split="train", environment="e", group_id=1, seed=2)


@pytest.fixture
def make():
    """Instances of a class in processes; all are closed behind the test."""
    factories, made = [], []

    def make(factory: Any, **options: Any) -> Any:
        factories.append(ProcessFactory(factory, "e", **options))
        made.append(factories[-1]())
        return made[-1]

    yield make
    for instance in made:
        instance._kill("the test has ended")
    for factory in factories:
        factory.close()


def play(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


def call(instance: Any, name: str, timeout: float | None = 20.0, **arguments: object) -> Any:
    async def outcome() -> Any:
        tool = find_tool(name, instance.tools)
        bound, given = tool.bind(instance), check_arguments(tool, arguments)
        workers = WorkerPool()
        try:
            return await call_user(name, bound, workers=workers, timeout=timeout, arguments=given)
        finally:
            workers.close()

    return play(outcome())


# -- how a factory gets there


def test_what_can_be_imported_is_imported_and_the_rest_is_forked():
    class Local(Compass):
        pass

    assert pickled_by_name(Compass) is not None and pickled_by_name(functools.partial(Compass)) is not None
    assert pickled_by_name(Local) is None and pickled_by_name(lambda: Compass()) is None
    assert pickled_by_name(functools.partial(Compass, threading.Lock())) is None
    assert importable("json.decoder") and importable("builtins") and not importable("__main__")
    made = type(sys)("made_here")
    sys.modules["made_here"] = made
    try:
        assert not importable("made_here")
    finally:
        del sys.modules["made_here"]
    with pytest.raises(ConfigurationError, match="must be one of thread, process, ray"):
        check_executor("threads")


def test_an_imported_class_lives_in_a_process_without_the_trainers_modules(make):
    compass = make(Compass)
    opening = play(compass.reset(seed=3, split="train"))
    own = Compass()
    assert opening == own.reset(seed=3, split="train")
    assert "libtorch" not in Path(f"/proc/{compass._pid}/maps").read_text()


def test_closures_are_known_there_as_they_are_when_the_first_instance_is_made(make):
    words = ["before"]

    class Says:
        def reset(self) -> str:
            return " ".join(words)

        def add(self, word: str) -> str:
            """Add."""
            words.append(word)
            return " ".join(words)

    words.append("then")
    one = make(Says)
    assert play(one.reset()) == "before then"
    assert call(one, "add", word="more").value == "before then more"
    assert words == ["before", "then"], "its process has its own"


# -- members keep their meaning


class Rows:
    def reset(self, at: Any, picture: Any, pair: Any, **rest: Any) -> str:
        return f"{at!r} {picture!r} {pair!r} {rest['extra']!r}"

    def get_reward(self) -> float:
        return 1.0


def test_rows_arrive_as_they_are(make):
    class Local(Rows):
        pass

    row = {"at": datetime.date(2024, 2, 29), "picture": b"\x00\xff", "pair": (1, {2: "x"}), "extra": [1.5, None]}
    given = row | {"group_id": 1, "seed": 2, "task_index": None, "split": "train"}
    assert play(make(Local).reset(**given)) == Rows().reset(**given)


class Ways:
    """Each way in which a call can end."""

    def reset(self, seed: int) -> str:
        self.count = 0
        self.log = {"moves": [1, 2]}
        self.hook = print
        return "Go."

    def pay(self) -> ToolResult:
        """Pay."""
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

    def leave(self) -> str:
        """Exit."""
        sys.exit(3)

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

    def inc(self) -> str:
        """Count."""
        self.count += 1
        return str(self.count)

    async def ask(self) -> str:
        """Ask the policy."""
        return await ask_policy([{"role": "user", "content": "?"}])

    @property
    def done(self) -> bool:
        if self.count == 3:
            raise ValueError("done is broken")
        return self.count > 3

    def _score(self, factor: float = 1.0) -> float:
        return self.count * factor

    def get_reward(self) -> dict[str, float | None]:
        return {"count": float(self.count), "style": None}


def ways(make: Any) -> Any:
    class Local(Ways):
        pass

    instance = make(Local)
    play(instance.reset(seed=1))
    return instance


def test_outcomes_are_those_of_a_thread(make):
    instance = ways(make)
    assert call(instance, "pay").value == ToolResult("paid", 0.5)
    over = call(instance, "finish").error
    assert isinstance(over, EpisodeDone) and over.observation == "over"
    assert repr(call(instance, "fail").error) == repr(KeyError("'board'"))
    burnt = call(instance, "break_down").error
    assert type(burnt) is EnvironmentFailure and str(burnt) == "the board burnt"
    left = call(instance, "leave").error
    assert isinstance(left, RuntimeError) and "SystemExit(3)" in str(left), "the agent's business, as in a thread"
    assert call(instance, "inc").value == "1" and not instance.done
    assert play(instance.get_reward()) == {"count": 1.0, "style": None}
    assert "environment_executor='thread'" in str(call(instance, "ask").error)
    call(instance, "inc")
    broken = call(instance, "inc").error
    assert isinstance(broken, EnvironmentFailure) and "done is broken" in str(broken)
    assert call(instance, "inc").value == "4" and instance.done


def test_a_hanging_call_is_stopped_and_one_that_does_not_obey_is_killed(make):
    instance = ways(make)
    began = time.monotonic()
    late = call(instance, "hang", timeout=0.2)
    assert isinstance(late, TimedOut) and late.killable
    assert call(instance, "inc").value == "1", "the instance goes on"
    killed = call(instance, "hang_hard", timeout=0.2)
    assert isinstance(killed, TimedOut) and killed.killable and time.monotonic() - began < 30
    assert gone(instance._pid)
    after = call(instance, "inc")
    assert isinstance(after, Raised) and isinstance(after.error, EnvironmentFailure)


def test_a_death_is_the_environments_failure(make):
    instance = ways(make)
    dead = call(instance, "vanish")
    assert isinstance(dead, Raised) and isinstance(dead.error, EnvironmentFailure) and "died in call" in str(dead.error)


def test_reward_functions_read_attributes_and_call_methods(make):
    class Scored(Ways):
        def score(self, factor: float = 2.0) -> float:
            return 21 * factor

    instance = make(Scored)
    play(instance.reset(seed=1))
    assert (instance.count, instance.log) == (0, {"moves": [1, 2]})
    assert instance.score() == 42 and instance.score(factor=1) == 21
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = instance.nothing
    with pytest.raises(AttributeError):
        _ = instance._score


def test_free_text_and_its_end(make):
    class Talks:
        def reset(self) -> str:
            return "Talk."

        def step(self, message: str) -> StepResult:
            return StepResult(message.upper(), reward=0.5, done=message == "bye")

    talks = make(Talks)
    spec, _ = inspect_environment("talks", lambda: talks)
    assert spec.step_protocol
    play(talks.reset())
    assert play(talks.step("a")) == StepResult("A", 0.5, False) and play(talks.step("bye")) == StepResult(
        "BYE", 0.5, True
    )


# -- starts


class Draws:
    """Owns its generator, names nothing, and can be copied."""

    def __init__(self) -> None:
        self.generator = random.Random()

    def reset(self) -> str:
        self.card = self.generator.randrange(10**9)
        return f"Card {self.card}."

    def draw(self) -> str:
        """Draw."""
        return str(self.generator.randrange(10**9))

    def get_reward(self) -> float:
        return 1.0


def test_siblings_are_copies_where_that_is_safe_as_in_threads():
    class Local(Draws):
        pass

    class Owner(Draws):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    for cls, mode in ((Local, StartMode.COPY), (Owner, StartMode.INDEPENDENT)):
        factory = ProcessFactory(cls, "e")
        spec, first = inspect_environment("e", factory)
        play(first.reset())
        own_spec, own = inspect_environment("e", cls)
        own.reset()
        assert decide_start(spec, TASK, first) == decide_start(own_spec, TASK, own) == mode
        if mode is StartMode.COPY:
            copy = fork_instance(first)
            assert copy._pid != first._pid
            assert [call(copy, "draw").value for _ in range(2)] == [call(first, "draw").value for _ in range(2)]
            copy.close()
        first.close()
        factory.close()


def test_a_fork_that_raises_leaves_the_instance_in_order(make):
    class Brittle(Ways):
        def fork(self) -> Ways:
            raise OSError("no more boards")

    instance = make(Brittle)
    play(instance.reset(seed=1))
    with pytest.raises(OSError, match="no more boards"):
        fork_instance(instance)
    assert call(instance, "inc").value == "1"


def test_global_generators_draw_what_they_draw_in_threads(make):
    class Dealt:
        def reset(self) -> str:
            return str([random.random(), random.randrange(100)])

        def look(self) -> str:
            """Look."""
            return str(random.random())

    dealt = make(Dealt)
    given = {"group_id": 5, "seed": 77, "task_index": None, "split": "train"}
    stream = Stream(hash63("generators", 77))
    own = Dealt()
    assert play(dealt.reset(**given)) == stream.run(own.reset)
    assert call(dealt, "look").value == stream.run(own.look)


# -- close


def test_close_runs_once_within_its_limit_and_the_process_ends(make, tmp_path):
    log = tmp_path / "log"

    class Closes:
        def __init__(self) -> None:
            self.how = "well"

        def reset(self, how: str) -> str:
            self.how = how
            return "x"

        def act(self) -> str:
            """Act."""
            return "x"

        def close(self) -> None:
            with log.open("a") as file:
                file.write(f"{self.how}\n")
            if self.how == "badly":
                raise OSError("the door is stuck")
            if self.how == "never":
                time.sleep(3600)

    factory = ProcessFactory(Closes, "e", close_seconds=1.5)

    async def run() -> Any:
        spec, probe = inspect_environment("e", factory)
        pool = InstancePool(spec, probe, limit=8, workers=WorkerPool(), close_timeout=8.0)
        instances = [await pool.acquire() for _ in range(4)]
        for instance, how in zip(instances, ("well", "badly", "never", "well"), strict=True):
            await instance.reset(how=how)
        await pool.close()
        return pool, [instance._pid for instance in instances]

    pool, pids = play(run())
    factory.close()
    assert sorted(log.read_text().split()) == ["badly", "never", "well", "well"]
    assert pool.num_close_errors == 2
    assert {str(error) for error in pool.close_errors} == {
        "the door is stuck", "close took longer than 1.5 s; its process was ended",
    }  # fmt: skip
    assert all(gone(pid) for pid in pids)


def test_a_factory_that_raises_later_is_a_failure_of_that_instance(tmp_path):
    count = tmp_path / "count"
    count.write_text("")

    class Late:
        def __init__(self) -> None:
            count.write_text(count.read_text() + "x")
            if len(count.read_text()) > 1:
                raise OSError("no more licences")

        def reset(self) -> str:
            return "x"

        def act(self) -> str:
            """Act."""
            return "x"

    factory = ProcessFactory(Late, "e")
    first = factory()
    with pytest.raises(EnvironmentFailure, match="the factory raised OSError: no more licences"):
        factory()
    first.close()
    factory.close()


# -- what cannot be


@pytest.mark.parametrize("member", ["group_reward", "run_agent"])
def test_what_cannot_cross_processes_is_refused_by_name_and_closed(member, tmp_path):
    closed = tmp_path / "closed"

    class Base:
        def reset(self) -> str:
            return "x"

        def close(self) -> None:
            closed.write_text("once")

    if member == "group_reward":

        class Judged(Base):
            def act(self) -> str:
                """Act."""
                return "x"

            @classmethod
            def group_reward(cls, environments: Any) -> list[float]:
                return [0.0 for _ in environments]

        cls: type = Judged
    else:

        class Agent(Base):
            async def run_agent(self, endpoint: Any) -> None: ...

            def get_reward(self) -> float:
                return 0.0

        cls = Agent
    factory = ProcessFactory(cls, "e")
    with pytest.raises(EnvironmentContractError, match=rf"has {member}, .*environment_executor='thread'"):
        inspect_environment("e", factory)
    factory.close()
    assert closed.read_text() == "once"


def test_a_break_of_the_contract_is_told_as_in_threads():
    class NoReset:
        def act(self, n) -> str:  # type: ignore[no-untyped-def]
            return "x"

    factory = ProcessFactory(NoReset, "e")
    with pytest.raises(EnvironmentContractError, match="it has no reset method"):
        inspect_environment("e", factory)
    factory.close()


# -- processes and what they hold


def test_servers_see_the_end_of_their_own_sockets_although_others_were_forked_later(monkeypatch):
    class Quiet:
        def reset(self) -> str:
            return "x"

        def act(self) -> str:
            """Act."""
            return "x"

    first = ProcessFactory(Quiet, "a")
    one = first()
    second = ProcessFactory(Quiet, "b")
    two = second()
    pids = [first.pid, second.pid, one._pid, two._pid]
    monkeypatch.setattr(host, "END_SECONDS", 60.0)
    began = time.monotonic()
    first.close()
    assert time.monotonic() - began < 40.0, "it ended by itself, before it was killed"
    assert gone(pids[0]) and gone(pids[2]) and not gone(pids[3], 0.0)
    assert call(two, "act").value == "x"
    two.close()
    second.close()
    assert all(gone(pid) for pid in pids)
    again = first()  # a closed factory begins anew
    play(again.reset())
    again.close()
    first.close()


def test_what_an_environment_prints_is_seen(capfd, make):
    class Chatty(Ways):
        def inc(self) -> str:
            """Count."""
            print("counting", flush=False)
            return super().inc()

    instance = make(Chatty)
    play(instance.reset(seed=1))
    call(instance, "inc")
    assert "counting" in capfd.readouterr().out


@pytest.mark.parametrize("how", ["fork", "import"])
def test_all_processes_end_with_a_trainer_that_is_killed(how):
    script = """
import asyncio, os, subprocess, sys
from envgrad.environments.executors.process import ProcessFactory
from envgrad.starter.compass import Compass
class Starts:
    def reset(self):
        return "x"
    def start(self) -> str:
        "Start a program."
        return str(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
factory = ProcessFactory(Starts if sys.argv[1] == "fork" else Compass, "e")
one, two = factory(), factory()
program = asyncio.run(one._call_tool("start")) if sys.argv[1] == "fork" else one._pid
print(factory.pid, one._pid, two._pid, program, flush=True)
os.kill(os.getpid(), 9)
"""
    with subprocess.Popen([sys.executable, "-c", script, how], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        pids = [int(word) for word in trainer.stdout.readline().split()]
        assert trainer.wait(60) == -9 and len(pids) == 4
    assert all(gone(pid) for pid in pids)


def test_calls_run_side_by_side(make, tmp_path):
    class Slow(Ways):
        def nap(self) -> str:
            """Sleep until all four do."""
            (tmp_path / str(os.getpid())).touch()
            end = time.monotonic() + 20
            while len(list(tmp_path.iterdir())) < 4 and time.monotonic() < end:
                time.sleep(0.01)
            return "woke" if time.monotonic() < end else "alone"

    first = make(Slow)
    others = [type(first)() for _ in range(3)]

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(one._call_tool("nap") for one in (first, *others)))

    assert play(all_of_them()) == ["woke"] * 4
    for one in others:
        one._kill("done")
    assert isinstance(call(first, "nap"), Ok)
