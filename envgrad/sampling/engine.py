"""The local engine: admit, forward, sample, commit; one call of ``step`` per token. Knows no threads and no clock but
for its counters."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from envgrad.attention import no_mask
from envgrad.errors import ConfigurationError
from envgrad.rollout.activity import Activity
from envgrad.sampling.decode_layout import DecodeLayout
from envgrad.sampling.fused import FusedDecoder
from envgrad.sampling.limits import serving
from envgrad.sampling.requests import Request, SamplerStats, Slot, StopStrings
from envgrad.sampling.sampling_ops import SamplingBatch, sample_tokens
from envgrad.sampling.scheduler import PlannedRow, Scheduler

PREFILL_TOKENS = 2048
"""most prompt and suffix tokens forwarded in one step; longer prompts take several"""


def ragged_forward(model: PreTrainedModel, layout: DecodeLayout, token_ids: Tensor, keep: Tensor) -> Tensor:
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


class Engine:
    """Continuous batching over one model.

    Args:
        model: a causal LM that carries envgrad's attention (``use_envgrad_attention``).
        scheduler: the slots.
        stops: finds stop strings; None if no request has any.
        autocast: dtype of ``torch.autocast`` for the forward, as the trainer's; None for none.
        activity: is told of each step, if given.
        fused: computes the model's forward in fewer operations; it is used whenever it ``fits``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        scheduler: Scheduler,
        *,
        stops: StopStrings | None,
        autocast: torch.dtype | None,
        activity: Activity | None = None,
        fused: FusedDecoder | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.stats: SamplerStats = scheduler.stats
        self.version = 0
        self._model = model
        self._stops = stops
        self._autocast = autocast
        self._activity = activity
        self._fused = fused
        self._serving: ExitStack | None = None
        self._layout: DecodeLayout | None = None
        self._batch: tuple[list[Request], SamplingBatch] | None = None

    # -- the module, shared with the trainer --------------------------------------------------------------------------

    def enter(self) -> None:
        """Dropout off, no gradients, autocast on, until ``leave``; both in the thread that steps."""
        if self._serving is None:
            stack = ExitStack()
            stack.enter_context(serving(self._model, self._autocast))
            if self._fused is not None and not self._fused.fits:
                self._fused = None
            if self._fused is not None:
                self._fused.refresh()
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
        self._layout = None
        if self._fused is not None:
            self._fused.release()

    def update_weights(self, version: int, named_tensors: Mapping[str, Tensor] | None) -> None:
        self.leave()
        if named_tensors is not None:
            load_tensors(self._model, named_tensors)
        if self._fused is not None:
            self._fused.forget()
        self.scheduler.drop_kv()
        self._layout = None
        self.version = version

    # -- one step -----------------------------------------------------------------------------------------------------

    def step(self, *, patience: float = 0.0) -> list[Request]:
        """Advance every busy row; returns the requests that are finished."""
        started = time.perf_counter()
        prefilled, decoded = self.stats.prefill_tokens, self.stats.decode_tokens
        self.enter()
        self.scheduler.admit(now=started, patience=patience)
        plan = self.scheduler.plan(PREFILL_TOKENS)
        slots, logits = self._forward(plan)
        finished = self._sample(slots, logits) if slots else []
        seconds = time.perf_counter() - started
        prompts = any(one.row.size > 1 for one in plan)
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
        device = self._model.device
        layout = self._layout_of(plan, device)
        tokens: list[int] = []
        last: list[int] = []
        for _, request, (_, start, size), complete in plan:
            tokens += request.tokens[start : start + size]
            if complete:
                last.append(len(tokens) - 1)
        both = torch.tensor(tokens + last, dtype=torch.long, device=device)
        ids, keep = both[: len(tokens)], both[len(tokens) :]
        if self._fused is None:
            logits = ragged_forward(self._model, layout, ids, keep)
        else:
            logits = self._fused.forward(layout, ids, keep if len(last) < len(tokens) else None)
        decoded = 0
        for slot, request, (_, start, size), _ in plan:
            slot.cached += size
            decoded += start >= request.prompt_length
        self.stats.decode_tokens += decoded
        self.stats.prefill_tokens += len(tokens) - decoded
        return logits

    def _layout_of(self, plan: list[PlannedRow], device: torch.device) -> DecodeLayout:
        rows = [one.row for one in plan]
        prefixes = [one.slot.prefix for one in plan]
        layout = self._layout
        if layout is not None and layout.followed_by(rows, prefixes):
            layout.advance()
            return layout
        self._layout = DecodeLayout(self.scheduler.cache, rows, device, prefixes)
        return self._layout

    def _sample(self, slots: list[Slot], logits: Tensor) -> list[Request]:
        requests = [slot.request for slot in slots if slot.request is not None]
        if self._batch is None or self._batch[0] != requests:
            self._batch = (requests, SamplingBatch.of([one.params for one in requests], logits.device))
        batch = self._batch[1]
        positions = [len(one.logprobs) for one in requests]
        tokens, logprobs = sample_tokens(logits, batch, positions, [one.tokens for one in requests])
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
