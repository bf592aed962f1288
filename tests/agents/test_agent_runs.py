"""Whole episodes of agents over HTTP: programs, limits, failures, keys, and what is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from envgrad.agents import AgentEndpoint, AgentProgram, AgentTimeLimit
from envgrad.agents.program import ProgramFailed, _end_with_parent
from envgrad.errors import EnvironmentContractError, EnvironmentFailure, SamplerFailure, TooManyFailures
from envgrad.rollout.group import GroupPolicy
from envgrad.sampling.scripted import ScriptedSampler
from envgrad.types import Episode, Group, StopReason
from helpers.agents import client_of
from helpers.world import call, ids, play, play_one, turn, world

PROGRAM = Path(__file__).parents[1] / "helpers" / "agent_program.py"
INC = [turn(call("inc", n=2)), turn(call("inc", n=3), call("inc", n=4)), turn("That is all.")]


class Counting:
    """Any program that prints what it counted."""

    environ: dict[str, str] = {}
    time_limit = 60.0

    def reset(self, seed: int) -> str:
        self.counted: str | None = None
        return "Count."

    async def run_agent(self, endpoint: AgentEndpoint) -> None:
        program = AgentProgram([sys.executable, str(PROGRAM)], time_limit=self.time_limit, environ=self.environ)
        self.counted = (await program.run(endpoint, endpoint.prompt)).stdout

    def get_reward(self) -> float:
        return float(self.counted or -1)


class Streaming(Counting):
    environ = {"MODE": "stream"}


@pytest.mark.parametrize("kind", [Counting, Streaming])
def test_a_program_plays_through_openais_client(kind: type[Counting]) -> None:
    played = play(kind, INC, siblings=2)
    for episode in played.groups[0].episodes:
        assert episode.reward == 9.0
        assert episode.stop_reason is StopReason.ANSWER and not episode.branches
        assert [len(one.outcomes) for one in episode.turns] == [1, 2, 0]
        assert sum(episode.mask) == sum(map(len, INC))
        sampled = [token for token, own in zip(episode.token_ids, episode.mask, strict=True) if own]
        assert sampled == [token for answer in INC for token in answer]
        assert episode.messages[-1]["content"] == "That is all." and episode.tools[0]["function"]["name"] == "inc"
        assert episode.seconds["sample"] >= 0 and episode.seconds["tools"] > 0


def test_siblings_and_an_agents_own_calls_are_answered_at_the_same_time() -> None:
    class Parallel(Counting):
        environ = {"MODE": "async"}

    began = time.monotonic()
    played = play(Parallel, lambda *_: turn("ok"), siblings=3, latency=4.0)
    episodes = played.groups[0].episodes
    assert [episode.reward for episode in episodes] == [3.0] * 3
    assert [len(episode.rows) for episode in episodes] == [3] * 3
    assert sum(sum(episode.seconds.values()) for episode in episodes) > 3 * 4.0
    assert time.monotonic() - began < 3 * 3 * 4.0


class Crashing(Counting):
    environ = {"MODE": "crash"}
    resets = 0

    def reset(self, seed: int) -> str:
        type(self).resets += 1
        return super().reset(seed)


def failed(kind: type, script: Any, retries: int = 0) -> BaseException | None:
    """Why an episode of ``kind`` was dropped."""
    with pytest.raises(TooManyFailures) as raised:
        play(kind, script, retries=retries, max_consecutive_failed_groups=1)
    return raised.value.__cause__


def test_a_program_that_crashes_is_the_environments_failure_and_is_retried() -> None:
    before = Crashing.resets
    failure = failed(Crashing, INC, retries=1)
    assert isinstance(failure, EnvironmentFailure) and Crashing.resets == before + 2
    assert "exit code 1: the program is broken" in str(failure)


def test_a_program_past_its_time_limit_is_killed_with_its_children(tmp_path: Path) -> None:
    class Hanging(Counting):
        environ = {"MODE": "hang", "PIDS": str(tmp_path / "pids")}
        time_limit = 6.0

    episode = play_one(Hanging, INC)
    assert episode.stop_reason is StopReason.EPISODE_TIMEOUT and episode.truncated
    assert episode.reward == -1.0 and not any(episode.mask)
    _gone((tmp_path / "pids").read_text().split())


def test_an_episode_past_its_timeout_is_truncated_and_its_program_killed(tmp_path: Path) -> None:
    class Hanging(Counting):
        environ = {"MODE": "hang", "PIDS": str(tmp_path / "pids")}

    episode = play_one(Hanging, INC, episode_timeout=6.0)
    assert episode.stop_reason is StopReason.EPISODE_TIMEOUT and episode.reward == -1.0
    _gone((tmp_path / "pids").read_text().split())


@pytest.mark.skipif(not _end_with_parent(), reason="setpriv --pdeathsig is not here")
def test_a_program_ends_with_a_trainer_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys\n"
        "from envgrad.agents import AgentEndpoint, AgentProgram\n"
        "endpoint = AgentEndpoint(base_url='http://127.0.0.1:9/v1', api_key='k', messages=())\n"
        "asyncio.run(AgentProgram(['sh', '-c', 'echo $$ > $0; exec sleep 600', sys.argv[1]]).run(endpoint))\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "pid")])
    until = time.monotonic() + 60.0
    while not (tmp_path / "pid").exists() or not (pids := (tmp_path / "pid").read_text().split()):
        assert time.monotonic() < until and trainer.poll() is None
        time.sleep(0.02)
    assert _alive(pids[0])
    trainer.kill()
    trainer.wait()
    _gone(pids)


def test_a_program_that_is_not_there_is_named() -> None:
    endpoint = AgentEndpoint(base_url="http://127.0.0.1:9/v1", api_key="k", messages=())
    with pytest.raises(ProgramFailed, match="nowhere-to-be-found"):
        asyncio.run(AgentProgram(["nowhere-to-be-found"]).run(endpoint))


def _gone(pids: list[str]) -> None:
    until = time.monotonic() + 20.0
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < until, f"{pids} still run"
        time.sleep(0.02)


def _alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Agent:
    """An agent in this process; ``work`` is what it does."""

    def reset(self, seed: int) -> str:
        return "Count."

    async def run_agent(self, endpoint: AgentEndpoint) -> None:
        async with client_of(endpoint) as client:
            await self.work(client, endpoint)

    async def work(self, client: openai.AsyncOpenAI, endpoint: AgentEndpoint) -> None:
        raise NotImplementedError

    def get_reward(self) -> float:
        return 1.0


async def chat(client: openai.AsyncOpenAI, *contents: str) -> str:
    messages: Any = [{"role": "user", "content": content} for content in contents]
    answer = await client.chat.completions.create(model="policy", messages=messages)
    return answer.choices[0].message.content or ""


def test_an_agent_that_gives_up_at_a_limit_was_ended_by_it() -> None:
    class Endless(Agent):
        async def work(self, client: openai.AsyncOpenAI, endpoint: AgentEndpoint) -> None:
            while True:
                await chat(client, "more")

    episode = play_one(Endless, lambda *_: turn("ok"), max_turns=3)
    assert episode.stop_reason is StopReason.MAX_TURNS and len(episode.turns) == 3 and episode.reward == 1.0


def test_an_agent_that_compacts_when_told_that_the_context_is_full_goes_on() -> None:
    class Compacting(Agent):
        async def work(self, client: openai.AsyncOpenAI, endpoint: AgentEndpoint) -> None:
            long = "words " * 20
            with pytest.raises(openai.BadRequestError, match="context") as raised:
                await chat(client, long)
            assert raised.value.code == "context_length_exceeded"
            assert await chat(client, "short") == "ok"

    episode = play_one(Compacting, lambda *_: turn("ok"), max_context=40)
    assert episode.stop_reason is StopReason.ANSWER and len(episode.rows) == 1


def test_a_sync_agent_runs_in_a_thread_and_is_left_behind_at_the_timeout() -> None:
    let_go = threading.Event()

    class Blocking(Agent):
        def run_agent(self, endpoint: AgentEndpoint) -> None:  # type: ignore[override]
            client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)
            client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
            let_go.wait(60)

    groups: list[Group] = []
    with world(Blocking, lambda *_: turn("ok"), episode_timeout=5.0, max_consecutive_failed_groups=1) as (
        runner,
        tasks,
        _,
    ):
        runner.on_group = groups.append
        with pytest.raises(TooManyFailures):
            runner.play(tasks, 1, GroupPolicy(num_generations=1))
    let_go.set()
    (episode,) = groups[0].episodes
    assert episode.stop_reason is StopReason.EPISODE_TIMEOUT and episode.reward is None and len(episode.turns) == 1


def test_what_an_agent_raises_is_a_failure_and_its_own_time_limit_is_none() -> None:
    class Broken(Agent):
        async def work(self, client: openai.AsyncOpenAI, endpoint: AgentEndpoint) -> None:
            await chat(client, "hi")
            raise ValueError("lost")

    failure = failed(Broken, lambda *_: turn("ok"))
    assert isinstance(failure, EnvironmentFailure) and "run_agent raised ValueError: lost" in str(failure)

    class Late(Agent):
        async def work(self, client: openai.AsyncOpenAI, endpoint: AgentEndpoint) -> None:
            raise AgentTimeLimit("enough")

    assert play_one(Late, []).stop_reason is StopReason.EPISODE_TIMEOUT


def test_a_samplers_failure_is_the_episodes_even_if_the_agent_swallows_it() -> None:
    class Swallowing(Agent):
        async def work(self, client: openai.AsyncOpenAI, endpoint: AgentEndpoint) -> None:
            for _ in range(2):
                with pytest.raises(openai.InternalServerError):
                    await chat(client, "hi")

    def fail(*_: Any) -> list[int]:
        raise SamplerFailure("no memory")

    failure = failed(Swallowing, fail)
    assert isinstance(failure, SamplerFailure) and str(failure) == "no memory"


def test_an_error_of_ours_while_a_call_is_answered_ends_the_run() -> None:
    class Asking(Agent):
        async def work(self, client: openai.AsyncOpenAI, endpoint: AgentEndpoint) -> None:
            with pytest.raises(openai.InternalServerError):
                await chat(client, "hi")

    def broken(*_: Any) -> list[int]:
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError, match="a bug"):
        play_one(Asking, broken)


def test_a_key_opens_its_own_episode_only_and_only_while_it_is_played() -> None:
    seen: list[AgentEndpoint] = []

    class Curious(Agent):
        async def work(self, client: openai.AsyncOpenAI, endpoint: AgentEndpoint) -> None:
            seen.append(endpoint)
            while len(seen) < 2:
                await asyncio.sleep(0.005)
            other = next(one for one in seen if one.base_url != endpoint.base_url)
            async with client_of(endpoint).with_options(base_url=other.base_url) as wrong:
                with pytest.raises(openai.AuthenticationError):
                    await chat(wrong, "hi")
                with pytest.raises(openai.AuthenticationError):
                    await wrong.models.list()
            models = await client.models.list()
            assert [model.id for model in models.data] == ["policy"]
            assert (await client.models.retrieve("policy")).id == "policy"
            for last in seen[:1] if len(seen) == 3 else ():
                with pytest.raises(openai.NotFoundError):
                    await chat(client_of(last), "hi")

    play(Curious, lambda *_: turn("ok"), siblings=2)
    assert all(one.base_url.startswith("http://127.0.0.1:") for one in seen)
    assert len({one.api_key for one in seen}) == 2 and "api_key" not in repr(seen[0])
    with pytest.raises(httpx.ConnectError):  # the server has ended with the run
        httpx.get(f"{seen[0].base_url}/models")


def test_a_client_that_hangs_up_leaves_nothing_in_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    sample, asked, given_up = ScriptedSampler.sample, threading.Event(), threading.Event()

    async def first_endless(self: ScriptedSampler, *request: Any) -> Any:
        if asked.is_set():
            return await sample(self, *request)
        asked.set()
        try:
            await asyncio.sleep(3600)
        finally:
            given_up.set()

    async def until(event: threading.Event) -> None:
        deadline = time.monotonic() + 20.0
        while not event.is_set():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)

    class Impatient(Agent):
        async def work(self, client: openai.AsyncOpenAI, endpoint: AgentEndpoint) -> None:
            first = asyncio.ensure_future(chat(client, "hi"))
            await until(asked)
            first.cancel()  # which closes its connection
            await until(given_up)
            assert await chat(client, "hi") == "ok"

    monkeypatch.setattr(ScriptedSampler, "sample", first_endless)
    episode = play_one(Impatient, lambda *_: turn("ok"), max_consecutive_failed_groups=1, retries=0)
    assert len(episode.turns) == 1 and len(episode.rows) == 1


def test_the_responses_api_plays_too() -> None:
    class Modern(Agent):
        async def work(self, client: openai.AsyncOpenAI, endpoint: AgentEndpoint) -> None:
            tools: Any = [{"type": "function", "name": "inc", "parameters": {"type": "object", "properties": {}}}]
            items: Any = [{"role": "user", "content": endpoint.prompt}]
            first = await client.responses.create(model="policy", input=items, tools=tools)
            items += [item.model_dump(exclude_none=True) for item in first.output]
            items.append({"type": "function_call_output", "call_id": first.output[0].call_id, "output": "now 2"})  # type: ignore[union-attr]
            stream = await client.responses.create(model="policy", input=items, tools=tools, stream=True)
            text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
            assert text == "fine"

    episode = play_one(Modern, [turn(call("inc", n=2)), turn("fine")])
    assert len(episode.rows) == 1 and len(episode.turns) == 2


def test_bodies_that_are_no_requests_are_refused_in_words() -> None:
    class Sloppy(Agent):
        async def work(self, client: openai.AsyncOpenAI, endpoint: AgentEndpoint) -> None:
            key = {"Authorization": f"Bearer {endpoint.api_key}"}
            async with httpx.AsyncClient(headers=key) as plain:
                url = f"{endpoint.base_url}/chat/completions"
                assert (await plain.post(url, content=b"{")).json()["error"]["code"] == "invalid_json"
                assert (await plain.post(url, content=b"[]")).status_code == 400
                assert (await plain.get(url)).status_code == 405
            with pytest.raises(openai.BadRequestError, match="n=2"):
                await client.chat.completions.create(model="policy", messages=[], n=2)
            strange: Any = [{"role": "tool", "content": "x", "tool_call_id": "1"}] * 2
            assert json.dumps(strange)

    assert play_one(Sloppy, []).reward == 1.0


def test_run_agent_excludes_tools_and_steps() -> None:
    class Both(Agent):
        def step(self, message: str) -> str:
            return message

    with pytest.raises(EnvironmentContractError, match=r"run_agent plays the whole episode, so \['step'\]"):
        play_one(Both, [])


def test_no_call_at_all_is_an_episode_too() -> None:
    class Idle(Agent):
        async def work(self, client: openai.AsyncOpenAI, endpoint: AgentEndpoint) -> None:
            assert endpoint.messages == ({"role": "user", "content": "Count."},)

    episode: Episode = play_one(Idle, [])
    assert episode.reward == 1.0 and not episode.turns and episode.completion_length == 0
    assert episode.token_ids and ids("Count.")[0] in episode.token_ids


def test_nothing_of_ours_runs_on_after_the_run() -> None:
    before = {thread.name for thread in threading.enumerate()}
    play_one(Counting, INC)
    names = {thread.name for thread in threading.enumerate()} - before
    assert not {name for name in names if name.startswith("envgrad-rollouts")}
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    assert not [pid for pid in children if "agent_program" in Path(f"/proc/{pid}/cmdline").read_text()]
