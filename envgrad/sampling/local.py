"""In-process continuous batching over a Hugging Face causal LM: the engine in a thread, the ``Sampler`` in front."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from envgrad.cores import allowed_cores, compute_alone, is_small
from envgrad.errors import ConfigurationError, SamplerFailure
from envgrad.rollout.activity import Activity
from envgrad.sampling.compatibility import cached_forward_fault, fast_decoder
from envgrad.sampling.engine import Engine
from envgrad.sampling.generate import GenerateSampler
from envgrad.sampling.kv_cache import KVCache
from envgrad.sampling.limits import check_request, check_stop_strings, context_of, vocabulary_of
from envgrad.sampling.requests import Request, SamplerStats, StopStrings
from envgrad.sampling.sampler import Completion, SamplingParams, Session
from envgrad.sampling.scheduler import Scheduler
from envgrad.sampling.sessions import OpenSessions
from envgrad.sampling.turnaround import Turnaround

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 60.0
"""that the step in hand may take when the sampler is closed"""


@dataclass(slots=True, kw_only=True, eq=False)
class _Event:
    """Something the rollout's thread tells the engine's thread."""

    kind: Literal["begin", "request", "cancel", "end", "weights", "close"]
    session: Session | None = None
    request: Request | None = None
    version: int = 0
    named_tensors: Mapping[str, Tensor] | None = None
    done: threading.Event = field(default_factory=threading.Event)
    error: ConfigurationError | None = None
    time: float = field(default_factory=time.perf_counter)


class LocalSampler:
    """Samples from a model in this process; the trainer may share the module.

    A session keeps its keys and values between turns, a group's prompt is forwarded once, finished rows are replaced at
    once. The module is in eval mode and without gradients while requests are open, and as it was before when none is.

    Args:
        model: any causal LM whose cached forward equals its plain one (``LocalSampler.check``). It gets envgrad's
            attention and keeps it.
        max_sessions: rows decoded together; more sessions than that wait.
        max_context: longest row in tokens; default: the model's ``max_position_embeddings``.
        max_kv_tokens: most tokens of key and value memory, all slots together; default: no limit but
            ``max_sessions`` x the longest row. With less, sessions in a tool lose their rows, and recompute them.
        deterministic: step only when every open session has a request here, in session order, so that the batches
            depend on token counts and never on the clock. All sessions that take part must have begun.
        tokenizer: needed for stop strings only.
        autocast: dtype for ``torch.autocast`` around the forward, as the trainer's; default: none.
        activity: is told of each step, if given.
        update_timeout: seconds in which new weights must be taken over; default: no limit while the engine lives.
        threads: 1: the thread of this sampler computes on one core; more: compiled kernels on so many, torch's
            operations on as many as torch has. By default kernels get as many as torch has, too, and operations 1
            for a small model (``cores.SMALL_BYTES``), for which they are too short to be shared.

    Raises:
        ConfigurationError: the model cannot be served, or an option is out of range.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        ...     num_attention_heads=2, num_key_value_heads=1)
        >>> sampler = LocalSampler(LlamaForCausalLM(config), max_sessions=4, max_context=64)
        >>> session = Session(key="train/0/0", group="train/0", order=(0, 0, 0))
        >>> sampler.begin(session)
        >>> answer = asyncio.run(sampler.sample([1, 2, 3], SamplingParams(max_tokens=5), session))
        >>> len(answer.token_ids), answer.stop_reason, sampler.stats.prefill_tokens
        (5, 'length', 3)
        >>> sampler.close()
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
        update_timeout: float | None = None,
        threads: int | None = None,
    ) -> None:
        if max_sessions < 1:
            raise ConfigurationError(f"max_sessions must be at least 1, got {max_sessions}")
        self._max_context = context_of(model, max_context, max_kv_tokens)
        self._vocabulary = vocabulary_of(model)
        fault = self.check(model)
        if fault is not None:
            raise ConfigurationError(f"{type(model).__name__} cannot be served locally: {fault}; use GenerateSampler")
        cores = threads or min(torch.get_num_threads(), allowed_cores())
        fast = None if autocast is not None else fast_decoder(model, cores)
        scheduler = Scheduler(
            KVCache() if fast is None else fast.new_cache(), SamplerStats(), max_sessions=max_sessions,
            max_context=self._max_context, max_kv_tokens=max_kv_tokens,
        )  # fmt: skip
        self._stops = None if tokenizer is None else StopStrings(tokenizer)
        self._engine = Engine(
            model, scheduler, stops=self._stops, autocast=autocast, activity=activity, fast=fast
        )  # fmt: skip
        self._alone = is_small(model.parameters()) if threads is None else threads == 1
        self._deterministic = deterministic
        self._update_timeout = update_timeout
        self._turnaround = Turnaround()
        self._events: list[_Event] = []
        self._sessions = OpenSessions()
        self._inbox: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="envgrad-sampler", daemon=True)
        self._thread.start()
        # at the interpreter's exit, so that no step runs while modules are torn down
        self._closer = weakref.finalize(self, _stop, self._inbox, self._thread)

    @staticmethod
    def check(model: PreTrainedModel) -> str | None:
        """Why ``model`` cannot be served by this sampler; None if it can (then it carries envgrad's attention)."""
        return cached_forward_fault(model)

    @property
    def policy_version(self) -> int:
        return self._engine.version

    @property
    def exact_logprobs(self) -> bool:
        return True

    @property
    def max_context(self) -> int:
        return self._max_context

    @property
    def stats(self) -> SamplerStats:
        """Counts since construction; they move while requests run."""
        return self._engine.stats

    # -- the rollout's side -------------------------------------------------------------------------------------------

    def begin(self, session: Session) -> None:
        self._sessions.begin(session)
        self._post(_Event(kind="begin", session=session))

    def end(self, session: Session) -> None:
        if self._sessions.end(session):
            with suppress(SamplerFailure):
                self._post(_Event(kind="end", session=session), quiet=True)

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams, session: Session) -> Completion:
        check_request(prompt_ids, params, max_context=self._max_context, vocabulary=self._vocabulary)
        check_stop_strings(params, self._stops)
        with self._sessions.asking(session):
            loop = asyncio.get_running_loop()
            request = Request.of(prompt_ids, params, session, self._max_context)
            request.loop, request.future = loop, loop.create_future()
            try:
                self._post(_Event(kind="request", session=session, request=request))
                return await request.future
            except asyncio.CancelledError:
                self._post(_Event(kind="cancel", session=session, request=request), quiet=True)
                raise

    def update_weights(self, version: int, named_tensors: Mapping[str, Tensor] | None) -> None:
        """Serve policy ``version``, between two steps: all keys and values go, running requests recompute theirs, and
        report each token's version. Tensors are copied into the module by name; None if it is shared."""
        event = _Event(kind="weights", version=version, named_tensors=named_tensors)
        self._post(event)
        while not event.done.wait(1.0):
            if self._failure is not None:
                raise self._failure
            if self._update_timeout is not None and time.perf_counter() - event.time > self._update_timeout:
                raise SamplerFailure(
                    f"the weights of version {version} were not taken over within {self._update_timeout} s "
                    "(weight_sync_timeout): one decoding step takes longer than that; raise it"
                )
        if event.error is not None:
            raise event.error

    def close(self) -> None:
        """Stop the thread; open requests fail with ``SamplerFailure``. Safe to call twice."""
        self._closer()

    def _post(self, event: _Event, quiet: bool = False) -> None:
        with self._lock:
            if self._failure is None:
                self._inbox.put(event)
            elif not quiet:
                raise self._failure

    # -- the engine's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        failure: BaseException = SamplerFailure("the sampler is closed")
        if self._alone:
            compute_alone()
        try:
            while self._gather():
                finished = self._engine.step(patience=self._turnaround.patience)
                now = time.perf_counter()
                self._turnaround.stepped(self._engine.stats)
                for request in finished:
                    self._turnaround.left(request.session.key, now)
                if not self._engine.scheduler.has_work:
                    self._engine.leave()
                _deliver([(request, request.completion) for request in finished])
        except BaseException as error:  # handed to every waiter and every later caller
            logger.debug("the sampler's thread failed", exc_info=error)
            failure = error
        finally:
            self._fail(failure)

    def _fail(self, failure: BaseException) -> None:
        self._engine.leave()
        with self._lock:
            self._failure = failure
        while not self._inbox.empty():
            self._events.append(self._inbox.get_nowait())
        requests = self._engine.scheduler.requests()
        requests += [one.request for one in self._events if one.request is not None and one.kind == "request"]
        _deliver([(request, failure) for request in requests])

    def _gather(self) -> bool:
        """Wait until a step is due, and tell the engine what happened; False to stop."""
        while True:
            due = self._engine.scheduler.has_work or any(one.kind == "request" for one in self._events)
            if not due:
                if self._events and not self._turnaround.outside:  # every session has ended
                    self._tell_engine()
                    self._engine.rest()
                if not self._receive(None):
                    return False
                continue
            if not self._drain() or not self._linger():
                return False
            self._tell_engine()
            if self._engine.scheduler.has_work:
                return True
            self._engine.leave()

    def _receive(self, timeout: float | None) -> bool:
        """Take one event; False if it says stop. Waits up to ``timeout`` seconds (None: for ever).

        Raises:
            queue.Empty: none came.
        """
        event = self._inbox.get(timeout=timeout) if timeout is None or timeout > 0 else self._inbox.get_nowait()
        if event.kind == "close":
            return False
        if event.kind == "weights":
            self._tell_engine()
            try:
                self._engine.update_weights(event.version, event.named_tensors)
            except ConfigurationError as error:  # the caller's names or shapes, not the engine's state
                event.error = error
            event.done.set()
            return True
        self._events.append(event)
        if event.session is not None:
            self._turnaround.heard(event.kind, event.session.key, event.time)
        return True

    def _drain(self) -> bool:
        while not self._inbox.empty():
            if not self._receive(0.0):
                return False
        return True

    def _linger(self) -> bool:
        """Wait for sessions that will ask again soon, while that is worth more than stepping without them."""
        if self._deterministic:
            while self._turnaround.outside:
                if not self._receive(None):
                    return False
            return True
        started = time.perf_counter()
        expected = self._turnaround.expected(started)
        while expected:
            here = self._engine.scheduler.num_requests + sum(one.kind == "request" for one in self._events)
            timeout = self._turnaround.worth(expected, here, started) - time.perf_counter()
            if timeout <= 0:
                break
            try:
                if not self._receive(timeout):
                    return False
            except queue.Empty:
                break
            expected = {key: until for key, until in expected.items() if key in self._turnaround.outside}
        self._engine.stats.linger_seconds += time.perf_counter() - started
        return True

    def _tell_engine(self) -> None:
        """Hand the events to the scheduler in session order, each session's in the order they came."""
        scheduler = self._engine.scheduler
        events, self._events = self._events, []
        events.sort(key=lambda one: one.session.order if one.session is not None else ())
        for event in events:
            if event.kind == "request" and event.request is not None:
                scheduler.add(event.request)
            elif event.kind == "cancel" and event.request is not None:
                scheduler.cancel(event.request)
            elif event.kind == "begin" and event.session is not None:
                scheduler.begin(event.session)
            elif event.kind == "end" and event.session is not None:
                scheduler.end(event.session)


