from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from envgrad.errors import ConfigurationError, SamplerFailure
from envgrad.sampling import endpoint_http
from envgrad.sampling.endpoint_http import HttpClient, Reply
from helpers.chat_server import Answer, chat_server, message

BODY = {"model": "m", "messages": [], "max_tokens": 64}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_http, "FIRST_DELAY", 0.01)
    monkeypatch.setattr(endpoint_http, "LONGEST_DELAY", 0.02)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def ask(url: str, times: int = 1, **options: Any) -> list[Reply | BaseException | None]:
    """The outcomes of requests made at once."""

    async def run() -> list[Reply | BaseException | None]:
        client = make(url, **options)
        try:
            return list(await asyncio.gather(*(client.ask(BODY) for _ in range(times)), return_exceptions=True))
        finally:
            await client.close()

    return asyncio.run(run())


def make(url: str, **options: Any) -> HttpClient:
    given = {"headers": {}, "timeout": 5.0, "patience": 5.0, "max_connections": 8} | options
    return HttpClient(f"{url}/chat/completions", **given)


def one(answer: Callable[[dict[str, Any], int], Answer], **options: Any) -> tuple[Any, list[dict[str, Any]]]:
    with chat_server(answer) as server:
        (outcome,) = ask(server.url, **options)
    return outcome, server.requests


def unused_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_a_reply_is_read() -> None:
    outcome, requests = one(lambda body, number: message("hi", finish_reason="length"))
    assert outcome == Reply(
        message={"role": "assistant", "content": "hi"}, finish_reason="length", prompt_tokens=20, completion_tokens=5
    )
    assert requests == [BODY]


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": "many", "completion_tokens": -1}, []])
def test_usage_that_says_nothing_is_none(usage: Any) -> None:
    outcome, _ = one(lambda body, number: message("hi", usage=usage))
    assert (outcome.prompt_tokens, outcome.completion_tokens) == (None, None)


@pytest.mark.parametrize(
    "trouble",
    [
        {"status": 429, "text": "slow down"},
        {"status": 500, "text": "oops"},
        {"status": 503, "text": ""},
        {"text": "<html>"},
        {"text": '{"choices": []}'},
        {"text": '{"error": {"message": "overloaded"}}'},
        {"text": "[]"},
    ],
)
def test_what_may_pass_is_repeated(trouble: Answer) -> None:
    outcome, requests = one(lambda body, number: trouble if number < 3 else message("hi"))
    assert outcome.message["content"] == "hi"
    assert len(requests) == 4


def test_the_server_says_how_long_to_wait() -> None:
    began = time.monotonic()
    later = {"status": 429, "text": "", "headers": {"Retry-After": "0.3"}}
    outcome, requests = one(lambda body, number: later if number == 0 else message("hi"))
    assert outcome.message["content"] == "hi"
    assert len(requests) == 2 and time.monotonic() - began >= 0.3


def test_patience_ends() -> None:
    outcome, requests = one(lambda body, number: {"status": 500, "text": "down for repairs"}, patience=1.5)
    assert isinstance(outcome, SamplerFailure)
    assert "gave no answer within 1.5 s: status 500: down for repairs" in str(outcome)
    assert 2 <= len(requests) <= 400


def test_a_wait_longer_than_the_patience_is_not_begun() -> None:
    later = {"status": 429, "text": "tomorrow", "headers": {"Retry-After": "86400"}}
    began = time.monotonic()
    outcome, requests = one(lambda body, number: later, patience=8.0)
    assert isinstance(outcome, SamplerFailure)
    assert len(requests) == 1 and time.monotonic() - began < 7.0


def test_a_slow_answer_is_given_up_and_asked_for_again() -> None:
    outcome, requests = one(lambda body, number: message("hi", delay=4.0 if number == 0 else 0.0), timeout=1.0)
    assert outcome.message["content"] == "hi"
    assert len(requests) == 2


