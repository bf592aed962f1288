"""Answers from any OpenAI-compatible chat endpoint, by URL: vLLM, llama.cpp, SGLang, Ollama, or a hosted model.

For evaluation: such a server takes messages and gives no token ids, so nothing it says can be trained on. Imports no
torch.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from envgrad.errors import ConfigurationError, SamplerFailure
from envgrad.rollout.loop import RolloutLoop
from envgrad.sampling.endpoint_chat import EndpointRenderer, estimate_tokens, read_answer
from envgrad.sampling.endpoint_http import HttpClient, Reply
from envgrad.sampling.sampler import Completion, SamplingParams, Session

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

NO_LIMIT = 1 << 30
_SEEDS = 1 << 31
"""some servers keep a seed in 32 bits"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a model is served, and how patiently it is asked.

    Raises:
        ConfigurationError: a URL that is none, a value out of range, or an ``api_key_env`` that is not set.

    Example:
        >>> Endpoint(url="http://localhost:8000", model="qwen").chat_url
        'http://localhost:8000/v1/chat/completions'
    """

    url: str
    """the server's root or its ``.../v1``"""
    model: str
    api_key_env: str | None = None
    """the environment variable that holds the key; none is sent if None"""
    request_timeout: float = 300.0
    """seconds that one answer may take"""
    patience: float = 60.0
    """seconds that a request is repeated while the server is overloaded, failing or gone"""
    max_context: int | None = None
    """longest chat in tokens, if it should be shorter than what the server takes"""
    _key: str | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError(
                f"endpoint {self.url!r} is no URL; write http://host:port/v1, or https://... for a hosted model"
            )
        if not self.model:
            raise ConfigurationError("an endpoint needs the name of the model that it should answer with")
        for name, value in (("request_timeout", self.request_timeout), ("patience", self.patience)):
            if not value > 0 or math.isinf(value):
                raise ConfigurationError(f"{name}={value} must be above 0 seconds, and finite")
        if self.max_context is not None and self.max_context < 2:
            raise ConfigurationError(f"max_context={self.max_context} must be at least 2 tokens")
        if self.api_key_env is not None:
            key = os.environ.get(self.api_key_env, "").strip()
            if not key or not key.isascii() or not key.isprintable():
                raise ConfigurationError(
                    f"api_key_env={self.api_key_env!r}: no environment variable of that name holds a key; export it"
                )
            object.__setattr__(self, "_key", key)

    @property
    def chat_url(self) -> str:
        """The address that chats are posted to."""
        base = self.url.rstrip("/")
        if base.endswith("/chat/completions"):
            return base
        return f"{base}/chat/completions" if urlsplit(base).path.strip("/") else f"{base}/v1/chat/completions"

    def headers(self) -> dict[str, str]:
        return {} if self._key is None else {"Authorization": f"Bearer {self._key}"}


@dataclass(slots=True)
class EndpointUsage:
    """What the server says it has read and written, over all requests, those of failed episodes too."""

    requests: int = 0
    prompt_tokens: int = 0
    """read: each turn sends the whole chat again"""
    completion_tokens: int = 0
    estimated: int = 0
    """requests whose tokens the server did not count, so that ours are an estimate"""


