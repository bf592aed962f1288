"""Answers from vLLM servers: token ids in, ids and log-probs out, and new weights to them.

::

    sample --session's server--> /v1/completions --tokens--> Completion
    update_weights: prepare (file, or nothing) -> no requests under way -> send -> forget old keys and values -> go on

vLLM lives in a process and an environment of its own; nothing of it is imported here.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from envgrad.errors import ConfigurationError, EnvgradError, SamplerDied, SamplerFailure
from envgrad.rollout.loop import RolloutLoop, gather_or_cancel
from envgrad.sampling.http_retry import Backoff
from envgrad.sampling.sampler import Completion, SamplingParams, Session
from envgrad.sampling.sessions import OpenSessions
from envgrad.sampling.vllm_http import Answer, ServerHttp
from envgrad.sampling.vllm_options import VLLMOptions
from envgrad.sampling.vllm_server import VLLMServer, meet
from envgrad.sampling.vllm_sync import AdapterTransport, Transport

if TYPE_CHECKING:
    from torch import Tensor

FIRST_DELAY, LONGEST_DELAY = 0.2, 5.0
"""seconds between tries (``Backoff``)"""
LOOK_SECONDS = 1.0
"""how often a server is asked whether it is well"""
DEATH_SECONDS = 5.0
"""that all servers may be gone before the run ends"""
_SEEDS = 1 << 63
_STRIDE = 0x9E3779B97F4A7C15
"""between the seeds of an answer's parts"""


Errors: TypeAlias = dict[VLLMServer, EnvgradError | None]
"""for each server None, or why it has not taken the weights"""


