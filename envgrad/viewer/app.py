"""The viewer's routes, and what keeps others out.

Every path begins with a secret that only the printed address has. Beyond that, a request must name this machine as its
host (a page elsewhere whose name was pointed here does not), no other site's page may fetch anything, and the page's
policy lets it load nothing but its own files, run no inline script, and read no string as HTML.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING, Any, TypeAlias

from envgrad.errors import ConfigurationError
from envgrad.viewer.query import episode_filter, number, order, text
from envgrad.viewer.source import RunSource

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

Answer: TypeAlias = Callable[[RunSource, Mapping[str, str]], Any]

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",
}

ANSWERS: dict[str, Answer] = {
    "steps": lambda run, asked: run.steps(),
    "metrics": lambda run, asked: run.metrics(),
    "news": lambda run, asked: run.news(text(asked, "since")),
    "episodes": lambda run, asked: run.episodes(
        episode_filter(asked),
        order=order(asked),
        limit=number(asked, "limit", 50, least=0, most=500),
        offset=number(asked, "offset", 0, least=0),
    ),
    "step": lambda run, asked: run.step(
        number(asked, "step", None, least=0), text(asked, "split"), text(asked, "environment")
    ),
    "group": lambda run, asked: run.group(number(asked, "group", least=0)),
    "episode": lambda run, asked: run.episode(number(asked, "n", least=0)),
    "tokens": lambda run, asked: run.tokens(number(asked, "n", least=0), number(asked, "row", 0, least=0)),
}
"""what ``api/NAME`` answers about one run"""


def build_app(sources: Sequence[RunSource], *, token: str, hosts: frozenset[str], any_address: bool) -> ASGIApp:
    """The application.

    Args:
        sources: The runs, the first of which is shown first.
        token: The secret that every path begins with.
        hosts: Names that the ``Host`` header may have, without port.
        any_address: Whether a ``Host`` that is an IP address is let in too: only for a server that listens on all.
    """
    return Guarded(_routes(sources), token=token, hosts=hosts, any_address=any_address)


class Guarded:
    """Lets only requests with the secret, a known host and no foreign origin reach ``inside``.

    Args:
        inside: Gets the request with the secret taken off its path.
    """

    def __init__(self, inside: ASGIApp, *, token: str, hosts: frozenset[str], any_address: bool) -> None:
        self._inside = inside
        self._token = token.encode()
        self._hosts = hosts
        self._any_address = any_address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await _refuse(*refusal)(scope, receive, send_guarded)
            return
        rest = "/" + scope["path"].lstrip("/").partition("/")[2]
        await self._inside({**scope, "path": rest, "raw_path": rest.encode()}, receive, send_guarded)

    def _refusal(self, scope: Scope, headers: Mapping[str, str]) -> tuple[int, str] | None:
        if not self._known(headers.get("host", "")):
            return 421, "This server answers under its own name only: open the address that envgrad view printed."
        secret, slash, _ = scope["path"].lstrip("/").partition("/")
        if not (slash and hmac.compare_digest(secret.encode(), self._token)):
            return 404, "Open the whole address that envgrad view printed: it begins with a secret."
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "The viewer only reads."
        foreign = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
        # Another page may link to this one (a chat, a wiki), and do nothing else with it.
        if foreign and headers.get("sec-fetch-mode") != "navigate":
            return 403, "Other sites' pages may not read the viewer."
        return None

    def _known(self, host: str) -> bool:
        name = host.rpartition(":")[0] if _has_port(host) else host
        name = name.strip("[]").lower()
        if name in self._hosts:
            return True
        return self._any_address and _is_address(name)


def _has_port(host: str) -> bool:
    return host.rpartition(":")[2].isdigit() and (host.count(":") == 1 or "]:" in host)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _refuse(status: int, why: str) -> Response:
    from starlette.responses import PlainTextResponse

    return PlainTextResponse(why + "\n", status_code=status)


def _routes(sources: Sequence[RunSource]) -> Starlette:
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    class Data(JSONResponse):
        def render(self, content: Any) -> bytes:
            # Only ASCII: lone surrogates, which UTF-8 cannot hold, stay the escapes that JSON has for them.
            return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")

    by_id = {source.place.id: source for source in sources}
    static = _static_files()

    def answer(request: Request) -> Response:
        name, asked = request.path_params["name"], request.query_params
        try:
            if name == "run":
                return Data({"runs": [source.run() | {"cursor": source.cursor()} for source in sources]})
            source = by_id.get(asked.get("run", sources[0].place.id))
            if source is None or name not in ANSWERS:
                return Data({"error": "There is no such run or page."}, status_code=404)
            return Data(ANSWERS[name](source, asked))
        except ConfigurationError as error:
            return Data({"error": str(error)}, status_code=400)
        except (sqlite3.Error, OSError) as error:
            return Data({"error": f"The log cannot be read just now: {error}"}, status_code=503)

    async def page(request: Request) -> Response:
        found = static.get(request.path_params.get("path") or "index.html")
        if found is None:
            return _refuse(404, "There is no such file.")
        body, kind = found
        return Response(body, media_type=kind)

    return Starlette(routes=[
        Route("/", page),
        Route("/static/{path:path}", page),
        Route("/api/{name}", answer),
    ])  # fmt: skip


def _static_files() -> dict[str, tuple[bytes, str]]:
    """The page's own files, by path: nothing else on this machine is served."""
    found: dict[str, tuple[bytes, str]] = {}

    def walk(folder: Traversable, prefix: str) -> None:
        for entry in folder.iterdir():
            if entry.is_dir():
                walk(entry, f"{prefix}{entry.name}/")
                continue
            kind = _TYPES.get(entry.name[entry.name.rfind(".") :])
            if kind is not None:
                found[prefix + entry.name] = (entry.read_bytes(), kind)

    walk(files("envgrad.viewer") / "static", "")
    return found
