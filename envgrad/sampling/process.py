"""A sampler in a process of its own: the ``LocalSampler`` there, the ``Sampler`` protocol here.

::

    rollout loop --ask, begin, end--> socket --> process_child: LocalSampler, its own copy of the model
                 <--settled futures-- reading thread <-- answers, beats
    trainer      --weights: an open file, checked--> loaded between two of its steps

Waits for the process with a look each second whether it lives; its end fails every waiter and every later caller with
``SamplerDied``, which says how it ended.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from envgrad.cores import is_small
from envgrad.errors import ConfigurationError, EnvgradError, SamplerDied, SamplerFailure, WeightTransferError
from envgrad.rollout.activity import Activity
from envgrad.sampling.limits import check_request, context_of, vocabulary_of
from envgrad.sampling.process_frames import Frame, params_data, read_completion, session_data
from envgrad.sampling.process_link import END_SECONDS, POLL_SECONDS, ProcessLink
from envgrad.sampling.process_model import describe_model, describe_tokenizer
from envgrad.sampling.process_weights import WeightFile, write_weights
from envgrad.sampling.requests import SamplerStats
from envgrad.sampling.sampler import Completion, SamplingParams, Session
from envgrad.sampling.sessions import OpenSessions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

START_SECONDS = 600.0
"""the process has to import, build the model and compare its forwards"""
UPDATE_SECONDS = 1800.0
"""the process has to load published weights, by default"""

_ERRORS: dict[str, type[EnvgradError]] = {
    one.__name__: one for one in (SamplerFailure, ConfigurationError, WeightTransferError)
}
"""errors that the process reports and survives"""


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiter:
    """A request on its way, and the loop that awaits its answer."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Completion]


