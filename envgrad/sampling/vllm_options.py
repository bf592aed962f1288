"""Which vLLM servers a sampler asks, and how patiently."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

from envgrad.errors import ConfigurationError
from envgrad.sampling.sampler import SamplingParams

InFlight: TypeAlias = Literal["wait", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMOptions:
    """Which servers, and how patiently they are asked.

    Raises:
        ConfigurationError: no URL, one that is none, one twice, a value out of range, or an ``api_key_env`` not set.

    Example:
        >>> VLLMOptions(base_urls=("http://127.0.0.1:8000/v1", "http://b:8000/")).base_urls
        ('http://127.0.0.1:8000', 'http://b:8000')
    """

    base_urls: tuple[str, ...]
    """the servers' roots (a trailing ``/v1`` is dropped)"""
    api_key_env: str | None = None
    """the environment variable that holds the servers' key"""
    server_timeout: float = 240.0
    """seconds to wait for the servers to be there, at first"""
    request_timeout: float = 600.0
    """seconds that one answer may take"""
    retry_timeout: float = 60.0
    """seconds that a failing request is tried again"""
    in_flight: InFlight = "wait"
    """at an update, requests that are under way are waited for, or cut short and continued under the new weights"""
    max_context: int | None = None
    """longest row in tokens, if it should be shorter than what the servers take"""
    max_connections: int = 1024
    """requests to one server at once; more wait"""
    exact_for: tuple[SamplingParams, ...] = (SamplingParams(max_tokens=1),)
    """how training samples, by which ``exact_logprobs`` is decided"""
    _headers: Mapping[str, str] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "base_urls", tuple(server_root(url) for url in self.base_urls))
        if not self.base_urls or len(set(self.base_urls)) != len(self.base_urls):
            raise ConfigurationError(
                f"vllm_server_base_url={list(self.base_urls)} must name each server once; give http://host:port, or a "
                "list of them"
            )
        for name in ("server_timeout", "request_timeout", "retry_timeout"):
            value = getattr(self, name)
            if not value > 0 or math.isinf(value):
                raise ConfigurationError(f"vLLM's {name}={value} must be above 0 seconds, and finite")
        for name, least in (("max_connections", 1), ("max_context", 2)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigurationError(f"vLLM's {name}={value} must be at least {least}")
        if self.in_flight not in ("wait", "abort"):
            raise ConfigurationError(f"vLLM's in_flight={self.in_flight!r} must be wait or abort")
        if self.api_key_env is not None:
            key = os.environ.get(self.api_key_env, "").strip()
            if not key or not key.isascii() or not key.isprintable():
                raise ConfigurationError(
                    f"vllm_api_key_env={self.api_key_env!r}: no such environment variable holds a key; export it"
                )
            object.__setattr__(self, "_headers", {"Authorization": f"Bearer {key}"})

    @property
    def headers(self) -> dict[str, str]:
        return dict(self._headers)

    @property
    def is_local(self) -> bool:
        """Whether all servers are on this machine."""
        return all(urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1") for url in self.base_urls)


def server_root(url: str) -> str:
    """
    Raises:
        ConfigurationError: ``url`` is none.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(f"vllm_server_base_url={url!r} is no URL; write http://host:port")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
