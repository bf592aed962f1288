"""A connection to an MCP server: opened, used and closed on the background loop, by one task, as the protocol's client
demands. A server that is a process of ours ends with its connection."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from envgrad.environments.adapters.background import background_loop, in_background
from envgrad.environments.adapters.extras import require
from envgrad.environments.foreign_tools import foreign_tool
from envgrad.environments.tools import ToolSpec
from envgrad.errors import ConfigurationError, EnvironmentFailure, ToolCallError, first_line

if TYPE_CHECKING:
    from mcp import ClientSession
    from mcp.types import CallToolResult, ContentBlock

ServerFactory: TypeAlias = Callable[[], Any]
"""-> a server object of the package ``mcp`` (``FastMCP`` or ``Server``), which then lives in this process"""

METHOD = "_call_tool"
CLOSE_SECONDS = 10.0
_QUOTED = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class MCPServer:
    """Where tools come from. Exactly one of ``command``, ``factory`` and ``url``.

    Raises:
        ConfigurationError: none or several of them, an option that cannot act, or the package ``mcp`` is not there.
    """

    command: Sequence[str] | None = None
    """a program that speaks MCP over stdin and stdout; it is started, and ended with its connection"""
    factory: ServerFactory | None = None
    """makes a server object that is served in this process"""
    url: str | None = None
    """somebody else's server, over streamable HTTP"""
    shared: bool = False
    """the user's word that episodes may share one server, and with it its state"""
    environ: Mapping[str, str] = field(default_factory=dict)
    """of a started program, beside what the protocol passes on (``PATH``, ``HOME`` and their like)"""
    cwd: str | None = None
    start_timeout: float = 30.0
    """seconds until a server has listed its tools"""
    _common: _Common = field(init=False, repr=False, compare=False, default_factory=lambda: _Common())

    def __post_init__(self) -> None:
        given = [name for name in ("command", "factory", "url") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigurationError(
                f"an MCP server is one of command=, server_factory= and url=, got {given or 'none'}"
            )
        if self.command is not None and (isinstance(self.command, str) or not self.command):
            raise ConfigurationError(f"command={self.command!r} must be a list: the program and its arguments")
        if self.factory is not None and not callable(self.factory):
            raise ConfigurationError(f"server_factory={self.factory!r} must make a server when called")
        if self.url is not None and not self.shared:
            raise ConfigurationError(
                f"url={self.url!r} is one server for all episodes: what one of them does, its siblings may see. Say "
                "shared=True if its tools keep no state, or start one server per episode with command= or "
                "server_factory="
            )
        if self.command is None and (self.environ or self.cwd is not None):
            raise ConfigurationError("environ and cwd cannot act without command=: no program is started")
        if not self.start_timeout > 0:
            raise ConfigurationError(f"start_timeout={self.start_timeout} must be above 0 seconds")
        require("mcp", extra="mcp", what="MCPEnvironment")

    async def take(self) -> Link:
        """A connection: a new one, or the common one. On the background loop.

        Raises:
            EnvironmentFailure: it cannot be started, is no MCP server, or takes longer than ``start_timeout``.
        """
        if not self.shared:
            link = Link(self)
            await link.open()
            return link
        common = self._common
        async with common.opening:
            if common.link is None or not common.link.alive:
                link = Link(self)
                await link.open()
                common.link = link
            common.link.holders += 1
            return common.link


@dataclass(slots=True, eq=False)
class _Common:
    """The connection of a shared server."""

    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    link: Link | None = None


class Link:
    """One connection. ``call`` may be awaited on any loop; all else runs on the background loop."""

    def __init__(self, server: MCPServer) -> None:
        self.server = server
        self.holders = 0 if server.shared else 1
        self.tools: tuple[ToolSpec, ...] = ()
        self._session: ClientSession | None = None
        self._stop: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None
        self._said: IO[str] | None = None
        self._words = ""

    @property
    def alive(self) -> bool:
        return self._session is not None and self._task is not None and not self._task.done()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """What the tool ``name`` answers, as text.

        Raises:
            ToolCallError: the tool, or the server, says that the call failed.
            EnvironmentFailure: the server is gone.
        """
        return result_text(await self.result(name, arguments))

    async def result(self, name: str, arguments: Mapping[str, Any]) -> CallToolResult:
        """The tool's answer as the protocol has it; errors as in ``call``."""
        from mcp import McpError
        from mcp.types import CONNECTION_CLOSED

        session = self._session
        if session is None or not self.alive:
            raise EnvironmentFailure(f"the MCP server is gone{self._last_words()}")
        try:
            result = await in_background(session.call_tool(name, dict(arguments)))
        except McpError as error:
            if error.error.code == CONNECTION_CLOSED:
                raise EnvironmentFailure(f"the MCP server ended while {name} ran{self._last_words()}") from error
            raise ToolCallError(str(error)) from error
        if result.isError:
            raise ToolCallError(result_text(result))
        return result

    async def give_back(self) -> None:
        """One holder less; without any, the connection ends, and the server if it was started for it."""
        self.holders -= 1
        if self.holders <= 0:
            await self._end()

    async def _end(self) -> None:
        if self._stop is not None:
            self._stop.set()
        if self._task is not None:
            await asyncio.wait({self._task})

    # -- on the background loop

    async def open(self) -> None:
        """Connect, and list the tools.

        Raises:
            EnvironmentFailure: it cannot be started, is no MCP server, or takes longer than ``start_timeout``.
        """
        self._stop = asyncio.Event()
        ready: asyncio.Future[None] = background_loop().create_future()
        self._task = asyncio.ensure_future(self._live(ready))
        self._task.add_done_callback(_seen)
        try:
            await asyncio.wait({ready, self._task}, timeout=self.server.start_timeout, return_when="FIRST_COMPLETED")
        finally:
            if not ready.done():
                self._task.cancel()
        if ready.done():
            return
        why = f"it did not answer within {self.server.start_timeout} s"
        if self._task.done() and not self._task.cancelled() and (error := self._task.exception()) is not None:
            inner = _innermost(error)
            why = f"{type(inner).__name__}: {first_line(inner)}"
        await self._end()
        raise EnvironmentFailure(f"the MCP server cannot be used: {why}{self._last_words()}")

    async def _live(self, ready: asyncio.Future[None]) -> None:
        """The connection's whole life: its context managers are entered and left by one task."""
        if self._stop is None:
            raise AssertionError("a link lives after it was opened")
        async with AsyncExitStack() as stack:
            session = await self._connect(stack)
            listed = await session.list_tools()
            tools = list(listed.tools)
            while listed.nextCursor:
                listed = await session.list_tools(cursor=listed.nextCursor)
                tools += listed.tools
            self.tools = tuple(
                foreign_tool(tool.name, tool.description or "", tool.inputSchema, method=METHOD) for tool in tools
            )
            self._session = session
            ready.set_result(None)
            await self._stop.wait()
        self._session = None

    async def _connect(self, stack: AsyncExitStack) -> ClientSession:
        from mcp import ClientSession, StdioServerParameters
        from mcp.client.stdio import get_default_environment, stdio_client

        server = self.server
        if server.factory is not None:
            from mcp.shared.memory import create_connected_server_and_client_session

            return await stack.enter_async_context(create_connected_server_and_client_session(server.factory()))
        if server.url is not None:
            from mcp.client.streamable_http import streamable_http_client

            read, write, _ = await stack.enter_async_context(streamable_http_client(server.url))
        else:
            program, *arguments = server.command or ()
            said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - the stack closes it
            self._said = stack.enter_context(said)
            stack.callback(self._read_words)
            parameters = StdioServerParameters(
                command=program, args=arguments, env={**get_default_environment(), **server.environ}, cwd=server.cwd
            )
            read, write = await stack.enter_async_context(stdio_client(parameters, errlog=self._said))
        session = await stack.enter_async_context(ClientSession(read, write))
        await session.initialize()
        return session

    def _read_words(self) -> None:
        if self._said is not None and not self._said.closed:
            size = self._said.seek(0, os.SEEK_END)
            self._said.seek(max(0, size - _QUOTED))
            self._words = self._said.read().strip()

    def _last_words(self) -> str:
        """The end of what a started program wrote to stderr."""
        self._read_words()
        return f"; it said: {self._words}" if self._words else ""


def _seen(task: asyncio.Task[None]) -> None:
    """Its error is told by whoever waits; asyncio need not."""
    if not task.cancelled():
        task.exception()


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def result_text(result: CallToolResult) -> str:
    """A tool's answer as a model reads it: its texts, else its structured content as JSON.

    Example:
        >>> from mcp.types import CallToolResult, TextContent
        >>> result_text(CallToolResult(content=[TextContent(type="text", text=word) for word in ("a", "b")]))
        'a\\nb'
    """
    parts = [_block_text(block) for block in result.content]
    if not parts and result.structuredContent is not None:
        return json.dumps(result.structuredContent, ensure_ascii=False)
    return "\n".join(parts)


def _block_text(block: ContentBlock) -> str:
    if block.type == "text":
        return block.text
    if block.type == "resource" and isinstance(text := block.model_dump()["resource"].get("text"), str):
        return text
    return f"({block.type} content is not shown)"
