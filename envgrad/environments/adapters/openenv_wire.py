"""OpenEnv's wire protocol, as a client speaks it: JSON over HTTP for what a server is, a WebSocket for each session.

::

    GET  /schema                    {"action": <JSON schema>, ...}
    GET  /list_environments         ["name"]                        where the server has tasks:
    GET  /{name}/splits             [{"name": "train", ...}]
    POST /{name}/num_tasks          {"split": "train"} -> {"num_tasks": 8}
    WS   /ws    {"type": "reset" | "step", "data": {...}}           one socket is one instance of the environment
             -> {"type": "observation", "data": {"observation": {...}, "reward": 0.5, "done": false}}
             -> {"type": "error", "data": {"message": "...", "code": "VALIDATION_ERROR", ...}}
                {"type": "mcp", "data": <JSON-RPC>} -> {"type": "mcp", "data": <JSON-RPC>}
                {"type": "state"} -> {"type": "state", "data": {...}}

A server that is full says so (``CAPACITY_REACHED``) in answer to the first message, and closes the socket.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit, urlunsplit

from envgrad.environments.adapters.background import background_loop
from envgrad.errors import ConfigurationError, EnvironmentFailure, first_line

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

Json: TypeAlias = dict[str, Any]

FULL = "CAPACITY_REACHED"
INVALID = "VALIDATION_ERROR"
RAISED = "EXECUTION_ERROR"

MAX_MESSAGE_BYTES = 100 * 1024 * 1024
CLOSE_SECONDS = 2.0
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 1.0
"""seconds between two tries to get a session of a full server; doubled from try to try"""


class Refused(Exception):
    """The server answered with an error; the session goes on, unless it is full or broken."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.code = str(data.get("code", "UNKNOWN"))
        self.message = str(data.get("message", "no message"))
        self.data = data
        super().__init__(f"{self.message} ({self.code})")

    @property
    def problems(self) -> str:
        """What was wrong with an action, field by field, for a model to read.

        Example:
            >>> Refused({"message": "Invalid message", "errors": [{"loc": ["guess"], "msg": "too small"}]}).problems
            'guess: too small'
        """
        errors = self.data.get("errors")
        if not isinstance(errors, list) or not errors:
            return self.message
        return "; ".join(
            f"{'.'.join(map(str, error.get('loc', ()))) or 'the action'}: {error.get('msg', 'does not fit')}"
            for error in errors
            if isinstance(error, Mapping)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a server is.

    Example:
        >>> Address.of("https://host/base/").socket, Address.of("ws://127.0.0.1:8000").http
        ('wss://host/base/ws', 'http://127.0.0.1:8000')
    """

    http: str
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, url: str, headers: Mapping[str, str] | None = None) -> Address:
        """
        Raises:
            ConfigurationError: not the address of a server.
        """
        parts = urlsplit(url) if isinstance(url, str) else None
        scheme = {"ws": "http", "wss": "https"}.get(parts.scheme, parts.scheme) if parts else ""
        if parts is None or scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError(f"url={url!r} must be a server's address, as http://127.0.0.1:8000")
        base = urlunsplit((scheme, parts.netloc, parts.path.rstrip("/"), "", ""))
        return cls(http=base, headers=tuple((headers or {}).items()))

    @property
    def socket(self) -> str:
        return f"ws{self.http.removeprefix('http')}/ws"

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine, where no proxy is asked."""
        host = urlsplit(self.http).hostname or ""
        try:
            return host == "localhost" or ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False


def fetch(address: Address, path: str, body: Json | None = None, *, timeout: float) -> object:
    """The JSON that the server answers to GET, or to POST with ``body``; None where it has no such path or no tasks.

    Raises:
        EnvironmentFailure: it cannot be reached, or answers with another error, or with what is no JSON.
    """
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **dict(address.headers)}
    request = urllib.request.Request(address.http + path, data=data, headers=headers)
    proxies = urllib.request.ProxyHandler({} if address.is_local else None)
    try:
        with urllib.request.build_opener(proxies).open(request, timeout=timeout) as answer:
            found: object = json.loads(answer.read())
            return found
    except urllib.error.HTTPError as error:
        with error:
            if error.code in (404, 405, 501):
                return None
            told = error.read(500).decode("utf-8", "replace")
        raise EnvironmentFailure(f"{address.http}{path} answered {error.code}: {told}") from error
    except (OSError, ValueError) as error:
        raise EnvironmentFailure(
            f"no OpenEnv server answers at {address.http}{path} ({first_line(error)}): start it, or give its url"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds that things may take."""

    connect: float
    full: float
    """a server without a free place may refuse this long"""


class Session:
    """One environment on the server: one socket. Its coroutines run on the background loop."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    @classmethod
    async def open(cls, address: Address, reset: Json, patience: Patience) -> tuple[Session, Json]:
        """A session and the first observation. A full server is asked again, ever less often, until patience ends.

        Raises:
            EnvironmentFailure: no connection, no place, or the environment could not be made or reset.
        """
        began, wait = time.monotonic(), _FIRST_WAIT
        while True:
            session = await cls._connect(address, patience)
            first: Json | None = None
            try:
                if session is not None:
                    first = await session.ask("reset", reset)
                    return session, first
                refusal = Refused({"message": "the server takes no more connections", "code": FULL})
            except Refused as refused:
                refusal = refused
            finally:
                if session is not None and first is None:
                    await session.close()
            if refusal.code != FULL:
                raise EnvironmentFailure(f"{address.http} could not reset: {refusal}")
            if time.monotonic() - began + wait > patience.full:
                raise EnvironmentFailure(_full(address, refusal, patience.full))
            await asyncio.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)

    @classmethod
    async def _connect(cls, address: Address, patience: Patience) -> Session | None:
        """A connected session; None if the server says that it has no place."""
        from websockets.asyncio.client import connect
        from websockets.exceptions import InvalidHandshake, InvalidStatus

        try:
            connection = await connect(
                address.socket,
                additional_headers=dict(address.headers),
                open_timeout=patience.connect,
                close_timeout=CLOSE_SECONDS,
                max_size=MAX_MESSAGE_BYTES,
                ping_timeout=None,  # an environment that computes for long does not answer pings
                compression=None,
                proxy=None if address.is_local else True,
            )
        except InvalidStatus as error:
            if error.response.status_code in (429, 503):
                return None
            raise EnvironmentFailure(f"{address.socket} refused the connection: {error}") from error
        except (OSError, TimeoutError, InvalidHandshake) as error:
            raise EnvironmentFailure(
                f"no OpenEnv server answers at {address.socket} ({first_line(error)}): start it, or give its url"
            ) from error
        return cls(connection)

    async def ask(self, kind: str, data: Json | None = None) -> Json:
        """Send one message and read its answer.

        Raises:
            Refused: the server answered with an error.
            EnvironmentFailure: the connection was lost, or the answer is no message of the protocol.
        """
        from websockets.exceptions import ConnectionClosed

        # A full server may have closed already; what it said is still there to be read.
        refused: ConnectionClosed | None = None
        try:
            await self._connection.send(json.dumps({"type": kind} if data is None else {"type": kind, "data": data}))
        except ConnectionClosed as error:
            refused = error
        try:
            raw = await self._connection.recv()
        except ConnectionClosed as error:
            why = first_line(refused or error)
            raise EnvironmentFailure(f"the server closed the connection during {kind}: {why}") from error
        return _read(raw, kind)

    async def list_tools(self) -> list[Json]:
        """The tools of an environment that serves MCP.

        Raises:
            EnvironmentFailure: it serves none, or as ``ask``.
        """
        answer = await self.ask("mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}})
        result = answer.get("result")
        tools = result.get("tools") if isinstance(result, dict) else None
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise EnvironmentFailure(f"the server listed no tools: {answer.get('error', answer)!r:.300}")
        return tools

    async def close(self) -> None:
        """Say goodbye and close; never raises."""
        from websockets.exceptions import ConnectionClosed

        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._connection.send('{"type": "close"}')
                await self._connection.close()
        except (ConnectionClosed, TimeoutError, OSError):
            self._connection.transport.abort()

    def drop(self) -> None:
        """Close without a word, from any thread: an answer may still be on its way, and nobody would read it."""
        background_loop().call_soon_threadsafe(self._connection.transport.abort)


def _read(raw: str | bytes, kind: str) -> Json:
    try:
        message = json.loads(raw)
    except ValueError:
        message = None
    data = message.get("data") if isinstance(message, dict) else None
    if not isinstance(message, dict) or not isinstance(data, dict):
        raise EnvironmentFailure(f"the server answered {kind} with what is no message of OpenEnv: {raw!r:.200}")
    if message.get("type") == "error":
        raise Refused(data)
    return data


def _full(address: Address, refusal: Refused, seconds: float) -> str:
    most = refusal.data.get("max_sessions")
    places = f"its {most} places are taken" if most is not None else refusal.message
    return (
        f"{address.http} had no place for a session within {seconds:g} s: {places}. A group needs one for each of its "
        "num_generations: raise the server's max_concurrent_envs, or lower max_concurrent_episodes to it"
    )
