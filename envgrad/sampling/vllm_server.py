"""One vLLM server as the sampler sees it: who uses it, which version it serves, and whether it is there."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from envgrad.errors import ConfigurationError, WeightTransferError
from envgrad.sampling.sampler import SamplingParams
from envgrad.sampling.vllm_http import Answer, Json, ServerHttp, Trouble
from envgrad.vllm.envgrad_vllm_worker import PROTOCOL

logger = logging.getLogger(__name__)

STATUS_SECONDS = 60.0
"""that a server's workers may take to say how they are"""

HUNG_SECONDS = 60.0
"""that a server may leave ``/health`` unanswered"""
ABORT_SECONDS = 2.0
"""that answers which were cut short may take to come back"""

State: TypeAlias = Literal["up", "down", "stale"]
"""``down``: nobody answers; ``stale``: it is back, and has not the weights it should have until the next update"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What a server said of itself when it was first asked."""

    model: str
    """its model's name in requests"""
    max_context: int
    """longest row in tokens"""
    num_workers: int
    dtype: str
    logprobs_mode: str
    has_lora: bool
    shape: Mapping[str, int]
    """of its model: vocab_size, hidden_size, ..., as far as its configuration says"""

    def exact(self, params: SamplingParams) -> bool:
        """Whether its log-probs are those of the full distribution at the temperature, to float32.

        Raw ones ignore the temperature; processed ones are of what truncation and penalties leave.

        Example:
            >>> facts = ServerFacts(model="m", max_context=9, num_workers=1, dtype="float32",
            ...     logprobs_mode="processed_logprobs", has_lora=False, shape={})
            >>> facts.exact(SamplingParams(max_tokens=1, temperature=0.7))
            True
            >>> facts.exact(SamplingParams(max_tokens=1, top_p=0.9))
            False
        """
        if self.dtype != "float32":
            return False
        if self.logprobs_mode == "raw_logprobs":
            return params.temperature == 1.0
        untouched = params.top_p == 1.0 and not params.top_k and not params.min_p and params.repetition_penalty == 1.0
        return self.logprobs_mode == "processed_logprobs" and untouched and not params.greedy