def make_local_sampler(
    model: PreTrainedModel,
    *,
    max_sessions: int,
    max_context: int | None = None,
    max_kv_tokens: int | None = None,
    deterministic: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
    autocast: torch.dtype | None = None,
    activity: Activity | None = None,
    update_timeout: float | None = None,
    threads: int | None = None,
) -> LocalSampler | GenerateSampler:
    """``LocalSampler`` where the model allows it, else ``GenerateSampler`` with a notice that names the reason.

    Arguments and errors are those of ``LocalSampler``.
    """
    fault = LocalSampler.check(model)
    if fault is None:
        return LocalSampler(
            model, max_sessions=max_sessions, max_context=max_context, max_kv_tokens=max_kv_tokens,
            deterministic=deterministic, tokenizer=tokenizer, autocast=autocast, activity=activity,
            update_timeout=update_timeout, threads=threads,
        )  # fmt: skip
    logger.warning("%s is sampled one row at a time by model.generate, which is slow: %s", type(model).__name__, fault)
    context = context_of(model, max_context)
    return GenerateSampler(
        model, max_context=context, tokenizer=tokenizer, autocast=autocast, activity=activity,
        update_timeout=update_timeout,
    )  # fmt: skip


def _deliver(results: list[tuple[Request, Completion | BaseException]]) -> None:
    """Wake each event loop once, with all its results."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Request, Completion | BaseException]]] = {}
    for request, result in results:
        if request.loop is not None:
            by_loop.setdefault(request.loop, []).append((request, result))
    for loop, mine in by_loop.items():
        with suppress(RuntimeError):  # the loop was closed: nobody waits any more
            loop.call_soon_threadsafe(_settle, mine)


def _settle(results: list[tuple[Request, Completion | BaseException]]) -> None:
    for request, result in results:
        if request.future is None or request.future.done():
            continue
        if isinstance(result, BaseException):
            request.future.set_exception(result)
        else:
            request.future.set_result(result)


def _stop(inbox: queue.SimpleQueue[_Event], thread: threading.Thread) -> None:
    inbox.put(_Event(kind="close"))
    thread.join(CLOSE_SECONDS)
    if thread.is_alive():
        logger.warning("a decoding step has not ended %.0f s after the sampler was closed; it is left", CLOSE_SECONDS)
