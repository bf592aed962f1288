"""A small OpenAI-compatible server on loopback that answers as a test says."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = dict[str, Any]
"""``message``, and optionally ``status``, ``text``, ``headers``, ``delay``, ``finish_reason``, ``usage``"""


def message(content: str | None = "", *calls: tuple[str, str], **more: Any) -> Answer:
    """An answer of text and calls; a call is a name and its arguments as JSON text."""
    said: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        said["tool_calls"] = [
            {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(calls)
        ]
    return {"message": said, **more}


@dataclass(slots=True)
class ChatServer:
    """What arrived, in order."""

    url: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    most_at_once: int = 0


@contextmanager
def chat_server(answer: Callable[[dict[str, Any], int], Answer]) -> Iterator[ChatServer]:
    """``answer(request, number of the request)`` says what comes back."""
    lock = threading.Lock()
    open_now = 0

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            nonlocal open_now
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                open_now += 1
                served.most_at_once = max(served.most_at_once, open_now)
                number = len(served.requests)
                served.requests.append(body)
                served.headers.append(dict(self.headers))
                served.paths.append(self.path)
            said = answer(body, number)
            time.sleep(said.get("delay", 0.0))
            with lock:
                open_now -= 1
            self._send(said)

        def _send(self, said: Answer) -> None:
            data = said.get("text")
            if data is None:
                choice = {"index": 0, "message": said["message"], "finish_reason": said.get("finish_reason", "stop")}
                reply: dict[str, Any] = {"id": "x", "object": "chat.completion", "choices": [choice]}
                usage = said.get("usage", {"prompt_tokens": 20, "completion_tokens": 5})
                data = json.dumps(reply | ({"usage": usage} if usage is not None else {}))
            raw = data.encode()
            try:
                self.send_response(said.get("status", 200))
                for name, value in said.get("headers", {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True  # the client has given up

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    served = ChatServer(url=f"http://127.0.0.1:{server.server_port}/v1")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
