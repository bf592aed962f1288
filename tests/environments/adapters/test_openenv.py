"""The client against small servers that speak OpenEnv's protocol, in a process of their own."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from envgrad import check_environment
from envgrad.environments.adapters.openenv import OpenEnvEnvironment
from envgrad.environments.adapters.openenv_server import Server
from envgrad.environments.adapters.openenv_wire import Address, fetch
from envgrad.environments.check.report import Determinism
from envgrad.environments.contract import inspect_environment
from envgrad.environments.members import ToolResult
from envgrad.errors import ConfigurationError, EnvironmentContractError, EnvironmentFailure, ToolCallError

TESTS = str(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def url_of() -> Iterator[Callable[[str], str]]:
    servers: dict[str, Server] = {}

    def url(name: str) -> str:
        if name not in servers or not servers[name].running:
            place = f"helpers.openenv_apps:{name}"
            servers[name] = Server(place, python=None, folder=TESTS, timeout=30)
        return servers[name].url

    yield url
    for server in servers.values():
        server.stop()


def counts(url: str) -> dict[str, int]:
    found = fetch(Address.of(url), "/counts", timeout=5)
    assert isinstance(found, dict)
    return found


def wait_until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


# -- step-style


def test_a_typed_action_is_a_tool_and_the_last_reward_is_the_episodes(url_of: Callable[[str], str]) -> None:
    factory = OpenEnvEnvironment(url_of("guess"), prompt="Guess.", observation="hint")
    spec, instance = inspect_environment("guess", factory)
    game: Any = instance
    assert run(game.reset(seed=(7 << 31) + 4)) == "Guess.\n\nI think of a number from 1 to 16."  # hidden: 4 + 1
    (tool,) = spec.tools_of(game)
    assert tool.signature == "guess(number: integer)"
    assert tool.schema["function"]["description"] == "Guess the number."
    assert tool.parameters["properties"]["number"]["maximum"] == 16
    assert run(game._call("guess", number=7)) == ToolResult("lower", reward=None)
    assert run(game._call("guess", number=5)) == ToolResult("correct", reward=None)
    assert game.done and run(game.get_reward()) == 1.0
    game.close()


def test_the_sum_is_paid_turn_by_turn(url_of: Callable[[str], str]) -> None:
    game: Any = OpenEnvEnvironment(url_of("guess"), reward="sum")()
    run(game.reset(seed=4))
    assert run(game._call("guess", number=7)).reward == 0.0
    assert run(game._call("guess", number=5)).reward == 1.0
    assert run(game.get_reward()) == 0.0  # nothing beside the turns
    game.close()


def test_what_the_server_refuses_or_raises_goes_to_the_model_and_the_game_goes_on(url_of: Callable[[str], str]) -> None:
    game: Any = OpenEnvEnvironment(url_of("traps"))()
    run(game.reset(seed=4))
    with pytest.raises(ToolCallError, match=r"^number: Input should be from 1 to 16$"):
        run(game._call("guess", number=99))
    with pytest.raises(ToolCallError, match="thirteen brings bad luck"):
        run(game._call("guess", number=13))
    assert run(game._call("guess", number=5)).content == "correct"
    assert run(game.get_reward()) == 1.0
    game.close()


def test_an_episode_without_a_reward_earns_what_it_is_told_to(url_of: Callable[[str], str]) -> None:
    for given in (0.0, -1.0, None):
        game: Any = OpenEnvEnvironment(url_of("guess"), no_reward=given)()
        run(game.reset(seed=4))
        assert run(game.get_reward()) == given
        game.close()


def test_a_call_that_is_given_up_ends_the_session_and_cannot_be_scored(url_of: Callable[[str], str]) -> None:
    url = url_of("traps")
    before = counts(url)["open"]
    game: Any = OpenEnvEnvironment(url)()

    async def play() -> None:
        await game.reset(seed=4)
        assert (await game._call("guess", number=7)).content
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(game._call("guess", number=14), timeout=0.1)  # it would answer in 30 s
        assert game.done and await game.get_reward() is None
        with pytest.raises(EnvironmentFailure, match="session at the server has ended"):
            await game._call("guess", number=5)
        assert await game.reset(seed=4)  # the instance is as good as new
        assert (await game._call("guess", number=5)).content == "correct"
        assert await game.get_reward() == 1.0

    run(play())
    game.close()
    assert before <= counts(url)["open"] <= before + 1  # the one that still computes


def test_a_server_that_dies_is_a_failure_of_the_environment() -> None:
    factory = OpenEnvEnvironment(start="helpers.openenv_apps:traps", folder=TESTS)
    game: Any = factory()
    run(game.reset(seed=4))
    with pytest.raises(EnvironmentFailure, match="closed the connection during step"):
        run(game._call("guess", number=15))
    wait_until(lambda: not factory._link._servers[0].running)
    assert run(game.reset(seed=4)).startswith("I think")  # started again
    game.close()


# -- MCP tools


def test_listed_tools_are_ours_and_are_called_by_name(url_of: Callable[[str], str]) -> None:
    factory = OpenEnvEnvironment(url_of("sums"), prompt="Add.", reward="sum")
    spec, instance = inspect_environment("sums", factory)
    game: Any = instance
    assert run(game.reset(seed=1)) == "Add."
    assert [tool.signature for tool in spec.tools_of(game)] == [
        "add(a: integer, b: integer or null)", "submit(value: integer)",
    ]  # fmt: skip
    assert run(game._call("add", a=2, b=3)) == ToolResult("5", reward=0.25)
    assert run(game._call("nope")) == ToolResult("no tool nope", reward=None)
    assert run(game._call("submit", value=5)) == ToolResult("thanks", reward=1.0)
    assert game.done
    game.close()


def test_an_opening_without_words_says_what_to_give(url_of: Callable[[str], str]) -> None:
    game: Any = OpenEnvEnvironment(url_of("sums"))()
    with pytest.raises(EnvironmentContractError, match="give prompt="):
        run(game.reset(seed=1))
    game.close()


# -- free text, tasks, capacity


def test_text_goes_into_the_only_text_field_and_repeated_observations_are_cut(url_of: Callable[[str], str]) -> None:
    factory = OpenEnvEnvironment(url_of("words"), observation="text", cumulative=True)
    spec, instance = inspect_environment("words", factory)
    assert spec.step_protocol and spec.determinism == "task" and spec.num_tasks is not None
    assert (spec.num_tasks("train"), spec.num_tasks("eval")) == (5, 2)  # the server's split "test"
    game: Any = instance
    assert run(game.reset(seed=9, task_index=2, split="train")) == "Say the word cat."
    first = run(game.step("dog"))
    assert (first.observation, first.done, first.reward) == ("You said 'dog'.", False, None)
    assert run(game.step("a cat")).done
    assert run(game.get_reward()) == 1.0
    assert run(game.reset(seed=9, task_index=1, split="eval")) == "Say the word gnu."
    game.close()


def test_text_can_be_a_tool_too(url_of: Callable[[str], str]) -> None:
    factory = OpenEnvEnvironment(url_of("words"), tool="say", split="train[1:3]", eval_split="train[3:]")
    spec, instance = inspect_environment("words", factory)
    game: Any = instance
    assert spec.num_tasks is not None and (spec.num_tasks("train"), spec.num_tasks("eval")) == (2, 2)
    assert "word bee" in run(game.reset(seed=1, task_index=0, split="train"))
    assert [tool.signature for tool in spec.tools_of(game)] == ["say(message: string, loud?: boolean)"]
    game.close()


def test_a_full_server_is_asked_again_until_a_place_is_free(url_of: Callable[[str], str]) -> None:
    url = url_of("words")
    factory = OpenEnvEnvironment(url, observation="text", capacity_timeout=20)
    games: list[Any] = [factory() for _ in range(6)]

    async def play(game: Any, index: int) -> float | None:
        await game.reset(seed=1, task_index=index % 5, split="train")
        await asyncio.sleep(0.05)
        reward = await game.get_reward()  # gives the place back
        assert isinstance(reward, float)
        return reward

    async def all_at_once() -> list[float | None]:
        return await asyncio.gather(*(play(game, index) for index, game in enumerate(games)))

    assert run(all_at_once()) == [0.0] * 6
    assert counts(url)["most"] <= 2  # two places
    for game in games:
        game.close()


def test_a_server_that_stays_full_is_a_failure_that_tells_why(url_of: Callable[[str], str]) -> None:
    url = url_of("words")
    factory = OpenEnvEnvironment(url, capacity_timeout=0.2)
    games: list[Any] = [factory() for _ in range(3)]
    for game in games[:2]:
        run(game.reset(seed=1, task_index=0, split="train"))
    with pytest.raises(EnvironmentFailure, match=r"its 2 places are taken.*max_concurrent_envs"):
        run(games[2].reset(seed=1, task_index=0, split="train"))
    for game in games:
        game.close()
    wait_until(lambda: counts(url)["open"] == 0)


def test_a_kept_session_is_reset_in_place(url_of: Callable[[str], str]) -> None:
    url = url_of("guess")
    opened = counts(url)["opened"]
    for keep, sessions in ((True, 1), (False, 3)):
        game: Any = OpenEnvEnvironment(url, keep_session=keep)()
        for seed in (4, 5, 4):
            run(game.reset(seed=seed))
            run(game._call("guess", number=5))
            assert run(game.get_reward()) == float(seed == 4)
        game.close()
        assert counts(url)["opened"] - opened == sessions
        opened = counts(url)["opened"]


# -- connections are bounded, shared, and waited for


def test_sessions_are_bounded_and_kept_ones_are_shared_by_all_instances(url_of: Callable[[str], str]) -> None:
    url = url_of("guess")
    factory = OpenEnvEnvironment(url, keep_session=True, max_sessions=2, capacity_timeout=30)
    games: list[Any] = [factory() for _ in range(8)]
    before = counts(url)
    most = 0

    async def play(game: Any, seed: int) -> float | None:
        nonlocal most
        await game.reset(seed=seed)
        most = max(most, factory._link.places.taken)
        await game._call("guess", number=5)
        reward = await game.get_reward()
        assert reward is None or isinstance(reward, float)
        return reward

    async def all_at_once() -> list[float | None]:
        return await asyncio.gather(*(play(game, seed) for seed, game in enumerate(games)))

    for _ in range(2):
        assert run(all_at_once()) == [float(seed == 4) for seed in range(8)]
    after = counts(url)
    assert most == 2 and after["opened"] - before["opened"] == 2, "sixteen episodes in two sessions"
    wait_until(lambda: factory._link.places.taken == 0)
    for game in games:
        game.close()
    wait_until(lambda: counts(url)["open"] == before["open"])


def test_who_waits_too_long_for_a_session_is_told_and_takes_no_place_along(url_of: Callable[[str], str]) -> None:
    factory = OpenEnvEnvironment(url_of("guess"), max_sessions=1, capacity_timeout=0.1)
    one: Any = factory()
    two: Any = factory()
    places = factory._link.places
    run(one.reset(seed=4))
    with pytest.raises(EnvironmentFailure, match=r"all 1 \(max_sessions\) are in use for 0\.1 s"):
        run(two.reset(seed=4))

    async def given_up() -> None:
        waiting = asyncio.ensure_future(two.reset(seed=4))
        await asyncio.sleep(0.02)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    run(given_up())
    one.close()
    run(two.reset(seed=4))  # the place is there
    assert places.taken == 1
    two.close()
    wait_until(lambda: places.taken == 0)


def test_a_kept_session_that_was_lost_meanwhile_is_replaced(url_of: Callable[[str], str]) -> None:
    factory = OpenEnvEnvironment(url_of("traps"), keep_session=True, max_sessions=1)
    game: Any = factory()
    run(game.reset(seed=4))
    run(game.get_reward())
    wait_until(lambda: len(factory._link.places._kept) == 1)
    (kept,) = factory._link.places._kept
    kept.drop()
    assert run(game.reset(seed=4))
    run(game._call("guess", number=5))
    assert run(game.get_reward()) == 1.0
    wait_until(lambda: factory._link.places.taken == 0)
    game.close()


# -- the check


def test_the_check_finds_what_decides_the_task(url_of: Callable[[str], str]) -> None:
    report = check_environment(OpenEnvEnvironment(url_of("guess")), groups=2, turns=3)
    assert report.ok and report.determinism is Determinism.SEEDED, str(report)
    report = check_environment(OpenEnvEnvironment(url_of("words"), observation="text"), groups=1, turns=1)
    assert report.ok and report.determinism is Determinism.TASK, str(report)


def test_a_seed_that_chooses_nothing_is_named_and_a_hidden_difference_is_seen_in_the_state(
    url_of: Callable[[str], str],
) -> None:
    report = check_environment(OpenEnvEnvironment(url_of("noisy")), groups=4, turns=4)
    assert not report.ok and report.determinism is Determinism.NONE
    assert "declares determinism = 'seeded'" in str(report)
    honest = check_environment(OpenEnvEnvironment(url_of("noisy"), determinism="none"), groups=4, turns=4)
    assert honest.ok, str(honest)
    watching = check_environment(
        OpenEnvEnvironment(url_of("noisy"), determinism="none", compare_state=True), groups=2, turns=1
    )
    assert "start_state()['state']['hidden']" in str(watching), str(watching)


# -- servers that are started


def test_a_started_server_lives_as_long_as_its_instances_and_can_be_pickled() -> None:
    factory = OpenEnvEnvironment(start="helpers.openenv_apps:guess", folder=TESTS, prompt="Guess.")
    copy = pickle.loads(pickle.dumps(factory))
    assert copy == factory
    first, second = copy(), copy()
    url = copy._link.address.http
    assert counts(url)["open"] == 0
    first.close()
    first.close()
    assert counts(url)["open"] == 0
    second.close()
    with pytest.raises(EnvironmentFailure, match="no OpenEnv server answers"):
        counts(url)


def test_a_started_server_dies_with_a_process_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from envgrad.environments.adapters.openenv import OpenEnvEnvironment\n"
        f"factory = OpenEnvEnvironment(start='helpers.openenv_apps:guess', folder={TESTS!r})\n"
        "instance = factory()\n"
        "print(factory._link.address.http, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    url = done.stdout.strip()
    assert url.startswith("http://127.0.0.1:")

    def is_gone() -> bool:
        try:
            counts(url)
        except EnvironmentFailure:
            return True
        return False

    wait_until(is_gone, 10)


def test_a_server_that_cannot_start_says_why() -> None:
    factory = OpenEnvEnvironment(start="no_such_module:app", folder=TESTS)
    with pytest.raises(EnvironmentFailure, match=r"(?s)ended with exit code 1.*No module named 'no_such_module'"):
        factory()
    with pytest.raises(EnvironmentFailure, match="cannot be run"):
        OpenEnvEnvironment(start="a:b", python="/no/such/python")()


# -- what cannot work


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "give one of them"),
        ({"url": "http://a", "start": "a:b"}, "give one of them"),
        ({"url": "ftp://a"}, "must be a server's address"),
        ({"url": "http://a", "python": "python3"}, "leave them out"),
        ({"start": "a:"}, "must name an ASGI app"),
        ({"url": "http://a", "reward": "first"}, "must be 'last' or 'sum'"),
        ({"url": "http://a", "determinism": "some"}, "must be one of fixed"),
        ({"url": "http://a", "text": True}, "says too little"),
        ({"url": "http://a", "text": "x", "tool": "y"}, "text calls no tools"),
        ({"url": "http://a", "tasks": False, "split": "train"}, "cannot act with tasks=False"),
        ({"url": "http://a", "split": "train[80%:]"}, "or a part of it"),
        ({"url": "http://a", "reset_options": {"seed": 1}}, "are the group's"),
        ({"url": "http://a", "capacity_timeout": -1}, "at least 0"),
        ({"url": "http://a", "max_sessions": 0}, "max_sessions=0 must be at least 1"),
    ],
)
def test_options_that_cannot_act_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        OpenEnvEnvironment(**options)


def test_options_that_do_not_fit_the_server_are_refused(url_of: Callable[[str], str]) -> None:
    for options, match in (
        ({"text": "word"}, "is no field of the action, which has"),
        ({"split": "train"}, "has no tasks"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            OpenEnvEnvironment(url_of("guess"), **options)()  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="the server has no split 'dev'"):
        OpenEnvEnvironment(url_of("words"), split="dev")()
    with pytest.raises(ConfigurationError, match="lists its own tools"):
        OpenEnvEnvironment(url_of("sums"), text="tool_name")()
    with pytest.raises(EnvironmentFailure, match="no OpenEnv server answers"):
        OpenEnvEnvironment("http://127.0.0.1:9")()
    assert threading.active_count() < 50