@pytest.mark.parametrize(
    ("status", "hint"),
    [(400, ""), (401, "--api-key-env"), (403, "--api-key-env"), (404, "check the URL"), (307, ""), (422, "")],
)
def test_a_refusal_is_an_error_in_what_was_asked(status: int, hint: str) -> None:
    outcome, requests = one(
        lambda body, number: {"status": status, "text": "no: key-123 is wrong"},
        headers={"Authorization": "Bearer key-123"},
    )
    assert isinstance(outcome, ConfigurationError)
    assert f"status {status}: no: *** is wrong" in str(outcome)
    assert hint in str(outcome)
    assert len(requests) == 1


def test_servers_that_call_the_limit_otherwise_get_it_so() -> None:
    def answer(body: dict[str, Any], number: int) -> Answer:
        if "max_tokens" in body:
            return {"status": 400, "text": "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."}
        return message(str(body["max_completion_tokens"]))

    with chat_server(answer) as server:

        async def run() -> list[Any]:
            client = make(server.url)
            replies = [await client.ask(BODY), await client.ask(BODY)]
            await client.close()
            return replies

        first, second = asyncio.run(run())
    assert (first.message["content"], second.message["content"]) == ("64", "64")
    assert len(server.requests) == 3  # what it wants is remembered


@pytest.mark.parametrize(
    "text",
    [
        "This model's maximum context length is 4096 tokens. However, you requested 4100 tokens.",
        '{"error": {"code": "context_length_exceeded"}}',
        "the request exceeds the available context size, try increasing it",
    ],
)
def test_a_chat_that_is_too_long_is_tried_with_shorter_answers(text: str) -> None:
    outcome, requests = one(
        lambda body, number: {"status": 400, "text": text} if body["max_tokens"] > 16 else message("hi")
    )
    assert outcome.message["content"] == "hi"
    assert [request["max_tokens"] for request in requests] == [64, 16]
    outcome, requests = one(lambda body, number: {"status": 400, "text": text})
    assert outcome is None
    assert len(requests) == 2


def test_requests_at_once_are_bounded() -> None:
    with chat_server(lambda body, number: message("hi", delay=0.05)) as server:
        outcomes = ask(server.url, times=9, max_connections=3)
    assert all(isinstance(outcome, Reply) for outcome in outcomes)
    assert server.most_at_once <= 3


def test_a_server_that_is_gone_is_given_up_for_all() -> None:
    """Five waves of requests take about one patience, not five."""
    began = time.monotonic()
    outcomes = ask(f"http://127.0.0.1:{unused_port()}/v1", times=40, patience=1.5, max_connections=8)
    assert all(isinstance(outcome, SamplerFailure) for outcome in outcomes)
    assert any("is given up for now: ConnectError" in str(outcome) for outcome in outcomes)
    assert time.monotonic() - began < 6.0


def test_a_server_that_comes_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_http, "PROBE_SECONDS", 0.05)
    broken = True

    async def run(client: HttpClient) -> list[str]:
        nonlocal broken
        seen = []
        for _ in range(2):
            try:
                await client.ask(BODY)
            except SamplerFailure as failure:
                seen.append(str(failure))
        broken = False
        await asyncio.sleep(0.1)
        for _ in range(3):
            reply = await client.ask(BODY)
            seen.append("" if reply is None else reply.message["content"])
        await client.close()
        return seen

    with chat_server(lambda body, number: {"status": 500, "text": "x"} if broken else message("hi")) as server:
        seen = asyncio.run(run(make(server.url, patience=0.05)))
    assert seen[2:] == ["hi", "hi", "hi"]
    assert "gave no answer" in seen[0]


def test_a_request_that_nobody_waits_for_is_aborted() -> None:
    over = threading.Event()

    def answer(body: dict[str, Any], number: int) -> Answer:
        over.wait(10.0)
        return message("hi")

    with chat_server(answer) as server:

        async def run() -> float:
            client = make(server.url)
            began = time.monotonic()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await client.ask(BODY)
            taken = time.monotonic() - began
            await client.close()
            return taken

        assert asyncio.run(run()) < 8.0
        over.set()