@dataclass(slots=True)
class _Row:
    """An answer in the making, which may come in parts: an update of the weights cuts it."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def take(self, answer: Answer, version: int) -> None:
        self.token_ids += answer.token_ids
        self.logprobs += answer.logprobs
        self.versions += [version] * len(answer.token_ids)

    def body(self, model: str, most: int) -> dict[str, Any]:
        """The request for what is missing. All options are set: the server's defaults are its model's own."""
        params, done = self.params, len(self.token_ids)
        return {
            "model": model,
            "prompt": [*self.prompt_ids, *self.token_ids],
            "max_tokens": most - done,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "seed": (params.seed + done * _STRIDE) % _SEEDS,
            "stop": list(params.stop_strings),
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": True,  # of the ids that stop, the list is whole
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
            "add_special_tokens": False,
        }

    def completion(self, reason: Literal["stop", "length"], version: int) -> Completion:
        several = len(set(self.versions)) > 1
        return Completion(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            stop_reason=reason,
            policy_version=self.versions[0] if self.versions else version,
            versions=tuple(self.versions) if several else None,
        )


class VLLMSampler:
    """A ``Sampler`` in front of one or more vLLM servers that ``envgrad vllm-serve`` has started.

    A session stays with one server, the one with the fewest when it first asks (siblings together where that is equal),
    so that its earlier turns are in that server's prefix cache. Where a server is lost, its sessions go on at others.
    When all have been gone for ``DEATH_SECONDS``, everything fails with ``SamplerDied``.

    Args:
        options: Servers and patience.
        choose: Says how new weights get to the servers, when it is known what they are.

    Raises:
        ConfigurationError: a server does not answer, or cannot be trained through.
    """

    def __init__(self, options: VLLMOptions, choose: Callable[[Sequence[VLLMServer]], Transport]) -> None:
        self.options = options
        self._transport: Transport | None = None
        self._loop = RolloutLoop()
        self._sessions = OpenSessions()
        self._open: dict[str, VLLMServer | None] = {}
        """by session"""
        self._groups: dict[str, str] = {}
        self._version = 0
        self._closed = False
        self._dead_since: float | None = None
        self._watch: Future[None] | None = None
        self.retries = 0
        """requests that were repeated"""
        self._clients = [
            ServerHttp(url, headers=options.headers, max_connections=options.max_connections)
            for url in options.base_urls
        ]
        with contextlib.ExitStack() as undo:  # what was opened is closed if a server is not what it should be
            undo.callback(self.close)
            self._servers: tuple[VLLMServer, ...] = self._loop.run(self._meet())
            self._transport = choose(self._servers)
            self._loop.run(self._transport.connect(self._servers))
            self._watch = self._loop.submit(self._watch_servers())
            undo.pop_all()

    async def _meet(self) -> tuple[VLLMServer, ...]:
        timeout = self.options.server_timeout
        return tuple(await gather_or_cancel([meet(http, timeout=timeout) for http in self._clients]))

    # -- the protocol

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def max_context(self) -> int:
        """Longest row in tokens: the least that a server takes (``--max-model-len``), or ``options.max_context``."""
        limits = [server.facts.max_context for server in self._servers]
        return min(limits if self.options.max_context is None else [*limits, self.options.max_context])

    @property
    def exact_logprobs(self) -> bool:
        """Whether the servers' log-probs are those of the whole temperature-scaled distribution, to float32; else the
        trainer computes them again."""
        return all(server.facts.exact(params) for server in self._servers for params in self.options.exact_for)

    @property
    def takes_adapters(self) -> bool:
        """Whether ``update_weights`` takes the tensors of an adapter, and not all of the model's."""
        return isinstance(self._transport, AdapterTransport)

    @property
    def servers(self) -> tuple[VLLMServer, ...]:
        return self._servers

    def begin(self, session: Session) -> None:
        self._sessions.begin(session)
        self._open[session.key] = None
        self._groups[session.key] = session.group

    def end(self, session: Session) -> None:
        self._sessions.end(session)
        self._open.pop(session.key, None)
        self._groups.pop(session.key, None)

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams, session: Session) -> Completion:
        """
        Raises:
            SamplerFailure: a prompt without room, or no answer in time.
            SamplerDied: no server is left.
            ConfigurationError: a server refuses the request; holds its status and what it says.
        """
        if self._closed:
            raise SamplerFailure("the sampler is closed")
        self._sessions.check(session)
        room = self.max_context - len(prompt_ids)
        if not prompt_ids or room < 1:
            raise SamplerFailure(
                f"{len(prompt_ids)} tokens of prompt leave no room for an answer in a context of {self.max_context}: "
                "shorten it, or start the servers with a larger --max-model-len"
            )
        row = _Row(tuple(prompt_ids), params)
        return await asyncio.wrap_future(self._loop.submit(self._answer(row, session, min(params.max_tokens, room))))

    def update_weights(self, version: int, named_tensors: Mapping[str, Tensor] | None) -> None:
        """Serve policy ``version`` from now on, on every server that is there. From any thread.

        With ``in_flight="wait"`` requests that are under way end first, under the old weights; with ``"abort"`` they
        are cut short and go on under the new ones, without keys and values of the old. Adapters need neither.

        Raises:
            WeightTransferError: a server has not taken them. Those that have refused them serve what they had.
            SamplerDied: no server is left.
        """
        if named_tensors is None:
            raise ConfigurationError("a vLLM server shares no module with the trainer: it needs the weights by name")
        if self._transport is None:
            raise SamplerFailure("the sampler is closed")
        try:
            self._transport.prepare(version, named_tensors)
            self._loop.run(self._update(self._transport, version))
        finally:
            self._transport.finish()

    def close(self) -> None:
        """Close the connections, and remove what was written for the servers. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._loop.run(self._close())
        self._loop.close()
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    async def _close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.gather(*(http.close() for http in self._clients))

    # -- on the sampler's loop: requests

    async def _answer(self, row: _Row, session: Session, most: int) -> Completion:
        loop = asyncio.get_running_loop()
        deadline, backoff = math.inf, Backoff(FIRST_DELAY, LONGEST_DELAY)
        # the deadline is for the beginning of a try: each has its whole time
        while True:
            server = await self._server_of(session, deadline)
            await server.admitted()
            version = server.version if server.version is not None else self._version
            outcome = await server.complete(
                row.body(server.model, most), row.params, timeout=self.options.request_timeout
            )
            if outcome is None:  # the weights are exchanged before it has begun
                continue
            if isinstance(outcome, Answer):
                row.take(outcome, version)
                if outcome.finish_reason == "stop":
                    return row.completion("stop", version)
                if len(row.token_ids) >= most:
                    return row.completion("length", version)
                if outcome.finish_reason == "length":
                    raise SamplerFailure(f"{server.url} stopped after {len(row.token_ids)} of {most} tokens")
                deadline, backoff = math.inf, Backoff(FIRST_DELAY, LONGEST_DELAY)
                continue
            if outcome.lost:
                await server.look()
            if deadline == math.inf:
                deadline = loop.time() + self.options.retry_timeout
            wait = backoff.next()
            if loop.time() + wait > deadline:
                raise SamplerFailure(
                    f"{server.url} gave no answer, tried for {self.options.retry_timeout:.3g} s: {outcome.why}"
                ) from outcome.cause
            self.retries += 1
            await asyncio.sleep(wait)

    async def _server_of(self, session: Session, deadline: float) -> VLLMServer:
        """The session's server; another one where that is lost.

        Raises:
            SamplerDied: none is left.
        """
        loop = asyncio.get_running_loop()
        mine = self._open.get(session.key)
        while mine is None or mine.state != "up":
            there = [server for server in self._servers if server.state == "up"]
            if there:
                mine = min(there, key=self._burden(session))
                if session.key in self._open:
                    self._open[session.key] = mine
                break
            self._check_alive(loop.time())
            if loop.time() > deadline:
                raise SamplerFailure(f"no vLLM server answers: {self._troubles()}")
            await asyncio.sleep(FIRST_DELAY)
        return mine

    def _burden(self, session: Session) -> Callable[[VLLMServer], tuple[int, bool, int]]:
        """Sorts servers: few sessions first, then those that have siblings of ``session``."""
        sessions = Counter(server.url for server in self._open.values() if server is not None)
        siblings = {
            server.url
            for key, server in self._open.items()
            if server is not None and self._groups.get(key) == session.group
        }
        return lambda server: (sessions[server.url], server.url not in siblings, self._servers.index(server))

    # -- on the sampler's loop: life

    async def _watch_servers(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await asyncio.gather(*(server.look() for server in self._servers))

    def _check_alive(self, now: float) -> None:
        """
        Raises:
            SamplerDied: no server has been usable for ``DEATH_SECONDS``.
        """
        if any(server.state == "up" for server in self._servers):
            self._dead_since = None
            return
        if self._dead_since is None:
            self._dead_since = now
        if now - self._dead_since >= DEATH_SECONDS:
            raise SamplerDied(f"no vLLM server is left: {self._troubles()}")

    def _troubles(self) -> str:
        return "; ".join(f"{server.url}: {server.trouble}" for server in self._servers if server.state != "up")

    # -- on the sampler's loop: weights

    async def _update(self, transport: Transport, version: int) -> None:
        await asyncio.gather(*(server.look() for server in self._servers))
        there = [server for server in self._servers if server.state != "down"]
        if not there:
            raise SamplerDied(f"no vLLM server is left to take version {version}: {self._troubles()}")
        errors = dict(zip(there, await self._exchange(transport, there, version), strict=True))
        refused = [error for server, error in errors.items() if error is not None and server.state != "down"]
        if refused:
            raise refused[0]
        if all(error is not None for error in errors.values()):
            raise SamplerDied(f"no vLLM server took version {version}: {self._troubles()}")
        self._version = version

    async def _exchange(
        self, transport: Transport, servers: Sequence[VLLMServer], version: int
    ) -> list[EnvgradError | None]:
        """Hand the weights over; for each server None, or why it has not taken them."""
        if not transport.stops_sampling:
            return await transport.send(servers, version)
        timeout = self.options.request_timeout
        errors: Errors = dict.fromkeys(servers)
        try:
            await self._each(servers, errors, lambda server: server.quiesce(self.options.in_flight, timeout=timeout))
            quiet = [server for server in servers if errors[server] is None]
            for server, error in zip(quiet, await transport.send(quiet, version), strict=True):
                errors[server] = error
        except EnvgradError as error:  # of all of them
            errors = {server: errors[server] or error for server in servers}
        finally:
            await self._each(servers, errors, lambda server: server.admit(timeout=timeout))
        return [errors[server] for server in servers]

    @staticmethod
    async def _each(servers: Sequence[VLLMServer], errors: Errors, do: Callable[[VLLMServer], Awaitable[None]]) -> None:
        async def one(server: VLLMServer) -> None:
            try:
                await do(server)
            except EnvgradError as error:
                errors[server] = errors[server] or error

        await asyncio.gather(*(one(server) for server in servers))
