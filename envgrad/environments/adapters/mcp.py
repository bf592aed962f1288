"""The tools of an MCP server as an environment: one server per episode, so that no episode sees another's state."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from envgrad.environments.adapters.background import in_background, obtain_in_background, run_in_background
from envgrad.environments.adapters.mcp_link import CLOSE_SECONDS, Link, MCPServer, ServerFactory
from envgrad.environments.tools import ToolSpec
from envgrad.errors import ConfigurationError, EnvironmentFailure

if TYPE_CHECKING:
    from mcp.types import CallToolResult

Prompt: TypeAlias = str | Callable[..., Any]
"""a text; or a function of ``(server)`` or ``(server, seed)``, sync or async, that prepares the task and returns it"""
Reward: TypeAlias = Callable[..., Any]
"""a function of the episode (``server``), sync or async"""

__all__ = ["MCPEnvironment", "MCPEpisode", "MCPServer"]


class MCPEpisode:
    """An environment whose tools are an MCP server's. Subclass it where two functions do not say enough::

        class Notes(MCPEpisode):
            def __init__(self):
                super().__init__(MCPServer(command=["python", "notes_server.py"]))

            async def reset(self, seed):
                await self.restart()                               # a server of this episode's own
                await self.call("add", text=f"secret {seed % 10}")
                return "Find the secret in the notes, and file it."

            async def score(self):
                return float("secret" in await self.call("filed"))

    The server ends when the episode has been scored, when the next one starts, and when the instance is closed.

    Args:
        server: Where the tools come from.
        only: The tools that the model sees; None: all. ``call`` reaches the others too.

    Raises:
        ConfigurationError: ``only`` names no tool.
    """

    def __init__(self, server: MCPServer, *, only: Sequence[str] | None = None) -> None:
        if only is not None and (isinstance(only, str) or not only):
            raise ConfigurationError(f"tools={only!r} must be a list of names; None shows all")
        self._server = server
        self._only = only
        self._link: Link | None = None

    async def restart(self) -> None:
        """End this episode's server, and start a new one. Call it first in ``reset``.

        Raises:
            EnvironmentFailure: it cannot be started, or lacks a tool that ``only`` names.
        """
        await self.stop()
        if self._link is None or not self._link.alive:
            self.close()
            self._link = await obtain_in_background(self._server.take(), give_up=_give_up)
        link = self._link
        missing = sorted(set(self._only or ()) - {tool.name for tool in link.tools})
        if missing:
            raise EnvironmentFailure(f"the MCP server has no {missing}, only {[tool.name for tool in link.tools]}")

    async def call(self, name: str, /, **arguments: Any) -> str:
        """Call a tool of the server, outside of the model's turns.

        Raises:
            ToolCallError: the tool says that it failed.
            EnvironmentFailure: the server is gone.
        """
        return await self._now().call(name, arguments)

    async def result(self, name: str, /, **arguments: Any) -> CallToolResult:
        """``call``, with the answer as the protocol has it: ``structuredContent``, blocks, resources."""
        return await self._now().result(name, arguments)

    async def score(self) -> float | Mapping[str, float] | None:
        """The episode's reward; the server still runs."""
        raise NotImplementedError(f"{type(self).__name__} must define 'async def score(self)', the episode's reward")

    async def get_reward(self) -> float | Mapping[str, float] | None:
        """``score``, and the end of the server."""
        try:
            return await self.score()
        finally:
            await self.stop()

    async def stop(self) -> None:
        """End the server; a shared one ends with the last instance."""
        if self._link is not None and not self._server.shared:
            link, self._link = self._link, None
            await in_background(link.give_back())

    @property
    def tools(self) -> Sequence[ToolSpec]:
        """What the model sees: typed by the server's schemas."""
        listed = () if self._link is None else self._link.tools
        return [tool for tool in listed if self._only is None or tool.name in self._only]

    def start_state(self) -> object:
        """Siblings' starts are compared by openings and tools: what is in a server cannot be seen."""
        return [tool.schema for tool in self.tools]

    def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            with suppress(TimeoutError):
                run_in_background(link.give_back(), timeout=CLOSE_SECONDS)

    async def _call_tool(self, name: str, /, **arguments: Any) -> str:
        return await self._now().call(name, arguments)

    def _now(self) -> Link:
        if self._link is None:
            raise EnvironmentFailure("no MCP server runs; call 'await self.restart()' first in reset")
        return self._link


