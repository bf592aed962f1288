"""A real ORS server on the loopback, built on the package's own server classes."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from envgrad.environments.adapters.openenv_server import Server
from envgrad.environments.adapters.openenv_wire import Address, fetch
from envgrad.environments.check import check_environment
from envgrad.environments.check.report import Determinism
from envgrad.environments.contract import inspect_environment
from envgrad.environments.members import ToolResult
from envgrad.errors import ConfigurationError, EnvironmentFailure, ToolCallError

pytest.importorskip("openreward")

from envgrad.environments.adapters.openreward import OpenRewardEnvironment
from envgrad.environments.adapters.openreward_chat import candidate, opening

TESTS = str(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def url_of() -> Iterator[Callable[[str], str]]:
    servers: dict[str, Server] = {}

    def url(name: str) -> str:
        if name not in servers:
            servers[name] = Server(f"helpers.openreward_apps:{name}", python=None, folder=TESTS, timeout=60)
        return servers[name].url

    yield url
    for server in servers.values():
        server.stop()


def live(url: str) -> int:
    counts = fetch(Address.of(url), "/counts", timeout=5)
    assert isinstance(counts, dict)
    return int(counts["live"])


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


def test_tools_are_typed_and_the_task_is_the_groups_index(url_of: Callable[[str], str]) -> None:
    factory = OpenRewardEnvironment("sums", url_of("both"))
    spec, instance = inspect_environment("sums", factory)
    game: Any = instance
    assert spec.num_tasks is not None and (spec.num_tasks("train"), spec.num_tasks("eval")) == (8, 8)
    assert spec.determinism == "task" and spec.uses_task_identity and not spec.has_group_reward
    assert run(game.reset(task_index=4, split="train")) == [{"role": "user", "content": "What is 4 + 3?"}]
    assert [tool.signature for tool in spec.tools_of(game)] == [
        "peek()", "submit(value: integer, sure?: boolean or null)",
    ]  # fmt: skip
    assert run(game._call("peek")) == ToolResult("nothing here", reward=0.25)
    assert not game.done
    assert run(game._call("submit", value=7)) == ToolResult("right", reward=1.0)
    assert game.done and run(game.get_reward()) == 0.0  # paid turn by turn
    assert run(game.reset(task_index=4, split="eval"))[0]["content"] == "What is 4 + 50?"
    game.close()


def test_a_task_may_have_a_tool_of_its_own(url_of: Callable[[str], str]) -> None:
    spec, instance = inspect_environment("sums", OpenRewardEnvironment("sums", url_of("both")))
    game: Any = instance
    names = []
    for index in (6, 7):
        run(game.reset(task_index=index, split="train"))
        names.append([tool.name for tool in spec.tools_of(game)])
    assert names == [["peek", "submit"], ["peek", "submit", "hint"]]
    game.close()


def test_eight_siblings_of_one_task_at_once_and_every_session_is_left(url_of: Callable[[str], str]) -> None:
    url = url_of("both")
    factory = OpenRewardEnvironment("sums", url, reward="last")
    games: list[Any] = [factory() for _ in range(8)]

    async def play(game: Any, guess: int) -> tuple[str, float | None]:
        (message,) = await game.reset(task_index=5, split="train")
        await game._call("submit", value=guess)
        reward = await game.get_reward()
        assert reward is None or isinstance(reward, float)
        return message["content"], reward

    async def all_at_once() -> list[tuple[str, float | None]]:
        return await asyncio.gather(*(play(game, 4 + number) for number, game in enumerate(games)))

    played = run(all_at_once())
    assert {prompt for prompt, _ in played} == {"What is 5 + 3?"}
    assert [reward for _, reward in played] == [0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    wait_until(lambda: live(url) == 0)
    run(games[0].reset(task_index=0, split="train"))  # left in the middle
    assert live(url) == 1
    for game in games:
        game.close()
        game.close()
    wait_until(lambda: live(url) == 0)


def test_sessions_are_bounded_and_waited_for(url_of: Callable[[str], str]) -> None:
    url = url_of("both")
    factory = OpenRewardEnvironment("sums", url, reward="last", max_sessions=2, capacity_timeout=30.0)
    games: list[Any] = [factory() for _ in range(6)]
    most = 0

    async def play(game: Any) -> float | None:
        nonlocal most
        await game.reset(task_index=5, split="train")
        most = max(most, await asyncio.to_thread(live, url))
        await game._call("submit", value=8)
        reward = await game.get_reward()
        assert reward is None or isinstance(reward, float)
        return reward

    async def all_at_once() -> list[float | None]:
        return await asyncio.gather(*(play(game) for game in games))

    assert run(all_at_once()) == [1.0] * 6
    assert 1 <= most <= 2
    wait_until(lambda: factory._link.places.taken == 0)
    for game in games:
        game.close()

    full = OpenRewardEnvironment("sums", url, max_sessions=1, capacity_timeout=0.1)
    one: Any = full()
    two: Any = full()
    run(one.reset(task_index=5, split="train"))
    with pytest.raises(EnvironmentFailure, match=r"all 1 \(max_sessions\) are in use for 0\.1 s"):
        run(two.reset(task_index=5, split="train"))
    one.close()
    assert run(two.reset(task_index=5, split="train"))
    two.close()
    wait_until(lambda: live(url) == 0)


def test_a_reset_that_is_given_up_leaves_its_session(url_of: Callable[[str], str]) -> None:
    url = url_of("both")
    game: Any = OpenRewardEnvironment("sums", url)()

    async def give_up() -> None:
        reset = asyncio.ensure_future(game.reset(task_index=6, split="eval"))  # a second's setup
        while not await asyncio.to_thread(live, url):
            await asyncio.sleep(0.01)
        reset.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reset

    run(give_up())
    wait_until(lambda: live(url) == 0)
    assert run(game.reset(task_index=5, split="eval"))
    game.close()


def test_what_the_server_refuses_is_text_and_what_raises_there_is_a_failure(url_of: Callable[[str], str]) -> None:
    url = url_of("both")
    game: Any = OpenRewardEnvironment("sums", url)()
    run(game.reset(task_index=1, split="train"))
    with pytest.raises(ToolCallError, match=r"value.*valid integer"):
        run(game._call("submit", value="many"))
    assert run(game._call("peek")).reward == 0.25  # the session goes on
    with pytest.raises(EnvironmentFailure, match=r"tool 'submit' of the server failed.*the judge has fainted"):
        run(game._call("submit", value=666))
    assert game.done and run(game.get_reward()) is None
    run(game.reset(task_index=1, split="train"))
    run(game._call("submit", value=4))
    with pytest.raises(ToolCallError, match="the episode has finished"):
        run(game._call("peek"))
    game.close()
    wait_until(lambda: live(url) == 0)


def test_two_servers_in_one_process_and_a_factory_that_can_be_pickled(url_of: Callable[[str], str]) -> None:
    first = OpenRewardEnvironment("sums", url_of("both"))
    second = pickle.loads(pickle.dumps(OpenRewardEnvironment("essay", url_of("essay"), "test[2:]", eval_split="train")))
    one, two = first(), second()
    prompts = [run(game.reset(task_index=1, split="train"))[0]["content"] for game in (one, two, one)]  # type: ignore[attr-defined]
    assert prompts == ["What is 1 + 3?", "What is 3 + 50?", "What is 1 + 3?"]
    assert (two.num_tasks("train"), two.num_tasks("eval")) == (6, 8)
    one.close()
    two.close()


def test_a_variant_is_one_of_the_servers_environments(url_of: Callable[[str], str]) -> None:
    for variant, judged in ((None, False), ("essay", True)):
        spec, instance = inspect_environment("x", OpenRewardEnvironment("x", url_of("both"), variant=variant))
        assert spec.has_group_reward is judged
        instance.close()  # type: ignore[attr-defined]


def test_the_answer_goes_into_the_terminal_tool_and_siblings_are_compared(url_of: Callable[[str], str]) -> None:
    url = url_of("essay")
    factory = OpenRewardEnvironment("essay", url)
    spec, instance = inspect_environment("essay", factory)
    games: list[Any] = [instance, factory(), factory()]
    assert spec.has_group_reward and spec.has_read_chat
    call = {"id": "1", "type": "function", "function": {"name": "peek", "arguments": {}}}
    chats: list[list[dict[str, Any]]] = [
        [{"role": "assistant", "content": "I say ten."}],
        [{"role": "assistant", "content": "", "tool_calls": [call]},
         {"role": "tool", "tool_call_id": "1", "name": "peek", "content": "nothing here"},
         {"role": "assistant", "content": "no"}],
        [{"role": "assistant", "content": "", "tool_calls": [call]},
         {"role": "tool", "tool_call_id": "1", "name": "peek", "content": "nothing here"}],
    ]  # fmt: skip
    rewards = []
    for game, chat in zip(games, chats, strict=True):
        prompt = run(game.reset(task_index=7, split="train"))
        assert [tool.name for tool in spec.tools_of(game)] == ["peek", "submit"]  # the terminal tool is not shown
        if len(chat) > 1:
            assert run(game._call("peek")).reward == 0.25
        game.read_chat([*prompt, *chat])
        rewards.append(run(game.get_reward()))
    assert rewards == [1.0, 0.5, 0.0]  # beside what was paid for peeking; the last one ended in a call
    assert live(url) == 3
    assert run(type(games[0]).group_reward(games)) == [0.1, 0.02, 0.0]
    wait_until(lambda: live(url) == 0)
    for game in games:
        game.close()


def test_a_comparison_that_fails_is_no_reward_of_zero(url_of: Callable[[str], str]) -> None:
    game: Any = OpenRewardEnvironment("essay", url_of("essay"))()
    prompt = run(game.reset(task_index=1, split="train"))
    game.read_chat([*prompt, {"role": "assistant", "content": "I give up"}])
    run(game.get_reward())
    with pytest.raises(EnvironmentFailure, match=r"could not compare the siblings.*no comparison"):
        run(type(game).group_reward([game]))
    game.close()
    with pytest.raises(EnvironmentFailure, match="no session is left"):
        run(type(game).group_reward([game]))


def test_the_check_passes(url_of: Callable[[str], str]) -> None:
    report = check_environment(OpenRewardEnvironment("sums", url_of("both")), groups=1, turns=1)
    assert report.ok and report.determinism is Determinism.TASK, str(report)


def test_chats_there_and_back() -> None:
    call = {"id": "7", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    read = opening([{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "user", "content": "Go."}])
    assert read[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    messages = [
        {"role": "assistant", "content": "Hm.", "reasoning_content": "why", "tool_calls": read[0]["tool_calls"]},
        {"role": "tool", "tool_call_id": "7", "content": "2"},
    ]
    whole, short = (candidate(messages, text_only=only) for only in (False, True))
    assert [[block.type for block in message.blocks] for message in whole] == [
        ["reasoning", "text", "tool_call"], ["tool_result"],
    ]  # fmt: skip
    assert [(message.role, [block.type for block in message.blocks]) for message in short] == [("assistant", ["text"])]
    with pytest.raises(EnvironmentFailure, match="text only"):
        opening([{"role": "user", "content": [{"type": "image_url"}]}])
    with pytest.raises(EnvironmentFailure, match="no prompt"):
        opening([])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"name": ""}, "must be the environment's name"),
        ({"name": "x", "url": "host:80"}, "must be a server's address"),
        ({"name": "x", "reward": "mean"}, "must be 'sum' or 'last'"),
        ({"name": "x", "split": "train[1"}, "or a part of it"),
        ({"name": "x", "determinism": "maybe"}, "must be one of fixed"),
        ({"name": "x", "start_timeout": 0}, "more than 0"),
    ],
)
def test_options_that_cannot_act_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        OpenRewardEnvironment(**options)


def test_a_split_that_the_server_does_not_have_and_a_server_that_is_not_there(url_of: Callable[[str], str]) -> None:
    with pytest.raises(ConfigurationError, match="has no split 'dev'"):
        OpenRewardEnvironment("sums", url_of("both"), "dev")()
    with pytest.raises(EnvironmentFailure, match=r"no OpenReward server answers at http://127.0.0.1:9"):
        OpenRewardEnvironment("sums", "http://127.0.0.1:9", start_timeout=1)()