class VLLMServer:
    """State of one server. All methods but the constructor belong to one event loop."""

    def __init__(self, http: ServerHttp, facts: ServerFacts) -> None:
        self.http = http
        self.facts = facts
        self.model = facts.model
        """what requests name: the model, or the adapter of the version"""
        self.version: int | None = None
        """what new requests are answered by; None: not known"""
        self.state: State = "up"
        self.trouble = ""
        self.num_requests = 0
        self._with_stop_strings = 0
        self._gate = asyncio.Event()
        self._gate.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._requests: dict[str, int] = {}
        self._left = asyncio.Event()
        self._interruption: asyncio.Future[Trouble | None] = asyncio.get_running_loop().create_future()
        self._well = time.monotonic()

    @property
    def url(self) -> str:
        return self.http.url

    async def admitted(self) -> None:
        """Wait while the weights are being exchanged."""
        await self._gate.wait()

    async def complete(
        self, body: Mapping[str, Json], params: SamplingParams, *, timeout: float
    ) -> Answer | Trouble | None:
        """Sampled tokens; None if the request has to be made again, because the weights are being exchanged.

        Raises:
            ConfigurationError: the server refuses the request.
        """
        interruption = self._interruption
        with self._request(params):
            asked = asyncio.ensure_future(self.http.complete(body, timeout=timeout))
            try:
                waiting: set[asyncio.Future[Any]] = {asked, interruption}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if asked.done():
                    return asked.result()
                return interruption.result()
            finally:
                asked.cancel()

    def _interrupt(self, result: Trouble | None) -> None:
        """End all requests that are under way."""
        self._interruption.set_result(result)
        self._interruption = asyncio.get_running_loop().create_future()

    @contextmanager
    def _request(self, params: SamplingParams) -> Iterator[None]:
        model, stops = self.model, bool(params.stop_strings)
        self.num_requests += 1
        self._requests[model] = self._requests.get(model, 0) + 1
        self._with_stop_strings += stops
        self._idle.clear()
        try:
            yield
        finally:
            self.num_requests -= 1
            self._requests[model] -= 1
            self._with_stop_strings -= stops
            if not self._requests[model]:
                del self._requests[model]
                self._left.set()
            if not self.num_requests:
                self._idle.set()

    async def nobody_uses(self, model: str) -> None:
        """Wait until no request names ``model`` any more."""
        while model in self._requests:
            self._left.clear()
            await self._left.wait()

    # -- is it there?

    def lost(self, why: str) -> None:
        """Nobody answers."""
        if self.state != "down":
            logger.warning("the vLLM server %s is gone: %s", self.url, why)
        self.state, self.trouble = "down", why
        self._interrupt(Trouble(why=why, lost=True))

    async def look(self) -> None:
        """Find out whether it is there, and whether it still has the weights that it had."""
        trouble = await self.http.healthy()
        if trouble is not None:
            if trouble.lost or trouble.why.startswith("status 503"):  # its engine is dead
                self.lost(trouble.why)
            elif time.monotonic() - self._well > HUNG_SECONDS:
                self.lost(f"{trouble.why}, nor for {HUNG_SECONDS:.0f} s")
            return
        self._well = time.monotonic()
        if self.state != "down":
            return
        found = await self._workers()
        if found is None:
            return
        # Adapters do not show in a worker's version, and a server that was started again has none.
        same = self.model == self.facts.model and self.version is not None and _versions(found) == {self.version}
        self.state = "up" if same else "stale"
        self.trouble = "" if same else f"it was started again, and lacks version {self.version} of the policy"
        logger.warning("the vLLM server %s is back%s", self.url, "" if same else f": {self.trouble}")

    async def _workers(self) -> list[Mapping[str, Json]] | None:
        found = await self.http.call_workers("envgrad_status", {}, timeout=STATUS_SECONDS)
        return None if isinstance(found, Trouble) else list(found)

    # -- weights

    async def quiesce(self, mode: Literal["wait", "abort"], *, timeout: float) -> None:
        """Let no request in, and wait until none is under way: all are answered, or (``abort``) cut short. Where one
        has stop strings, all are waited for: a stop string could lie across the cut.

        Raises:
            WeightTransferError: it did not come to rest in time.
        """
        self._gate.clear()
        if mode == "abort" and not self._with_stop_strings:
            await self._must("/pause?mode=abort&clear_cache=true", timeout)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), ABORT_SECONDS)
            if self.num_requests:  # they came when the server had paused: it holds them, and has sampled nothing
                self._interrupt(None)
                await self._idle.wait()
            return
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError as error:
            raise WeightTransferError(
                f"{self.url} still answers {self.num_requests} requests after {timeout:.3g} s"
            ) from error
        await self._must("/pause?mode=wait&clear_cache=true", timeout)  # of others' requests

    async def admit(self, *, timeout: float) -> None:
        """Forget keys and values of the old weights, and let requests in again.

        Raises:
            WeightTransferError: the server does not go on.
        """
        try:
            reset = await self._must("/reset_prefix_cache", timeout)
            if isinstance(reset, Mapping) and reset.get("success") is False:
                self.state, self.trouble = "stale", "it keeps keys and values of old weights"
                raise WeightTransferError(f"{self.url} could not forget keys and values of the old weights")
        finally:
            try:
                await self._must("/resume", timeout)
            finally:
                self._gate.set()

    async def _must(self, path: str, timeout: float) -> Json:
        outcome = await self.http.ask(path, {}, timeout=timeout)
        if isinstance(outcome, Trouble):
            self._lost_if(outcome)
            raise WeightTransferError(f"{self.url}: {outcome.why}") from outcome.cause
        return outcome

    def _lost_if(self, trouble: Trouble) -> None:
        if trouble.lost:
            self.lost(trouble.why)

    async def tell_workers(self, method: str, arguments: Mapping[str, Json], *, timeout: float) -> list[dict[str, Any]]:
        """Each worker's answer to ``method``.

        Raises:
            WeightTransferError: a worker refused, or none answered. Says which version the server has now.
        """
        outcome = await self.http.call_workers(method, arguments, timeout=timeout)
        if isinstance(outcome, Trouble):
            self._lost_if(outcome)
            if not outcome.lost:  # the workers raised while they took the weights over, or never came back
                await self._after_a_failure()
            raise WeightTransferError(f"{self.url}: {outcome.why}{self._kept()}") from outcome.cause
        answers = [dict(answer) for answer in outcome]
        refused = [f"worker {answer.get('rank')}: {answer['error']}" for answer in answers if answer.get("error")]
        if refused:
            await self._after_a_failure()
            raise WeightTransferError(f"{self.url}, {'; '.join(refused)}{self._kept()}")
        return answers

    async def _after_a_failure(self) -> None:
        """Find out which weights the server has: of one version, or of none."""
        found = await self._workers()
        torn = found is not None and not all(worker.get("whole") for worker in found)
        if found is not None and (torn or (self.model == self.facts.model and _versions(found) != {self.version})):
            self.state, self.version = "stale", None
            self.trouble = "an update failed half way, so that its weights are of no version"

    def _kept(self) -> str:
        return "" if self.version is None else f". It still serves version {self.version}"

    def took(self, version: int, answers: Sequence[Mapping[str, Json]]) -> None:
        """All workers have ``version``.

        Raises:
            WeightTransferError: one says another.
        """
        others = [answer.get("version") for answer in answers if answer.get("version") != version]
        if others or len(answers) != self.facts.num_workers:
            self.state, self.version, self.trouble = "stale", None, "its workers differ in their weights"
            raise WeightTransferError(
                f"{self.url}: {len(answers)} of {self.facts.num_workers} workers answered, and {len(others)} have not "
                f"taken version {version}"
            )
        self.serve(version, self.facts.model)

    def serve(self, version: int, model: str) -> None:
        """From now on new requests name ``model``, which is ``version`` of the policy."""
        self.version, self.model = version, model
        self.state, self.trouble = "up", ""


