"""The local engine: admit, forward, sample, commit; one call of ``step`` per token. Knows no threads and no clock but
for its counters."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from envgrad.attention import no_mask
from envgrad.errors import ConfigurationError
from envgrad.rollout.activity import Activity
from envgrad.sampling.decode_layout import DecodeLayout
from envgrad.sampling.fast import FastDecoder, StepLayout
from envgrad.sampling.kv_cache import KVCache
from envgrad.sampling.limits import serving
from envgrad.sampling.requests import Request, SamplerStats, Slot, StopStrings
from envgrad.sampling.sampling_ops import SamplingBatch, sample_tokens
from envgrad.sampling.scheduler import PlannedRow, Scheduler

PREFILL_TOKENS = 2048
"""most prompt and suffix tokens forwarded in one step; longer prompts take several"""


def ragged_forward(model: PreTrainedModel, layout: Any, token_ids: Tensor, keep: Tensor) -> Tensor:
    """Logits ``(len(keep), V)`` of the flat tokens ``token_ids`` (T,) at the indices ``keep``."""
    output: Any = model(
        input_ids=token_ids.unsqueeze(0),
        position_ids=layout.positions.unsqueeze(0),
        attention_mask=no_mask(token_ids.device),
        attention_layout=layout,
        use_cache=False,
        logits_to_keep=keep,
    )
    logits: Tensor = output.logits[0]
    return logits


def load_tensors(model: PreTrainedModel, named_tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into the model's parameters and buffers of the same name.

    Raises:
        ConfigurationError: a name that the model does not have, or another shape.
    """
    own = model.state_dict(keep_vars=True)
    for name, tensor in named_tensors.items():
        if name not in own:
            raise ConfigurationError(
                f"the sampler's model has no tensor {name!r}; publish names as in model.state_dict()"
            )
        if own[name].shape != tensor.shape:
            raise ConfigurationError(
                f"tensor {name!r} has shape {tuple(tensor.shape)}, the sampler's model wants {tuple(own[name].shape)}"
            )
    with torch.no_grad():
        for name, tensor in named_tensors.items():
            own[name].copy_(tensor)


class _Steady(NamedTuple):
    """Rows that all decoded one token in a step, and will in the next if nothing else happens."""

    changes: int
    """the scheduler's, at that step"""
    rows: list[tuple[Slot, Request]]
    room: int
    """tokens that the longest row may grow by in its slot"""


