"""What the server answers, and to whom."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from helpers.episode_runs import make_run

pytest.importorskip("starlette")

from envgrad.viewer.app import build_app
from envgrad.viewer.serve import ViewAddress, run_places
from envgrad.viewer.source import RunSource

TOKEN = "0123456789abcdef"


class Client:
    """Asks the application directly, as an HTTP server would."""

    def __init__(self, app: Any) -> None:
        self.app = app

    def get(self, path: str, *, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        import asyncio

        path, _, query = path.partition("?")
        named = {"host": "127.0.0.1:8421"} | {name.replace("_", "-"): value for name, value in headers.items()}
        scope = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in named.items()], "root_path": "",
            "scheme": "http", "server": ("127.0.0.1", 8421), "client": ("127.0.0.1", 1), "http_version": "1.1",
        }  # fmt: skip
        sent: list[dict[str, Any]] = []

        async def ask() -> None:
            async def receive() -> dict[str, Any]:
                return {"type": "http.request", "body": b"", "more_body": False}

            async def send(message: dict[str, Any]) -> None:
                sent.append(message)

            await self.app(scope, receive, send)

        asyncio.run(ask())
        head = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], head, b"".join(message.get("body", b"") for message in sent[1:])


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    source = RunSource(run_places([make_run(tmp_path_factory.mktemp("runs") / "first", 64)])[0])
    names = ViewAddress().names()
    yield Client(build_app([source], token=TOKEN, hosts=names, any_address=False))
    source.close()


def test_the_page_and_its_files_come_with_their_types(client: Client) -> None:
    status, head, body = client.get(f"/{TOKEN}/")
    assert status == 200 and head["content-type"].startswith("text/html") and b'id="main"' in body
    for path, kind in (("base.css", "text/css"), ("js/main.js", "text/javascript"), ("icon.svg", "image/svg+xml")):
        status, head, _ = client.get(f"/{TOKEN}/static/{path}")
        assert status == 200 and head["content-type"].startswith(kind)


def test_nothing_but_the_page_s_own_files_is_served(client: Client) -> None:
    for path in ("../app.py", "%2e%2e/app.py", "js/../../app.py", "/etc/passwd", "js", "no.js"):
        assert client.get(f"/{TOKEN}/static/{path}")[0] == 404


def test_without_the_secret_nothing_is_answered(client: Client) -> None:
    for path in (
        "/",
        "/api/run",
        "/static/base.css",
        f"/{TOKEN}",
        f"/{TOKEN}x/api/run",
        f"/{TOKEN[:-1]}/api/run",
        "//",
    ):
        status, _, body = client.get(path)
        assert status == 404 and b"begins with a secret" in body, path


def test_a_host_that_is_not_this_machine_is_refused(client: Client) -> None:
    for host in ("evil.example", "evil.example:8421", "127.0.0.1.evil.example", "10.0.0.1", "", "[fe80::1]:8421"):
        assert client.get(f"/{TOKEN}/api/run", host=host)[0] == 421, host
    for host in ("127.0.0.1", "localhost:9", "LOCALHOST:8421", "[::1]:8421", "[::1]"):
        assert client.get(f"/{TOKEN}/api/run", host=host)[0] == 200, host


def test_a_server_for_all_addresses_takes_numbers_but_no_foreign_names() -> None:
    address = ViewAddress(host="0.0.0.0")
    client = Client(build_app([], token=TOKEN, hosts=address.names(), any_address=address.everywhere))
    assert client.get(f"/{TOKEN}/", host="192.168.1.7:8421")[0] == 200
    assert client.get(f"/{TOKEN}/", host="evil.example:8421")[0] == 421


def test_other_sites_pages_may_link_and_nothing_else(client: Client) -> None:
    assert client.get(f"/{TOKEN}/api/run", sec_fetch_site="cross-site", sec_fetch_mode="cors")[0] == 403
    assert client.get(f"/{TOKEN}/api/run", sec_fetch_site="same-site", sec_fetch_mode="no-cors")[0] == 403
    assert client.get(f"/{TOKEN}/", sec_fetch_site="cross-site", sec_fetch_mode="navigate")[0] == 200
    assert client.get(f"/{TOKEN}/api/run", sec_fetch_site="same-origin", sec_fetch_mode="cors")[0] == 200


def test_it_only_reads(client: Client) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert client.get(f"/{TOKEN}/api/run", method=method)[0] == 405


def test_every_answer_has_the_strict_policy_refusals_too(client: Client) -> None:
    for path in (f"/{TOKEN}/", f"/{TOKEN}/api/run", "/"):
        head = client.get(path)[1]
        policy = head["content-security-policy"]
        assert "default-src 'none'" in policy and "require-trusted-types-for 'script'" in policy
        assert "unsafe" not in policy and "http:" not in policy and "frame-ancestors 'none'" in policy
        assert head["x-content-type-options"] == "nosniff" and head["referrer-policy"] == "no-referrer"
        assert head["cache-control"] == "no-store"


def test_what_cannot_be_answered_is_an_error_in_words(client: Client) -> None:
    for path, status, said in (
        ("episode?n=99999", 400, b"99999"),
        ("episodes?min=abc", 400, b"must be a number"),
        ("episodes?run=z", 404, b"no such run"),
        ("secrets", 404, b"no such run or page"),
        ("news?since=../..", 400, b"is no cursor"),
        ("episodes?text=%22%29%20OR%20%28*", 200, b'"rows"'),
    ):
        found, head, body = client.get(f"/{TOKEN}/api/{path}")
        assert found == status and said in body, (path, body)
        assert head["content-type"] == "application/json"
