"""Tools of MCP servers: one server per episode, typed tools, errors as text, nothing left behind."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")

from mcp.server.fastmcp import FastMCP

from envgrad import ConfigurationError, check_environment
from envgrad.environments.adapters import MCPEnvironment, MCPEpisode, MCPServer
from envgrad.errors import EnvironmentFailure, ToolCallError, TooManyFailures
from helpers.world import call, play, play_one, turn

SERVER = [sys.executable, str(Path(__file__).parents[2] / "helpers" / "notes_server.py")]


def notes() -> FastMCP:
    """A server with state, in this process."""
    server, kept = FastMCP("notes", log_level="ERROR"), []

    @server.tool()
    def keep(text: str) -> str:
        """Keep a note."""
        if not text:
            raise ValueError("a note needs a text")
        kept.append(text)
        return f"{len(kept)} kept"

    @server.tool()
    def listed() -> str:
        """All notes."""
        return "|".join(kept)

    return server


async def first_note(server: MCPEpisode, seed: int) -> str:
    await server.call("keep", text=f"secret {seed % 7}")
    return "Keep two notes."


async def count(server: MCPEpisode) -> float:
    return float(len((await server.call("listed")).split("|")))


def environment(**changes: Any) -> MCPEnvironment:
    options: dict[str, Any] = {"prompt": first_note, "reward": count, "tools": ["keep"]}
    if not changes.keys() & {"command", "url"}:
        changes.setdefault("server_factory", notes)
    return MCPEnvironment(**(options | changes))


KEEP = [turn(call("keep", text="a")), turn(call("keep", text="b"), call("keep", text="c")), turn("Done.")]


def test_each_episode_has_a_server_of_its_own() -> None:
    played = play(environment(), KEEP, siblings=3, groups=2, consistency="require")
    for group in played.groups:
        assert [episode.reward for episode in group.episodes] == [4.0] * 3
        for episode in group.episodes:
            assert [one.content for one in episode.turns[1].outcomes] == ["3 kept", "4 kept"]
            assert [tool["function"]["name"] for tool in episode.tools] == ["keep"]


def test_a_shared_server_is_the_users_word() -> None:
    played = play(environment(shared=True), KEEP, siblings=2)
    assert max(episode.reward or 0.0 for episode in played.groups[0].episodes) > 4.0
    with pytest.raises(ConfigurationError, match="Say shared=True"):
        MCPServer(url="http://127.0.0.1:1/mcp")
    with pytest.raises(ConfigurationError, match="is one of command"):
        MCPServer(command=SERVER, factory=notes)
    with pytest.raises(ConfigurationError, match="environ and cwd cannot act"):
        environment(environ={"A": "b"})
    with pytest.raises(ConfigurationError, match="must be a function"):
        environment(reward=3)


def test_what_decides_the_task_is_declared_and_probed() -> None:
    report = check_environment(environment(tools=["listed"], determinism="seeded"), groups=3)
    assert report.ok and str(report.determinism) == report.declared == "seeded", str(report)
    # A server that all share remembers: episodes are not decided by their seed.
    report = check_environment(environment(tools=["listed"], shared=True, determinism="seeded"), groups=2)
    assert not report.ok and str(report.determinism) == "none", str(report)
    with pytest.raises(ConfigurationError, match="determinism='task' must be one of"):
        environment(determinism="task")


def test_tools_are_typed_by_the_servers_schemas_and_errors_are_text(tmp_path: Path) -> None:
    async def length(server: MCPEpisode) -> float:
        return float(len(await server.call("listed")))

    pids = tmp_path / "pids"
    make = MCPEnvironment(
        command=SERVER, environ={"PIDS": str(pids)}, prompt="Keep notes.", reward=length, tools=["keep"]
    )
    script = [
        turn(call("keep", text="a", where="left")),
        turn(call("keep", text="a", times="two")),
        turn(call("keep", text="")),
        turn(call("listed")),
        turn(call("keep", text="xy", where="top", times=2)),
        turn("Done."),
    ]
    episode = play_one(make, script)
    contents = [one.outcomes[0].content for one in episode.turns[:-1]]
    assert "where" in contents[0] and "times" in contents[1]
    assert "a note needs a text" in contents[2] and "listed" in contents[3] and contents[4] == "2 kept"
    assert [one.outcomes[0].ok for one in episode.turns[:-1]] == [False] * 4 + [True]
    assert episode.reward == float(len("xy|xy"))
    parameters = episode.tools[0]["function"]["parameters"]
    assert parameters["properties"]["where"]["enum"] == ["top", "bottom"] and parameters["required"] == ["text"]
    gone(pids)


def gone(pids: Path) -> None:
    """All processes that were started have ended."""
    started = pids.read_text().split()
    assert started
    until = time.monotonic() + 10.0
    while any(Path(f"/proc/{pid}").exists() for pid in started):
        assert time.monotonic() < until, f"{started} still run"
        time.sleep(0.02)


def test_a_server_that_dies_is_the_environments_failure_and_leaves_no_process(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    make = environment(command=SERVER, environ={"PIDS": str(pids)}, tools=None)
    with pytest.raises(TooManyFailures) as raised:
        play(make, [turn(call("crash")), turn("Done.")], retries=1, max_consecutive_failed_groups=1)
    assert isinstance(raised.value.__cause__, EnvironmentFailure) and "MCP server" in str(raised.value.__cause__)
    assert len(pids.read_text().split()) == 2
    gone(pids)


def test_a_program_that_is_no_server_says_what_it_said() -> None:
    async def start(program: str, timeout: float = 30.0) -> None:
        episode = MCPEpisode(MCPServer(command=[sys.executable, "-c", program], start_timeout=timeout))
        await episode.restart()

    with pytest.raises(EnvironmentFailure, match=r"cannot be used.*no such thing"):
        asyncio.run(start("raise SystemExit('no such thing')"))
    with pytest.raises(EnvironmentFailure, match=r"did not answer within 0\.5 s"):
        asyncio.run(start("import time; time.sleep(60)", timeout=0.5))
    with pytest.raises(EnvironmentFailure, match="cannot be used"):
        asyncio.run(MCPEpisode(MCPServer(command=["/no/such/program"])).restart())
    with pytest.raises(EnvironmentFailure, match=r"has no \['nope'\]"):
        asyncio.run(MCPEpisode(MCPServer(factory=notes), only=["nope"]).restart())


def test_a_subclass_draws_its_task_and_scores() -> None:
    class Notes(MCPEpisode):
        def __init__(self) -> None:
            super().__init__(MCPServer(factory=notes))

        async def reset(self, seed: int) -> str:
            await self.restart()
            await self.call("keep", text=f"secret {seed}")
            return "Read the notes."

        async def score(self) -> float:
            with pytest.raises(ToolCallError, match="needs a text"):
                await self.call("keep", text="")
            return float("secret" in await self.call("listed"))

    episode = play_one(Notes, [turn(call("listed")), turn("Done.")])
    assert episode.reward == 1.0 and episode.turns[0].outcomes[0].content.startswith("secret ")
    report = check_environment(environment())
    assert report.ok, str(report)
