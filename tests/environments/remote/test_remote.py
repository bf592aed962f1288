"""Environments in a process of their own: the contract's members keep their meaning, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from envgrad.environments.adapters.other_python import OtherPython
from envgrad.environments.boundary import Raised, TimedOut, WorkerPool, call_user, guard
from envgrad.environments.contract import inspect_environment
from envgrad.environments.members import StepResult, ToolResult
from envgrad.environments.remote.wire import encode
from envgrad.environments.start import SiblingStart, fork_instance, start_difference
from envgrad.environments.tools import check_arguments, find_tool
from envgrad.errors import ConfigurationError, EnvironmentContractError, EnvironmentFailure, EpisodeDone

HERE = Path(__file__).parent


def game(name: str, **arguments: object) -> OtherPython:
    return OtherPython(sys.executable, f"remote_games:{name}", arguments, path=[HERE])


@pytest.fixture(scope="module")
def counters():
    factory = game("Counter")
    yield factory
    factory.close()


@pytest.fixture
def counter(counters):
    instance = counters()
    yield instance
    instance.close()


def play(coroutine):
    return asyncio.run(coroutine)


async def call(instance, name: str, timeout: float | None = 20.0, **arguments: object):
    tool = find_tool(name, instance.tools)
    bound, given = tool.bind(instance), check_arguments(tool, arguments)
    workers = WorkerPool()
    try:
        return await call_user(name, bound, workers=workers, timeout=timeout, arguments=given)
    finally:
        workers.close()


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def gone(pid: int, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


def test_the_contract_reads_the_same_class_here_and_there(counters):
    sys.path.insert(0, str(HERE))
    try:
        from remote_games import Counter
    finally:
        sys.path.remove(str(HERE))
    own, _ = inspect_environment("counter", Counter)
    spec, instance = inspect_environment("counter", counters)
    assert (spec.reset_required, spec.uses_task_identity, spec.has_get_reward) == (own.reset_required, True, True)
    assert spec.reset_names >= own.reset_names and not spec.has_fork and not spec.has_get_feedback
    assert [tool.schema for tool in instance.tools] == [tool.schema for tool in own.tools]
    instance.close()


def test_generators_of_this_process_are_swapped_for_functions_beside_the_environment_only(counters):
    spec, probe = inspect_environment("counter", counters)
    assert spec.isolation_mode("always") == "off"
    assert replace(spec, shared_tools=tuple(probe.tools[:1])).isolation_mode("always") == "always"
    assert replace(spec, elsewhere=False).isolation_mode("auto") == "auto"
    probe.close()


def test_reset_tools_done_and_reward(counter):
    async def episode():
        opening = await counter.reset(seed=9, split="eval", group_id=1, task_index=None)
        texts = [(await call(counter, "add", n=2)).value, (await call(counter, "add")).value]
        return opening, texts, counter.done, await counter.get_reward()

    assert play(episode()) == ("Count to 2 (eval).", ["now 2", "now 3"], True, {"hit": 0.0, "style": None})


def test_arguments_of_the_factory():
    factory = game("Counter", start=5)
    instance = factory()
    play(instance.reset(seed=0))
    assert play(call(instance, "add")).value == "now 6"
    instance.close()
    factory.close()


def test_the_ways_in_which_a_call_ends(counter):
    play(counter.reset(seed=0))
    assert play(call(counter, "pay")).value == ToolResult("paid", 0.25)
    ended = play(call(counter, "finish"))
    assert isinstance(ended, Raised) and isinstance(ended.error, EpisodeDone) and ended.error.observation == "over"
    failed = play(call(counter, "fail"))
    assert isinstance(failed, Raised) and (type(failed.error).__name__, str(failed.error)) == ("GameError", "no board")
    broken = play(call(counter, "break_down"))
    assert isinstance(broken, Raised) and isinstance(broken.error, EnvironmentFailure)
    assert str(broken.error) == "the board burnt"
    assert play(call(counter, "wait", seconds=0.01)).value == "waited"


@pytest.mark.parametrize("tool", ["sleep", "wait"])
def test_a_call_past_its_limit_is_interrupted_and_the_instance_goes_on(counter, tool):
    play(counter.reset(seed=0))
    play(call(counter, "add", n=3))
    began = time.monotonic()
    late = play(call(counter, tool, timeout=0.2, seconds=60.0))
    assert isinstance(late, TimedOut) and late.killable and time.monotonic() - began < 10
    assert play(call(counter, "add")).value == "now 4"


def test_a_process_that_stands_still_is_given_time_to_obey(counter):
    play(counter.reset(seed=0))
    pid = int(play(call(counter, "where")).value.split()[0])

    async def stalled():
        loop = asyncio.get_running_loop()
        loop.call_later(0.3, os.kill, pid, signal.SIGSTOP)
        loop.call_later(3.5, os.kill, pid, signal.SIGCONT)
        return await call(counter, "sleep", timeout=0.4, seconds=60.0)

    late = play(stalled())
    assert isinstance(late, TimedOut) and late.killable
    assert play(call(counter, "add")).value == "now 1"


@pytest.fixture
def stubborn(tmp_path):
    """An instance, which must have been closed once at the end."""
    log = tmp_path / "log"
    factory = game("Stubborn", log=str(log))
    instance = factory()
    play(instance.reset(seed=0))
    yield instance
    instance.close()
    factory.close()
    assert log.read_text() == "closed\n"


@pytest.mark.parametrize("tool", ["sleep_deaf", "clean_up_for_long"])
def test_an_interrupt_that_nobody_heard_is_sent_again_and_the_instance_is_only_closed(stubborn, tool):
    late = play(call(stubborn, tool, timeout=0.2))
    assert isinstance(late, TimedOut) and late.killable and stubborn.process_lost
    after = play(call(stubborn, "read", text=""))
    assert isinstance(after, Raised) and "interrupted twice" in str(after.error)


def test_done_that_hangs_is_interrupted_like_the_call_before_it(stubborn):
    late = play(call(stubborn, "hang_in_done", timeout=0.3))
    assert isinstance(late, TimedOut) and late.killable


def test_what_is_asked_without_a_loop_is_interrupted_past_its_limit(stubborn, monkeypatch):
    with pytest.raises(EnvironmentFailure, match=r"state_dict took longer than 0\.3 s, and was interrupted"):
        stubborn._ask_now("state_dict", seconds=0.3)
    assert play(call(stubborn, "read", text="four")).value == "4"
    assert stubborn.ending == "mate", "an attribute of the environment's own"


def test_close_interrupts_what_another_thread_waits_for(stubborn):
    waiting = threading.Thread(target=guard, args=(stubborn.state_dict,))
    waiting.start()
    while not stubborn._waiting:
        time.sleep(0.005)
    stubborn.close()
    waiting.join(20)
    assert not waiting.is_alive()


def test_a_call_that_is_not_sent_whole_when_its_time_is_over_costs_no_instance(stubborn):
    os.kill(stubborn._pid, signal.SIGSTOP)

    async def stalled():
        asyncio.get_running_loop().call_later(1.0, os.kill, stubborn._pid, signal.SIGCONT)
        return await call(stubborn, "read", timeout=0.3, text=4_000_000 * "x")

    late = play(stalled())
    assert isinstance(late, TimedOut) and late.killable
    assert play(call(stubborn, "read", text="four")).value == "4"


def test_a_call_whose_coroutine_is_dropped_is_interrupted(stubborn):
    async def dropped():
        asking = stubborn._call_tool("hang_in_done")
        asking.send(None)
        asking.close()
        await stubborn._call_ending

    play(dropped())
    assert not stubborn._waiting and not stubborn.process_lost


def test_a_call_that_does_not_obey_is_killed_with_its_process(counter):
    play(counter.reset(seed=0))
    pid = int(play(call(counter, "where")).value.split()[0])
    late = play(call(counter, "hang_hard", timeout=0.2))
    assert isinstance(late, TimedOut) and late.killable
    assert gone(pid)
    after = play(call(counter, "add"))
    assert isinstance(after, Raised) and isinstance(after.error, EnvironmentFailure)
    assert "did not stop" in str(after.error)


def test_the_death_of_the_process_is_the_environments_failure(counter):
    play(counter.reset(seed=0))
    dead = play(call(counter, "die"))
    assert isinstance(dead, Raised) and isinstance(dead.error, EnvironmentFailure) and "died in call" in str(dead.error)
    counter.close()  # again later: harmless


def test_close_ends_the_process_and_what_it_started(counter):
    play(counter.reset(seed=0))
    pid = int(play(call(counter, "where")).value.split()[0])
    child = int(play(call(counter, "start_child")).value)
    assert alive(child)
    counter.close()
    assert gone(pid) and gone(child)


def test_free_text():
    factory = game("Parrot")
    spec, parrot = inspect_environment("parrot", factory)
    assert spec.step_protocol and spec.determinism == "fixed"

    async def episode():
        opening = await parrot.reset()
        return opening[1]["content"], await parrot.step("a"), await parrot.step("b")

    assert play(episode()) == ("Hello", StepResult("a?", 0.5, False), StepResult("b?", 0.5, True))
    parrot.close()
    factory.close()


def test_a_fork_is_a_process_of_its_own():
    factory = game("Walker")
    spec, walker = inspect_environment("walker", factory)
    assert spec.has_fork and spec.num_tasks("train") == 5 and spec.num_tasks("eval") == 2
    play(walker.reset(group_id=1))
    copy = fork_instance(walker)
    first = [play(call(walker, "go")).value for _ in range(2)]
    assert [play(call(copy, "go")).value for _ in range(2)] == first
    walker.close()
    assert play(call(copy, "go")).value == str(int(first[-1]) + 1)
    copy.close()
    factory.close()


def test_global_generators_begin_with_the_group():
    factory = game("Dealt")
    one, two = factory(), factory()
    openings = [play(instance.reset(group_id=group)) for group in (7, 8) for instance in (one, two)]
    assert openings[0] == openings[1] != openings[2] == openings[3]
    starts = [
        SiblingStart(messages=[], tools=[], state=instance.start_state(), state_path="start_state()")
        for instance in (one, two)
    ]
    assert start_difference(*starts) is None
    play(two.reset(group_id=9))
    other = SiblingStart(messages=[], tools=[], state=two.start_state(), state_path="start_state()")
    assert "card" in str(start_difference(starts[0], other))
    for instance in (one, two):
        instance.close()
    factory.close()


def test_what_cannot_cross_processes_is_named():
    with pytest.raises(EnvironmentContractError, match="Judged has group_reward"):
        game("Judged")()
    with pytest.raises(ConfigurationError, match="cannot import remote_games:Nobody"):
        game("Nobody")()
    with pytest.raises(ConfigurationError, match="cannot be run"):
        OtherPython("/no/such/python", "remote_games:Counter")()
    with pytest.raises(ConfigurationError, match=r"must be 'package\.module:name'"):
        OtherPython(sys.executable, "remote_games")
    with pytest.raises(EnvironmentFailure, match="reset's row cannot go to another process"):
        encode({"row": {1, 2}}, "reset's row")


def test_processes_end_with_the_one_that_started_them(tmp_path):
    script = (
        "import asyncio, sys, os\n"
        "from envgrad.environments.adapters.other_python import OtherPython\n"
        f"factory = OtherPython(sys.executable, 'remote_games:Counter', path=[{str(HERE)!r}])\n"
        "counter = factory()\n"
        "asyncio.run(counter.reset(seed=0))\n"
        "print(asyncio.run(counter._call_tool('where')), asyncio.run(counter._call_tool('start_child')), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 3, done.stderr
    assert all(gone(pid) for pid in pids)


def test_siblings_play_side_by_side_in_processes_of_their_own(counters):
    instances = [counters() for _ in range(8)]

    async def all_of_them():
        await asyncio.gather(*(instance.reset(seed=0) for instance in instances))
        return await asyncio.gather(*(instance._call_tool("add", n=1) for instance in instances))

    assert play(all_of_them()) == ["now 1"] * 8
    assert len({instance._pid for instance in instances}) == 8
    for instance in instances:
        instance.close()