class Engine:
    """Continuous batching over one model.

    Args:
        model: a causal LM that carries envgrad's attention (``use_envgrad_attention``).
        scheduler: the slots.
        stops: finds stop strings; None if no request has any.
        autocast: dtype of ``torch.autocast`` for the forward, as the trainer's; None for none.
        activity: is told of each step, if given.
        fast: computes the model's forward in fewer operations; it is used for as long as it ``fits``. The scheduler's
            slots must be its own (``new_cache``).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        scheduler: Scheduler,
        *,
        stops: StopStrings | None,
        autocast: torch.dtype | None,
        activity: Activity | None = None,
        fast: FastDecoder | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.stats: SamplerStats = scheduler.stats
        self.version = 0
        self._model = model
        self._stops = stops
        self._autocast = autocast
        self._activity = activity
        self._fast = fast
        self._serving: ExitStack | None = None
        self._layout: StepLayout | None = None
        self._steady: _Steady | None = None
        self._batch: tuple[list[Request], SamplingBatch] | None = None

    # -- the module, shared with the trainer --------------------------------------------------------------------------

    def enter(self) -> None:
        """Dropout off, no gradients, autocast on, until ``leave``; both in the thread that steps."""
        if self._serving is None:
            stack = ExitStack()
            stack.enter_context(serving(self._model, self._autocast))
            if self._fast is not None and not self._fast.fits:
                self._fast, self._layout, self._steady = None, None, None
                self.scheduler.drop_kv()
                self.scheduler.cache = KVCache()
            if self._fast is not None:
                self._fast.refresh()
                stack.enter_context(torch.inference_mode())
            self._serving = stack

    def leave(self) -> None:
        """Give the module back as it was."""
        if self._serving is not None:
            self._serving.close()
            self._serving = None

    def rest(self) -> None:
        """Nobody asks for now: keys, values and copies of weights go, for training to have their memory."""
        self.leave()
        self.scheduler.drop_kv()
        self._layout, self._steady = None, None
        if self._fast is not None:
            self._fast.release()

    def update_weights(self, version: int, named_tensors: Mapping[str, Tensor] | None) -> None:
        self.leave()
        if named_tensors is not None:
            load_tensors(self._model, named_tensors)
        if self._fast is not None:
            self._fast.forget()
        self.scheduler.drop_kv()
        self._layout, self._steady = None, None
        self.version = version

    # -- one step -----------------------------------------------------------------------------------------------------

    def step(self, *, patience: float = 0.0) -> list[Request]:
        """Advance every busy row; returns the requests that are finished."""
        started = time.perf_counter()
        prefilled, decoded = self.stats.prefill_tokens, self.stats.decode_tokens
        self.enter()
        if self._goes_on():
            slots, logits = self._decode_on()
            prompts = False
        else:
            self.scheduler.admit(now=started, patience=patience)
            plan = self.scheduler.plan(PREFILL_TOKENS)
            slots, logits = self._forward(plan)
            prompts = any(one.row.size > 1 for one in plan)
        finished = self._sample(slots, logits) if slots else []
        seconds = time.perf_counter() - started
        self.stats.steps += 1
        self.stats.prefill_seconds += seconds if prompts else 0.0
        self.stats.decode_seconds += 0.0 if prompts else seconds
        if self._activity is not None:
            self._activity.forwarded(
                started,
                started + seconds,
                prefill=self.stats.prefill_tokens - prefilled,
                decode=self.stats.decode_tokens - decoded,
            )
        return finished

    def _goes_on(self) -> bool:
        """Whether the next step is the last one, each row a token further: then nothing needs to be planned."""
        steady, scheduler = self._steady, self.scheduler
        return (
            steady is not None
            and self._layout is not None
            and steady.changes == scheduler.changes
            and steady.room > 0
            and not scheduler.waiting
            and not scheduler.ready
        )

    def _decode_on(self) -> tuple[list[Slot], Tensor]:
        steady, layout = self._steady, self._layout
        if steady is None or layout is None:
            raise AssertionError("there is no step to go on from")
        layout.advance()
        logits = self._logits(layout, [request.tokens[-1] for _, request in steady.rows], None)
        slots = []
        for slot, _ in steady.rows:
            slot.cached += 1
            slots.append(slot)
        self.stats.decode_tokens += len(slots)
        self._steady = steady._replace(room=steady.room - 1)
        return slots, logits

    def _logits(self, layout: StepLayout, tokens: list[int], keep: list[int] | None) -> Tensor:
        if self._fast is not None:
            return self._fast.forward(layout, tokens, keep)
        device = self._model.device
        kept = list(range(len(tokens))) if keep is None else keep
        both = torch.tensor(tokens + kept, dtype=torch.long, device=device)
        return ragged_forward(self._model, layout, both[: len(tokens)], both[len(tokens) :])

    def _forward(self, plan: list[PlannedRow]) -> tuple[list[Slot], Tensor]:
        """Slots to sample, and their logits (rows of equal prompts share theirs)."""
        slots: list[Slot] = []
        sources: list[int] = []
        parts: list[Tensor] = []
        rows = 0
        if plan:
            logits = self._run(plan)
            parts.append(logits)
            for slot, request, _, complete in plan:
                if not complete:
                    continue
                slots.append(slot)
                sources.append(rows)
                if not request.logprobs:
                    self.scheduler.keep_head(request, logits[rows])
                # Also of a request that started over (new weights, a lost slot): a sibling may have its row.
                followers = self.scheduler.release_followers(slot)
                slots.extend(followers)
                sources.extend([rows] * len(followers))
                rows += 1
        for request, head in self.scheduler.ready.items():
            slots.append(self.scheduler.slot_of(request))
            parts.append(head.unsqueeze(0))
            sources.append(rows)
            rows += 1
        self.scheduler.ready.clear()
        if not parts:
            return [], torch.empty(0)
        every = parts[0] if len(parts) == 1 else torch.cat(parts)
        if sources != list(range(rows)):
            every = every.index_select(0, torch.tensor(sources, device=every.device))
        return slots, every

    def _run(self, plan: list[PlannedRow]) -> Tensor:
        layout = self._layout_of(plan, self._model.device)
        tokens: list[int] = []
        last: list[int] = []
        for _, request, (_, start, size), complete in plan:
            tokens += request.tokens[start : start + size]
            if complete:
                last.append(len(tokens) - 1)
        logits = self._logits(layout, tokens, last if len(last) < len(tokens) else None)
        if len(last) == len(tokens) == self.scheduler.num_busy:
            room = self.scheduler.cache.length - 1 - max(one.row.start for one in plan)
            self._steady = _Steady(self.scheduler.changes, [(one.slot, one.request) for one in plan], room)
        decoded = 0
        for slot, request, (_, start, size), _ in plan:
            slot.cached += size
            decoded += start >= request.prompt_length
        self.stats.decode_tokens += decoded
        self.stats.prefill_tokens += len(tokens) - decoded
        return logits

    def _layout_of(self, plan: list[PlannedRow], device: torch.device) -> StepLayout:
        rows = [one.row for one in plan]
        prefixes = [one.slot.prefix for one in plan]
        layout = self._layout
        if layout is not None and layout.followed_by(rows, prefixes):
            layout.advance()
            return layout
        make: Any = DecodeLayout if self._fast is None else self._fast.layout
        made: StepLayout = make(self.scheduler.cache, rows, device, prefixes)
        self._layout = made
        return made

    def _sample(self, slots: list[Slot], logits: Tensor) -> list[Request]:
        requests = [slot.request for slot in slots if slot.request is not None]
        if self._batch is None or self._batch[0] != requests:
            self._batch = (requests, SamplingBatch.of([one.params for one in requests], logits.device))
        batch = self._batch[1]
        positions = [len(one.logprobs) for one in requests]
        kernels = None if self._fast is None else self._fast.kernels
        tokens, logprobs = sample_tokens(logits, batch, positions, [one.tokens for one in requests], kernels)
        finished: list[Request] = []
        now = time.perf_counter()
        for slot, request, token, logprob in zip(slots, requests, tokens, logprobs, strict=True):
            if not request.logprobs:
                request.policy_version = self.version
            request.versions.append(self.version)
            if request.take(token, logprob, self._stops):
                finished.append(request)
                self.scheduler.finish(slot, now)
        self.stats.sampled_tokens += len(tokens)
        self.stats.completions += len(finished)
        return finished