def _versions(workers: Sequence[Mapping[str, Json]]) -> set[int | None]:
    return {worker.get("version") for worker in workers}


async def meet(http: ServerHttp, *, timeout: float) -> VLLMServer:
    """Wait until the server is there, and ask what it is.

    Raises:
        ConfigurationError: nobody answers within ``timeout`` seconds, or it is no server that can be trained through.
    """
    await _wait_for(http, timeout)
    models = await _told(http, http.ask("/v1/models", timeout=STATUS_SECONDS))
    workers = await _told(http, http.call_workers("envgrad_status", {}, timeout=STATUS_SECONDS))
    first = workers[0]
    if first.get("protocol") != PROTOCOL:
        raise ConfigurationError(
            f"{http.url} has a worker extension of protocol {first.get('protocol')}, not {PROTOCOL}: it was started by "
            "another version of envgrad; start it with this one's `envgrad vllm-serve`"
        )
    if first["data_parallel_size"] > 1:
        raise ConfigurationError(
            f"{http.url} runs {first['data_parallel_size']} data-parallel replicas behind one address; start one "
            "server for each and give all their addresses, so that each episode stays with one of them"
        )
    facts = ServerFacts(
        model=models["data"][0]["id"],
        max_context=int(first["max_model_len"]),
        num_workers=len(workers),
        dtype=first["dtype"],
        logprobs_mode=first["logprobs_mode"],
        has_lora=bool(first["lora"]),
        shape=dict(first["shape"]),
    )
    return VLLMServer(http, facts)


async def _wait_for(http: ServerHttp, timeout: float) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    told = False
    while (trouble := await http.healthy()) is not None:
        left = deadline - loop.time()
        if left <= 0:
            raise ConfigurationError(
                f"no vLLM server answers at {http.url} within vllm_server_timeout={timeout:.3g} s ({trouble.why}); "
                "start one with `envgrad vllm-serve --model ...`"
            )
        if not told:
            told = True
            logger.warning("waiting for the vLLM server %s (%s)", http.url, trouble.why)
        await asyncio.sleep(min(1.0, left))


async def _told(http: ServerHttp, request: Any) -> Any:
    outcome = await request
    if isinstance(outcome, Trouble):
        raise ConfigurationError(
            f"{http.url} cannot be trained through: {outcome.why}; start it with `envgrad vllm-serve`, which adds the "
            "worker extension"
        ) from outcome.cause
    return outcome