class EndpointSampler:
    """A ``Sampler`` whose rows are handles of an ``EndpointRenderer``. Requests run on a loop of their own.

    Repeated while ``patience`` lasts: no connection, timeouts, 408, 409, 425, 429 (as ``Retry-After`` says) and 5xx.
    Any other refusal is an error in what was asked and ends the run. A chat that the server finds too long ends its
    episode as one whose tokens are used up.

    Log-probs are 0: there are none to train on.

    Args:
        endpoint: The server and the model.
        renderer: The one that the episodes' contexts use.
        max_connections: Requests under way at once; more wait for their turn.

    Raises:
        ConfigurationError: ``max_connections`` is below 1.
    """

    def __init__(self, endpoint: Endpoint, renderer: EndpointRenderer, *, max_connections: int) -> None:
        if max_connections < 1:
            raise ConfigurationError(f"max_connections={max_connections} must be at least 1")
        self.endpoint = endpoint
        self.usage = EndpointUsage()
        self._renderer = renderer
        self._loop = RolloutLoop()
        self._client = HttpClient(
            endpoint.chat_url,
            headers=endpoint.headers(),
            timeout=endpoint.request_timeout,
            patience=endpoint.patience,
            max_connections=max_connections,
        )
        self._rows: dict[str, int] = {}
        """by session: how many tokens its chat has more than its row of handles, as the server counted them"""
        self._warned = False
        self._closed = False

    @property
    def policy_version(self) -> int:
        return 0

    @property
    def exact_logprobs(self) -> bool:
        return False

    @property
    def max_context(self) -> int:
        return self.endpoint.max_context or NO_LIMIT

    @property
    def retries(self) -> int:
        """Requests that were repeated."""
        return self._client.retries

    def begin(self, session: Session) -> None:
        self._rows[session.key] = 0

    def end(self, session: Session) -> None:
        self._rows.pop(session.key, None)

    def update_weights(self, version: int, named_tensors: Mapping[str, Tensor] | None) -> None:
        """
        Raises:
            ConfigurationError: always, but for the first version: an endpoint serves what it serves.
        """
        if version or named_tensors is not None:
            raise ConfigurationError(f"{self.endpoint.url} serves its own weights: a chat endpoint cannot be trained")

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams, session: Session) -> Completion:
        """The server's answer to the chat that ``prompt_ids`` stands for.

        Raises:
            SamplerFailure: no answer within ``patience``, or none that can be read.
            ConfigurationError: the server refuses the request; names its status and what it says.
        """
        if self._closed:
            raise SamplerFailure("the sampler is closed")
        chat = self._renderer.chat(prompt_ids)
        room = self.max_context - len(prompt_ids) - self._rows.get(session.key, 0)
        if room < 1:
            return self._too_long()
        body = self._body(chat.messages, params, min(params.max_tokens, room))
        if chat.tools:
            body["tools"] = [_for_server(tool) for tool in chat.tools]
        reply = await asyncio.wrap_future(self._loop.submit(self._client.ask(body)))
        if reply is None:
            return self._too_long()
        number = sum(message["role"] == "assistant" for message in chat.messages)
        answer = read_answer(reply.message, number=number)
        count = self._count(reply, body, session, len(prompt_ids))
        ids = self._renderer.add(answer, count)
        return Completion(
            token_ids=tuple(ids),
            logprobs=(0.0,) * len(ids),
            stop_reason="length" if reply.finish_reason == "length" else "stop",
            policy_version=0,
        )

    def _body(self, messages: Sequence[Mapping[str, Any]], params: SamplingParams, max_tokens: int) -> dict[str, Any]:
        """The request; what is at its default is left out, since not every server knows every field."""
        body: dict[str, Any] = {
            "model": self.endpoint.model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": params.temperature,
            "seed": params.seed % _SEEDS,
        }
        optional = {
            "top_p": (params.top_p, 1.0),
            "top_k": (params.top_k, 0),
            "min_p": (params.min_p, 0.0),
            "repetition_penalty": (params.repetition_penalty, 1.0),
            "stop": (list(params.stop_strings), []),
        }
        return body | {name: value for name, (value, default) in optional.items() if value != default}

    def _count(self, reply: Reply, body: Mapping[str, Any], session: Session, row: int) -> int:
        """Tokens of the answer; usage is added up."""
        read, written = reply.prompt_tokens, reply.completion_tokens
        self.usage.requests += 1
        if read is None or written is None:
            self.usage.estimated += 1
        count = max(1, estimate_tokens(reply.message) if written is None else written)
        if read is not None:
            self._rows[session.key] = read - row
        self.usage.prompt_tokens += estimate_tokens(body["messages"]) if read is None else read
        self.usage.completion_tokens += count
        return count

    def _too_long(self) -> Completion:
        """An empty answer that reached its limit."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "a chat is too long for %s: its episode ends as truncated. Give shorter limits, or max_context",
                self.endpoint.model,
            )
        ids = self._renderer.add(read_answer({"content": ""}, number=0), 1)
        return Completion(token_ids=tuple(ids), logprobs=(0.0,), stop_reason="length", policy_version=0)

    def close(self) -> None:
        """Close the connections and stop the loop. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._loop.run(self._client.close())
        self._loop.close()


def _for_server(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A schema without what transformers adds for templates: strict servers refuse it."""
    function = tool.get("function", tool)
    known = {key: function[key] for key in ("name", "description", "parameters") if key in function}
    return {"type": "function", "function": known}
