"""Asks every path of the server but ``/health`` for the API key. Runs in vLLM's process; standard library only.

vLLM itself asks for it on the paths of the OpenAI API only, and leaves those open that change weights.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

OPEN_PATHS = ("/health",)
KEY_VARIABLE = "VLLM_API_KEY"
"""the environment variable in which vLLM looks for its key too"""


class Guard:
    """ASGI middleware: 401 without ``Authorization: Bearer <key>``; lets all through where no key is set."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._key = os.environ.get(KEY_VARIABLE, "")

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or self._admits(scope):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        body = b'{"error": "Unauthorized"}'
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _admits(self, scope: Message) -> bool:
        if not self._key or scope["path"] in OPEN_PATHS:
            return True
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        wanted = f"Bearer {self._key}".encode()
        return any(hmac.compare_digest(value, wanted) for value in given)