class _Played(MCPEpisode):
    """An episode of ``MCPEnvironment``: prompt and reward are functions."""

    def __init__(self, environment: MCPEnvironment) -> None:
        super().__init__(environment.server, only=environment.tools)
        self._environment = environment
        self.determinism: str | None = environment.determinism

    async def reset(self, seed: int) -> object:
        await self.restart()
        prompt = self._environment.prompt
        if not callable(prompt):
            return prompt
        arguments = (self, seed) if len(inspect.signature(prompt).parameters) > 1 else (self,)
        return await _awaited(prompt(*arguments))

    async def score(self) -> float | Mapping[str, float] | None:
        reward: float | Mapping[str, float] | None = await _awaited(self._environment.reward(self))
        return reward


def _give_up(link: Link) -> None:
    """Nobody waits for a server that has just been started."""
    task = asyncio.ensure_future(link.give_back())
    _ending.add(task)
    task.add_done_callback(_ending.discard)


_ending: set[asyncio.Task[None]] = set()
"""asyncio keeps no task alive by itself"""


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


@dataclass(frozen=True)
class MCPEnvironment:
    """An ``environment_factory`` over an MCP server: its tools are the model's, typed by the server's own schemas.

    Each episode has a server of its own, started by ``reset`` and ended when the episode is scored, so that nothing one
    sibling does is seen by another. Errors of tools go back to the model as text. A server that dies is the
    environment's failure: the episode is retried.

    Args:
        server_factory: makes a server object of the package ``mcp``, which lives in this process.
        command: or a program that speaks MCP over stdin and stdout.
        url: or somebody else's server over HTTP; it needs ``shared=True``.
        shared: one server for all episodes. Its state, if it has any, is then everybody's.
        prompt: the task as a text, or a function of ``(server)`` or ``(server, seed)``, sync or async, which may
            prepare it with ``await server.call("tool", argument=...)`` and returns the prompt.
        reward: a function of ``(server)``, sync or async.
        tools: names of the tools that the model sees; None: all.
        environ, cwd: of the program.
        start_timeout: seconds until a server has listed its tools.
        determinism: what decides an episode beside the actions, which ``check_environment`` compares with what it sees:
            ``"seeded"`` where ``prompt`` prepares the server by the seed, ``"fixed"`` where nothing varies, ``"none"``
            where the server does as it likes. None says nothing.

    Raises:
        ConfigurationError: an option that cannot work.

    Example:
        >>> from mcp.server.fastmcp import FastMCP
        >>> def notes():
        ...     server, kept = FastMCP("notes"), []
        ...     @server.tool()
        ...     def keep(text: str) -> str:
        ...         kept.append(text)
        ...         return f"{len(kept)} kept"
        ...     return server
        >>> async def count(server):
        ...     return float((await server.call("keep", text="last")).split()[0])
        >>> make = MCPEnvironment(notes, prompt="Keep two notes.", reward=count)
        >>> async def play():
        ...     episode = make()
        ...     prompt = await episode.reset(seed=1)
        ...     print(prompt, [tool.signature for tool in episode.tools])
        ...     await episode.call("keep", text="first")
        ...     return await episode.get_reward()
        >>> asyncio.run(play())
        Keep two notes. ['keep(text: string)']
        2.0
    """

    server_factory: ServerFactory | None = None
    _: KW_ONLY
    command: Sequence[str] | None = None
    url: str | None = None
    shared: bool = False
    prompt: Prompt
    reward: Reward
    tools: Sequence[str] | None = None
    environ: Mapping[str, str] = field(default_factory=dict, hash=False)
    cwd: str | None = None
    start_timeout: float = 30.0
    determinism: Literal["fixed", "seeded", "none"] | None = None
    server: MCPServer = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not callable(self.reward):
            raise ConfigurationError(f"reward={self.reward!r} must be a function of the episode's server")
        if not callable(self.prompt) and not isinstance(self.prompt, str):
            raise ConfigurationError(f"prompt={self.prompt!r} must be a text or a function")
        if self.determinism not in (None, "fixed", "seeded", "none"):
            raise ConfigurationError(f"determinism={self.determinism!r} must be one of fixed, seeded, none, or None")
        server = MCPServer(
            command=self.command, factory=self.server_factory, url=self.url, shared=self.shared, environ=self.environ,
            cwd=self.cwd, start_timeout=self.start_timeout,
        )  # fmt: skip
        object.__setattr__(self, "server", server)

    @property
    def __name__(self) -> str:
        return "mcp"

    def __call__(self) -> MCPEpisode:
        return _Played(self)
