"""The fallback: ``model.generate``, one row at a time, for models that the local engine cannot serve."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from envgrad.errors import ConfigurationError, SamplerFailure
from envgrad.rollout.activity import Activity
from envgrad.sampling.engine import load_tensors
from envgrad.sampling.limits import check_request, check_stop_strings, context_of, serving, vocabulary_of
from envgrad.sampling.requests import Request, SamplerStats, StopStrings
from envgrad.sampling.sampler import Completion, SamplingParams, Session
from envgrad.sampling.sampling_ops import SamplingBatch, sample_tokens
from envgrad.sampling.sessions import OpenSessions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True, kw_only=True, eq=False)
class _Update:
    """New weights that wait for the row in hand."""

    version: int
    named_tensors: Mapping[str, Tensor] | None
    done: threading.Event = field(default_factory=threading.Event)
    error: ConfigurationError | None = None


class GenerateSampler:
    """Answers one request at a time with ``model.generate``; slow, and right for every causal LM.

    The same seeds give the same tokens as ``LocalSampler`` (up to float rounding). Log-probs come from one plain
    forward of the finished row, so they are the trainer's.

    Args:
        model, max_context, tokenizer, autocast, activity, update_timeout: as in ``LocalSampler``.

    Raises:
        ConfigurationError: ``max_context`` is out of range.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> sampler = GenerateSampler(GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2)))
        >>> session = Session(key="train/0/0", group="train/0", order=(0, 0, 0))
        >>> sampler.begin(session)
        >>> len(asyncio.run(sampler.sample([1, 2], SamplingParams(max_tokens=3), session)).token_ids)
        3
        >>> sampler.close()
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_context: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        autocast: torch.dtype | None = None,
        activity: Activity | None = None,
        update_timeout: float | None = None,
    ) -> None:
        self._model = model
        self._update_timeout = update_timeout
        self._updates: queue.SimpleQueue[_Update] = queue.SimpleQueue()
        self._max_context = context_of(model, max_context)
        self._vocabulary = vocabulary_of(model)
        self._stops = None if tokenizer is None else StopStrings(tokenizer)
        self._autocast = autocast
        self._activity = activity
        self._version = 0
        self._sessions = OpenSessions()
        self._closed = False
        self._running: set[Request] = set()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="envgrad-sampler")
        self.stats = SamplerStats()

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def exact_logprobs(self) -> bool:
        return True

    @property
    def max_context(self) -> int:
        return self._max_context

    def begin(self, session: Session) -> None:
        self._sessions.begin(session)

    def end(self, session: Session) -> None:
        self._sessions.end(session)

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams, session: Session) -> Completion:
        check_request(prompt_ids, params, max_context=self._max_context, vocabulary=self._vocabulary)
        check_stop_strings(params, self._stops)
        self._sessions.check(session)
        if self._closed:
            raise SamplerFailure("the sampler is closed")
        request = Request.of(prompt_ids, params, session, self._max_context)
        self._running.add(request)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._worker, self._answer, request)
        except asyncio.CancelledError:
            request.limit = 0
            if self._closed:
                raise SamplerFailure("the sampler is closed") from None
            raise
        finally:
            self._running.discard(request)

    def update_weights(self, version: int, named_tensors: Mapping[str, Tensor] | None) -> None:
        """Serve policy ``version`` after the row that is being sampled; rows that wait for their turn get it.

        Raises:
            ConfigurationError: names or shapes are not the model's.
            SamplerFailure: the sampler is closed, or the row in hand took longer than ``update_timeout``.
        """
        if self._closed:
            raise SamplerFailure("the sampler is closed")
        update, asked = _Update(version=version, named_tensors=named_tensors), time.monotonic()
        self._updates.put(update)
        self._worker.submit(self._update)  # before the next row, or now if there is none
        while not update.done.wait(0.5):
            if self._closed:
                raise SamplerFailure("the sampler is closed")
            if self._update_timeout is not None and time.monotonic() - asked > self._update_timeout:
                raise SamplerFailure(
                    f"the weights of version {version} were not taken over within {self._update_timeout} s "
                    "(weight_sync_timeout): one answer of model.generate takes longer than that; raise it"
                )
        if update.error is not None:
            raise update.error

    def close(self) -> None:
        """Stop; open requests fail with ``SamplerFailure``. Safe to call twice."""
        self._closed = True
        for request in list(self._running):
            request.limit = 0
        self._worker.shutdown(wait=True, cancel_futures=True)

    def _update(self) -> None:
        while not self._updates.empty():
            update = self._updates.get()
            try:
                if update.named_tensors is not None:
                    load_tensors(self._model, update.named_tensors)
                self._version = update.version
            except ConfigurationError as error:  # the caller's names or shapes
                update.error = error
            update.done.set()

    def _answer(self, request: Request) -> Completion:
        self._update()
        request.policy_version = self._version
        device, started = self._model.device, time.perf_counter()
        own_config = self._model.generation_config
        with serving(self._model, self._autocast):
            # a fresh one: generate fills what a given configuration leaves out from the model's own
            self._model.generation_config = GenerationConfig()
            try:
                self._generate(request, torch.tensor([request.tokens], device=device))
            finally:
                self._model.generation_config = own_config
            if self._closed:
                raise SamplerFailure("the sampler is closed")
            output: Any = self._model(input_ids=torch.tensor([request.tokens[:-1]], device=device), use_cache=False)
        logits: Tensor = output.logits[0, request.prompt_length - 1 :].float()
        temperature = 1.0 if request.params.greedy else request.params.temperature
        targets = torch.tensor(request.tokens[request.prompt_length :], device=device).unsqueeze(1)
        request.logprobs = torch.log_softmax(logits / temperature, -1).gather(1, targets).squeeze(1).tolist()
        sampled = len(request.logprobs)
        self.stats.completions += 1
        self.stats.sampled_tokens += sampled
        self.stats.prefill_tokens += request.prompt_length
        self.stats.decode_tokens += sampled - 1
        if self._activity is not None:
            row = len(request.tokens) - 1  # forwarded twice: the second time for its log-probs
            self._activity.forwarded(started, time.perf_counter(), prefill=0, decode=2 * row)
        return request.completion

    def _generate(self, request: Request, prompt: Tensor) -> None:
        generate: Any = self._model.generate
        choose = _Choose(request, self._stops, prompt.device)
        generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            generation_config=GenerationConfig(do_sample=False, max_new_tokens=request.params.max_tokens),
            logits_processor=LogitsProcessorList([choose]),
            stopping_criteria=StoppingCriteriaList([_Finished(request)]),
        )


class _Choose(LogitsProcessor):  # type: ignore[misc, no-untyped-call, unused-ignore]
    """Samples as the local engine does, and leaves the choice as the only finite score."""

    def __init__(self, request: Request, stops: StopStrings | None, device: torch.device) -> None:
        self._request = request
        self._stops = stops
        self._batch = SamplingBatch.of([request.params], device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        request = self._request
        tokens, logprobs = sample_tokens(scores, self._batch, [len(request.logprobs)], [request.tokens])
        request.take(tokens[0], logprobs[0], self._stops)
        only = torch.full_like(scores, float("-inf"))
        only[0, tokens[0]] = 0.0
        return only


class _Finished(StoppingCriteria):  # type: ignore[misc, no-untyped-call, unused-ignore]
    def __init__(self, request: Request) -> None:
        self._request = request

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        done = self._request.stop_reason is not None or len(self._request.tokens) >= self._request.limit
        return torch.full((input_ids.shape[0],), done, dtype=torch.bool, device=input_ids.device)
