"""The HTTP side: routes, keys, streams. starlette and uvicorn come with the extra ``envgrad[agents]``."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from envgrad.agents.endpoint import MODEL
from envgrad.agents.responses import read_responses_request, response_body, response_events
from envgrad.agents.wire import ApiError, ChatRequest, Reply, completion_body, completion_chunks, read_request
from envgrad.errors import ConfigurationError

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

_KEEP_ALIVE = 600
"""seconds; an agent's tools may take long between two calls"""


def check_installed() -> None:
    """
    Raises:
        ConfigurationError: names what is missing, and the extra.
    """
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"an environment with run_agent needs {' and '.join(missing)}: pip install 'envgrad[agents]'"
        )


class Gate(Protocol):
    """Who admits requests to episodes and answers them: ``host.LoopbackHost``."""

    def admit(self, name: str, key: str) -> Any: ...

    def begin_answer(self, door: Any, request: ChatRequest) -> asyncio.Task[Reply]: ...


class Server:
    """One uvicorn server on the running loop, on a free port.

    Args:
        gate: Admits and answers.
        address: The interface to listen on.
    """

    def __init__(self, gate: Gate, address: str) -> None:
        self._gate = gate
        self._address = address
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._base = ""

    async def start(self) -> str:
        """Start it if it does not run; its ``http://address:port``."""
        async with self._lock:
            if self._task is None or self._task.done():
                listener = socket.create_server((self._address, 0))
                server = _uvicorn(_application(self._gate))
                self._task = asyncio.ensure_future(_serve(server, listener))
                while not server.started and not self._task.done():
                    await asyncio.sleep(0.001)
                if self._task.done():
                    self._task.result()
                self._base = f"http://{self._address}:{listener.getsockname()[1]}"
        return self._base

    async def stop(self) -> None:
        """End it, where it is not to live as long as its loop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})


def _uvicorn(application: Starlette) -> uvicorn.Server:
    import uvicorn

    config = uvicorn.Config(
        application, log_config=None, access_log=False, lifespan="off", ws="none", timeout_keep_alive=_KEEP_ALIVE
    )
    return uvicorn.Server(config)


async def _serve(server: uvicorn.Server, listener: socket.socket) -> None:
    """Serve until cancelled. Never by uvicorn's own signal handlers: they are the main thread's."""
    try:
        await server.serve(sockets=[listener])
    finally:
        if server.started:
            server.force_exit = True  # connections that are kept alive are not waited for
            await server.shutdown(sockets=[listener])
        listener.close()  # after the loop has let go of it: a socket that gets its number next would be taken for it


def _application(gate: Gate) -> Starlette:
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def models(request: Request) -> Response:
        gate.admit(request.path_params["name"], _key(request))
        model = {"id": MODEL, "object": "model", "created": int(time.time()), "owned_by": "envgrad"}
        if "model" in request.path_params:
            return JSONResponse(model)
        return JSONResponse({"object": "list", "data": [model]})

    async def chat(request: Request) -> Response:
        door = gate.admit(request.path_params["name"], _key(request))
        asked = read_request(await _body(request))
        reply = await _answer(gate, door, asked, request)
        if asked.stream:
            return _stream(completion_chunks(reply, include_usage=asked.stream_usage))
        return JSONResponse(completion_body(reply))

    async def responses(request: Request) -> Response:
        door = gate.admit(request.path_params["name"], _key(request))
        asked = read_responses_request(await _body(request))
        reply = await _answer(gate, door, asked, request)
        if asked.stream:
            return _stream(response_events(reply))
        return JSONResponse(response_body(reply))

    root = "/episodes/{name}/v1"
    return Starlette(
        routes=[
            Route(f"{root}/models", _errors_told(models)),
            Route(f"{root}/models/{{model:path}}", _errors_told(models)),
            Route(f"{root}/chat/completions", _errors_told(chat), methods=["POST"]),
            Route(f"{root}/responses", _errors_told(responses), methods=["POST"]),
        ]
    )


def _errors_told(handle: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    from starlette.responses import JSONResponse

    async def told(request: Request) -> Response:
        try:
            return await handle(request)
        except ApiError as error:
            # OpenAI's clients repeat a 500 unless they are told not to.
            return JSONResponse(error.body(), status_code=error.status, headers={"x-should-retry": "false"})

    return told


def _key(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("api-key", "")


async def _body(request: Request) -> object:
    try:
        return json.loads(await request.body())
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error


async def _answer(gate: Gate, door: Any, asked: ChatRequest, request: Request) -> Reply:
    """The answer; nobody's any more, and so never recorded, if the client hangs up first.

    Raises:
        ApiError: the call cannot be answered.
    """
    call = gate.begin_answer(door, asked)
    hung_up = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({call, hung_up}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        hung_up.cancel()
        if not call.done():
            call.cancel()
    if not call.done():
        await asyncio.wait({call})
    if call.cancelled():
        raise ApiError(410, "the episode is over", code="episode_over")
    error = call.exception()
    if error is not None and not isinstance(error, ApiError):
        raise ApiError(500, "the run has failed", code="failed") from error
    return call.result()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _stream(parts: Iterator[str]) -> Response:
    from starlette.responses import StreamingResponse

    async def body() -> Any:
        for part in parts:
            yield part.encode()

    return StreamingResponse(body(), media_type="text/event-stream", headers={"cache-control": "no-store"})
