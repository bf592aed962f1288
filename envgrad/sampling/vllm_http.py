"""One vLLM server over HTTP: what it answers, what may be tried again, and what ends the run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import httpx2

from envgrad.errors import ConfigurationError
from envgrad.sampling.http_retry import CONNECT_SECONDS, Shown, may_pass

HEALTH_SECONDS = 5.0
_SHOWN = 800

Json: TypeAlias = Any
"""a value as ``json.loads`` gives it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """A request without an answer, which may be tried again."""

    why: str
    lost: bool = False
    """there was no connection, or it broke: nobody may be there any more"""
    cause: Exception | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Sampled tokens as the server gave them."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    """``stop``, ``length``, or ``abort`` where an update of the weights cut the request short"""


class ServerHttp:
    """Requests to one server. All methods but the constructor belong to one event loop.

    Args:
        url: The server's root.
        headers: Sent with every request; an API key in them is never shown in messages.
        max_connections: Open at once; more requests wait.
    """

    def __init__(self, url: str, *, headers: Mapping[str, str], max_connections: int) -> None:
        self.url = url
        self._headers = {**headers, "Content-Type": "application/json"}
        self._shown = Shown.of(headers, most=_SHOWN)
        self._limit = max_connections
        self._client: httpx2.AsyncClient | None = None

    async def ask(self, path: str, body: Mapping[str, Json] | None = None, *, timeout: float) -> Json | Trouble:
        """The JSON that the server answers to a POST, or to a GET where there is no ``body``.

        Raises:
            ConfigurationError: the server refuses the request; holds its status and its text.
        """
        limits = httpx2.Timeout(timeout, connect=min(timeout, CONNECT_SECONDS), pool=None)
        try:
            if body is None:
                response = await self._opened().get(self.url + path, timeout=limits)
            else:
                content = json.dumps(body).encode("ascii")
                response = await self._opened().post(self.url + path, content=content, timeout=limits)
        except httpx2.TimeoutException as error:
            return Trouble(why=f"no answer to {path} within {timeout:.3g} s ({type(error).__name__})", cause=error)
        except httpx2.RequestError as error:
            return Trouble(why=f"{type(error).__name__}: {error or 'no connection'}", lost=True, cause=error)
        status, text = response.status_code, self._shown.text(response.text)
        if may_pass(status):
            return Trouble(why=f"status {status} to {path}: {text}")
        if status != 200:
            raise ConfigurationError(f"{self.url} refuses {path} with status {status}: {text}{_hint(status, path)}")
        if not response.content:
            return None
        try:
            return response.json()
        except ValueError:
            return response.text

    async def healthy(self) -> Trouble | None:
        """What is wrong with the server; None if it says that it is well."""
        outcome = await self.ask("/health", timeout=HEALTH_SECONDS)
        return outcome if isinstance(outcome, Trouble) else None

    async def call_workers(self, method: str, arguments: Mapping[str, Json], *, timeout: float) -> Json | Trouble:
        """Each worker's answer to a method of the worker extension: a list of mappings.

        Raises:
            ConfigurationError: the server has no ``/collective_rpc``.
        """
        body = {"method": method, "kwargs": dict(arguments), "timeout": timeout}
        outcome = await self.ask("/collective_rpc", body, timeout=timeout)
        if isinstance(outcome, Trouble):
            return outcome
        results = outcome.get("results") if isinstance(outcome, Mapping) else None
        if not isinstance(results, list) or not all(isinstance(result, Mapping) for result in results) or not results:
            return Trouble(why=f"{method} was answered by {self._shown.text(json.dumps(outcome))}, not by each worker")
        return results

    async def complete(self, body: Mapping[str, Json], *, timeout: float) -> Answer | Trouble:
        """Sampled tokens.

        Raises:
            ConfigurationError: the server refuses the request, or gives no token ids.
        """
        outcome = await self.ask("/v1/completions", body, timeout=timeout)
        if isinstance(outcome, Trouble):
            return outcome
        try:
            return read_completion(outcome)
        except ValueError as error:
            return Trouble(
                why=f"its answer cannot be read ({error}): {self._shown.text(json.dumps(outcome))}", cause=error
            )

    def _opened(self) -> httpx2.AsyncClient:
        if self._client is None:  # made on the loop that it belongs to
            limits = httpx2.Limits(max_connections=self._limit, max_keepalive_connections=self._limit)
            secure = self.url.startswith("https")  # else no certificates need be read
            self._client = httpx2.AsyncClient(headers=self._headers, limits=limits, verify=secure)
        return self._client

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()


def _hint(status: int, path: str) -> str:
    if status in (401, 403):
        return "; name the environment variable that holds the server's key (vllm_api_key_env)"
    if status == 404 and not path.startswith("/v1/"):
        return "; start the server with `envgrad vllm-serve`, which turns that path on"
    return ""


def read_completion(data: Json) -> Answer:
    """The one choice of a completion that was asked for with ``return_token_ids`` and ``logprobs=0``.

    Example:
        >>> choice = {"token_ids": [5, 2], "logprobs": {"token_logprobs": [-0.5, -1.0]}, "finish_reason": "stop"}
        >>> read_completion({"choices": [choice]})
        Answer(token_ids=(5, 2), logprobs=(-0.5, -1.0), finish_reason='stop')

    Raises:
        ValueError: there are no token ids, or not one log-prob for each.
    """
    choices = data.get("choices") if isinstance(data, Mapping) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, Mapping):
        raise ValueError("there is no choice in it")
    ids, reason = choice.get("token_ids"), choice.get("finish_reason")
    if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
        raise ValueError("there are no token ids in it; vLLM gives them since 0.10.2")
    given = choice.get("logprobs")
    logprobs: Sequence[Json] = (given.get("token_logprobs") or []) if isinstance(given, Mapping) else []
    if len(logprobs) != len(ids) or not all(isinstance(value, (int, float)) for value in logprobs):
        raise ValueError(f"it has {len(ids)} token ids and {len(logprobs)} log-probs")
    if reason not in ("stop", "length", "abort"):
        raise ValueError(f"its finish_reason is {reason!r}")
    return Answer(token_ids=tuple(ids), logprobs=tuple(map(float, logprobs)), finish_reason=str(reason))
