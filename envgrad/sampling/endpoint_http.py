"""One chat endpoint over HTTP: bounded, patient, and quick to give up on a server that is gone."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from envgrad.errors import ConfigurationError, SamplerFailure
from envgrad.sampling.http_retry import CONNECT_SECONDS, Backoff, Shown, may_pass

FIRST_DELAY, LONGEST_DELAY = 0.5, 10.0
"""seconds between tries (``Backoff``)"""
PROBE_SECONDS = 2.0
"""how often a server that was given up is asked again"""
LEAST_TOKENS = 16
"""a chat is too long if the server has no room even for so many"""
_TOO_LONG = ("context length", "context_length", "context window", "context size", "maximum context")
_SHOWN = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The first choice of a completion."""

    message: Mapping[str, Any]
    finish_reason: str | None
    prompt_tokens: int | None
    """None where the server does not count"""
    completion_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trouble:
    """A try that may be repeated."""

    why: str
    wait: float | None = None
    """seconds that the server asks for"""
    cause: Exception | None = None


class HttpClient:
    """Asks one endpoint. All methods belong to one event loop.

    A request that got nothing within ``patience``, while nobody else got an answer either, marks the server as gone:
    then requests fail at once, but for one every ``PROBE_SECONDS`` that tries again, until it answers.
    """

    def __init__(
        self, url: str, *, headers: Mapping[str, str], timeout: float, patience: float, max_connections: int
    ) -> None:
        self.url = url
        self.retries = 0
        self._headers = {**headers, "Content-Type": "application/json"}
        self._shown = Shown.of(headers, most=_SHOWN)
        self._timeout = httpx2.Timeout(timeout, connect=min(timeout, CONNECT_SECONDS), pool=None)
        self._limit = max_connections
        self._patience = patience
        self._client: httpx2.AsyncClient | None = None
        self._gate: asyncio.Semaphore | None = None
        self._tokens_field = "max_tokens"
        self._answered = float("-inf")
        self._gone: str | None = None
        self._probed = float("-inf")
        self._probing = False

    async def ask(self, body: Mapping[str, Any]) -> Reply | None:
        """The server's reply; None if the chat is too long for it.

        Raises:
            SamplerFailure: none within ``patience``.
            ConfigurationError: the server refuses the request.
        """
        if self._client is None:  # made on the loop that it belongs to
            limits = httpx2.Limits(max_connections=self._limit, max_keepalive_connections=self._limit)
            self._client = httpx2.AsyncClient(timeout=self._timeout, limits=limits, headers=self._headers)
            self._gate = asyncio.Semaphore(self._limit)
        if self._gate is None:
            raise AssertionError("the gate is made with the client")
        async with self._gate:
            tokens = int(body["max_tokens"])
            while True:
                reply = await self._ask_patiently(self._client, {**body, "max_tokens": tokens})
                # Some servers refuse what does not leave max_tokens of room, though a shorter answer would fit.
                if reply is not None or tokens <= LEAST_TOKENS:
                    return reply
                tokens = max(LEAST_TOKENS, tokens // 4)

    async def _ask_patiently(self, client: httpx2.AsyncClient, body: Mapping[str, Any]) -> Reply | None:
        if self._gone is not None:
            return await self._probe(client, body)
        began = time.monotonic()
        deadline, backoff = began + self._patience, Backoff(FIRST_DELAY, LONGEST_DELAY)
        while True:
            outcome = await self._try(client, body)
            if not isinstance(outcome, _Trouble):
                return outcome
            wait = backoff.next() if outcome.wait is None else outcome.wait
            if time.monotonic() + wait > deadline or self._gone is not None:
                if self._answered < began:
                    self._gone = outcome.why
                raise self._failure(outcome) from outcome.cause
            self.retries += 1
            await asyncio.sleep(wait)

    async def _probe(self, client: httpx2.AsyncClient, body: Mapping[str, Any]) -> Reply | None:
        """One try, if none is under way or just made, on a server that was given up."""
        if self._probing or time.monotonic() - self._probed < PROBE_SECONDS:
            raise SamplerFailure(f"{self.url} is given up for now: {self._gone}")
        self._probing = True
        try:
            outcome = await self._try(client, body)
        finally:
            self._probing, self._probed = False, time.monotonic()
        if isinstance(outcome, _Trouble):
            raise self._failure(outcome) from outcome.cause
        return outcome

    def _failure(self, trouble: _Trouble) -> SamplerFailure:
        return SamplerFailure(f"{self.url} gave no answer within {self._patience:.3g} s: {trouble.why}")

    async def _try(self, client: httpx2.AsyncClient, body: Mapping[str, Any]) -> Reply | _Trouble | None:
        sent = {self._tokens_field if key == "max_tokens" else key: value for key, value in body.items()}
        try:
            # ASCII: what a model wrote may hold half a surrogate pair, which UTF-8 cannot.
            response = await client.post(self.url, content=json.dumps(sent).encode("ascii"))
        except httpx2.RequestError as error:
            return _Trouble(why=f"{type(error).__name__}: {error or 'no answer'}", cause=error)
        status, text = response.status_code, self._shown.text(response.text)
        if may_pass(status):
            return _Trouble(why=f"status {status}: {text}", wait=_retry_after(response.headers.get("retry-after")))
        if status == 400 and self._tokens_field in sent and self._renames_tokens(response.text):
            return await self._try(client, body)
        if status in (400, 413, 422) and any(words in response.text.lower() for words in _TOO_LONG):
            self._alive()
            return None
        if status != 200:
            raise ConfigurationError(f"{self.url} refuses the request with status {status}: {text}{_hint(status)}")
        try:
            reply = read_reply(response.json())
        except ValueError as error:
            return _Trouble(why=f"its answer cannot be read ({error}): {text}", cause=error)
        self._alive()
        return reply

    def _alive(self) -> None:
        self._answered, self._gone = time.monotonic(), None

    def _renames_tokens(self, text: str) -> bool:
        """Whether the server wants ``max_completion_tokens``, as reasoning models of some vendors do."""
        if self._tokens_field == "max_completion_tokens" or "max_completion_tokens" not in text:
            return False
        self._tokens_field = "max_completion_tokens"
        return True

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()


def _hint(status: int) -> str:
    hints = {
        401: "; give the name of the variable that holds the key (--api-key-env)",
        403: "; give the name of the variable that holds the key (--api-key-env)",
        404: "; check the URL and the model's name",
    }
    return hints.get(status, "")


def _retry_after(value: str | None) -> float | None:
    """Seconds from a ``Retry-After`` header; dates are not read.

    Example:
        >>> _retry_after("2"), _retry_after("soon"), _retry_after(None)
        (2.0, None, None)
    """
    try:
        seconds = float(value) if value is not None else -1.0
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None


def read_reply(data: object) -> Reply:
    """The first choice of a chat completion.

    Example:
        >>> read_reply({"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}], "usage": None})
        Reply(message={'content': 'hi'}, finish_reason='stop', prompt_tokens=None, completion_tokens=None)

    Raises:
        ValueError: there is no message in it.
    """
    choices = data.get("choices") if isinstance(data, Mapping) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, Mapping) else None
    if not isinstance(message, Mapping) or not isinstance(choice, Mapping) or not isinstance(data, Mapping):
        raise ValueError("there is no choices[0].message in it")
    usage = data.get("usage")
    counts = usage if isinstance(usage, Mapping) else {}
    reason = choice.get("finish_reason")
    return Reply(
        message=message,
        finish_reason=reason if isinstance(reason, str) else None,
        prompt_tokens=_count(counts.get("prompt_tokens")),
        completion_tokens=_count(counts.get("completion_tokens")),
    )


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