class ProcessSampler:
    """Samples in another process, from its own copy of the model, and computes beside the trainer.

    The process is a fresh interpreter. It gets the model's class and configuration and its weights, and no object of
    yours. It serves what ``LocalSampler`` (or ``GenerateSampler``) serves there, with the same answers.

    Args:
        model: the model to copy; it is left as it is.
        weights: the weights to start with, by the names of a plain model of this class; default: the model's own.
        version: the policy version of these weights.
        threads: CPU threads of the process's computations; default: as many as here, or 1 for a small model.
        update_timeout: seconds in which the process must have loaded published weights.
        max_sessions, max_context, max_kv_tokens, deterministic, autocast: as in ``LocalSampler``.
        tokenizer: needed for stop strings only.
        activity: is told of the process's steps, if given.

    Raises:
        ConfigurationError: the model cannot be copied or served, or an option is out of range.
        SamplerDied: the process ended while it started.
        WeightTransferError: there is no room for the weights on their way.

    Example (not run with the others: a process takes seconds to start)::

        sampler = ProcessSampler(model, max_sessions=4, max_context=64)
        sampler.update_weights(1, model.state_dict())
        sampler.close()
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_sessions: int,
        max_context: int | None = None,
        max_kv_tokens: int | None = None,
        deterministic: bool = False,
        tokenizer: PreTrainedTokenizerBase | None = None,
        autocast: torch.dtype | None = None,
        activity: Activity | None = None,
        weights: Mapping[str, Tensor] | None = None,
        version: int = 0,
        threads: int | None = None,
        update_timeout: float = UPDATE_SECONDS,
    ) -> None:
        if max_sessions < 1:
            raise ConfigurationError(f"max_sessions must be at least 1, got {max_sessions}")
        if threads is not None and threads < 1:
            raise ConfigurationError(f"threads must be at least 1, got {threads}")
        self._max_context = context_of(model, max_context, max_kv_tokens)
        self._vocabulary = vocabulary_of(model)
        self._version = version
        self._activity = activity
        self._stop_strings = tokenizer is not None
        self._numbers = itertools.count(1)
        self._sessions = OpenSessions()
        self._waiting: dict[int, _Waiter] = {}
        self._replies: dict[int, Future[Frame]] = {}
        self._ready: Future[Frame] = Future()
        self._failure: EnvgradError | None = None
        self._lock = threading.Lock()
        self._publishing = threading.Lock()
        self._asked_once = False
        self._update_timeout = update_timeout
        self._served = ""
        self.stats = SamplerStats()
        """counts since construction, as of the last answer"""
        threads = threads or (1 if is_small(model.parameters()) else torch.get_num_threads())
        start: dict[str, Any] = {
            "model": describe_model(model),
            "tokenizer": describe_tokenizer(tokenizer),
            "options": {
                "max_sessions": max_sessions,
                "max_context": max_context,
                "max_kv_tokens": max_kv_tokens,
                "deterministic": deterministic,
            },
            "autocast": None if autocast is None else str(autocast).removeprefix("torch."),
            "threads": threads,
            "matmul_precision": torch.get_float32_matmul_precision(),
        }
        with ExitStack() as undo:
            file = undo.enter_context(write_weights(model.state_dict() if weights is None else weights, version))
            self._link = ProcessLink(threads=threads, on_frames=self._take, on_end=self._end)
            with ExitStack() as kill:
                kill.callback(self._link.close)
                self._post(Frame(kind="start", data=start | {"weights": file.facts()}, file=file.file))
                self._served = self._wait(self._ready, START_SECONDS, "it has not started").data["sampler"]
                kill.pop_all()

    # -- the rollout's side -------------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def exact_logprobs(self) -> bool:
        return True

    @property
    def max_context(self) -> int:
        return self._max_context

    @property
    def served_by(self) -> str:
        """Name of the sampler in the process: ``LocalSampler``, or ``GenerateSampler`` where the model needs that."""
        return self._served

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._link.process.pid

    def begin(self, session: Session) -> None:
        self._sessions.begin(session)
        self._post(Frame(kind="begin", data=session_data(session)))

    def end(self, session: Session) -> None:
        if self._sessions.end(session):
            with suppress(EnvgradError):  # the next request tells
                self._post(Frame(kind="end", data=session_data(session)))

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams, session: Session) -> Completion:
        check_request(prompt_ids, params, max_context=self._max_context, vocabulary=self._vocabulary)
        if params.stop_strings and not self._stop_strings:
            raise ConfigurationError(f"stop strings {params.stop_strings} need a sampler made with tokenizer=...")
        with self._sessions.asking(session):
            return await self._ask(prompt_ids, params, session)

    async def _ask(self, prompt_ids: Sequence[int], params: SamplingParams, session: Session) -> Completion:
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        waiter = _Waiter(loop=loop, future=loop.create_future())
        data = {"id": number, "session": session_data(session), "params": params_data(params)}
        self._asked_once = True
        with self._lock:
            if self._failure is None:
                self._waiting[number] = waiter
        try:
            self._post(Frame(kind="ask", data=data, columns=(array("i", prompt_ids),)))
            return await waiter.future
        except asyncio.CancelledError:
            with suppress(EnvgradError):
                self._post(Frame(kind="cancel", data={"id": number}))
            raise
        finally:
            self._waiting.pop(number, None)

    def update_weights(self, version: int, named_tensors: Mapping[str, Tensor] | None) -> None:
        """Serve policy ``version``. The process reads and checks the weights while it samples, and takes them between
        two steps; then this returns. If it raises, the process serves the version that it had.

        None only says which version the weights are that the process was started with.

        Raises:
            WeightTransferError: the weights could not be written, or arrived torn or corrupt.
            ConfigurationError: names or shapes are not the model's, or None after the first request.
            SamplerDied: the process is gone, or has not loaded them in time.
        """
        if named_tensors is None and version != self._version and self._asked_once:
            raise ConfigurationError(
                f"update_weights({version}, None): a sampler in another process has its own copy of the weights, so it "
                "needs those of this version; pass them by name"
            )
        with self._publishing:
            if named_tensors is None:
                named_tensors = {}  # the process labels what it has
            with write_weights(named_tensors, version) as file:
                self._publish(file)
            self._version = version

    def _publish(self, file: WeightFile) -> None:
        number = next(self._numbers)
        reply: Future[Frame] = Future()
        with self._lock:
            if self._failure is None:
                self._replies[number] = reply
        try:
            self._post(Frame(kind="weights", data={"id": number, "weights": file.facts()}, file=file.file))
            self._wait(reply, self._update_timeout, f"it has not loaded version {file.version}")
        finally:
            self._replies.pop(number, None)

    def close(self) -> None:
        """End the process; open requests fail. Safe to call twice."""
        self._link.close()

    def _post(self, frame: Frame) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            self._link.send(frame)
        except OSError as error:
            if isinstance(error, TimeoutError):  # a part may have been sent: the stream is of no use any more
                self._link.process.kill()
            self._link.ended.wait(2 * END_SECONDS)
            raise self._failure or SamplerDied(f"nothing can be sent to the sampler's process: {error}") from error

    def _wait(self, future: Future[Frame], seconds: float, problem: str) -> Frame:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                return future.result(POLL_SECONDS)
            except FutureTimeout:
                if not self._link.reading:
                    raise self._failure or SamplerDied("nothing reads from the sampler's process any more") from None
        raise SamplerDied(f"the sampler's process ({self.pid}) lives, but in {seconds:.0f} s {problem}")

    # -- the reading thread -------------------------------------------------------------------------------------------

    def _take(self, frames: list[Frame]) -> None:
        results: list[tuple[_Waiter, Completion | BaseException]] = []
        for frame in frames:
            number = frame.data.get("id", 0)
            if frame.kind == "ready":
                self._ready.set_result(frame)
            elif frame.kind == "loaded" and (reply := self._replies.get(number)) is not None:
                reply.set_result(frame)
            elif frame.kind == "error":
                error = _ERRORS[frame.data["type"]](frame.data["text"])
                if (reply := self._replies.get(number)) is not None:
                    reply.set_exception(error)
                if (waiter := self._waiting.get(number)) is not None:
                    results.append((waiter, error))
            elif frame.kind in ("answer", "beat"):
                self._hear(frame)
                if (waiter := self._waiting.get(number)) is not None:
                    results.append((waiter, read_completion(frame)))
        _deliver(results)

    def _hear(self, frame: Frame) -> None:
        """Spans and counts; the clock is the machine's, the same in both processes."""
        self.stats = SamplerStats(**frame.data["stats"])
        if self._activity is not None:
            for kind, start, end, tokens in frame.data["spans"]:
                prefill = tokens if kind == "prefill" else 0
                self._activity.forwarded(start, end, prefill=prefill, decode=tokens - prefill)

    def _end(self, failure: EnvgradError) -> None:
        with self._lock:
            self._failure = failure
            waiting, replies = list(self._waiting.values()), list(self._replies.values())
        for reply in [*replies, self._ready]:
            if not reply.done():
                reply.set_exception(failure)
        _deliver([(waiter, failure) for waiter in waiting])


make_process_sampler = ProcessSampler
"""called like ``make_local_sampler``"""


def _deliver(results: list[tuple[_Waiter, Completion | BaseException]]) -> None:
    """Wake each event loop once, with all its results."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Waiter, Completion | BaseException]]] = {}
    for waiter, result in results:
        by_loop.setdefault(waiter.loop, []).append((waiter, result))
    for loop, mine in by_loop.items():
        with suppress(RuntimeError):  # the loop was closed: nobody waits any more
            loop.call_soon_threadsafe(_settle, mine)


def _settle(results: list[tuple[_Waiter, Completion | BaseException]]) -> None:
    for waiter, result in results:
        if waiter.future.done():
            continue
        if isinstance(result, BaseException):
            waiter.future.set_exception(result)
        else:
            waiter.future.set_result(result)
