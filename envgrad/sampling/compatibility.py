"""Does a model's cached, ragged forward equal its plain one? Found by comparing them, not by the model's name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from inspect import Parameter, signature
from typing import Any, TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import PreTrainedModel

from envgrad.attention import IMPLEMENTATION, use_envgrad_attention
from envgrad.sampling.decode_layout import DecodeLayout
from envgrad.sampling.decoder_shape import OtherShape
from envgrad.sampling.engine import ragged_forward
from envgrad.sampling.fast import FastDecoder
from envgrad.sampling.fused import FusedDecoder
from envgrad.sampling.kv_cache import KVCache, SlotMemory, StepRow
from envgrad.sampling.limits import serving, text_config
from envgrad.sampling.native_decoder import NativeDecoder

logger = logging.getLogger(__name__)

Forward: TypeAlias = Callable[[Any, list[int], list[int]], Tensor]
"""(layout, flat token ids, indices to keep) -> logits (kept, V)"""

_LONGEST_WINDOW = 64
_passed: WeakSet[PreTrainedModel] = WeakSet()
_fast_passed: dict[str, WeakSet[PreTrainedModel]] = {"native": WeakSet(), "fused": WeakSet()}
_MODEL_ERRORS = (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError, NotImplementedError)
"""what a model's own code raises when it is called in a way it does not know"""


def cached_forward_fault(model: PreTrainedModel) -> str | None:
    """Why ``model`` cannot be served by the local engine; None if it can.

    Random rows go through the plain forward, under the attention the model came with, and then through prefill, copy,
    suffix and decoding steps over slots; every logit must agree, to 1e-3 of the largest in float32. The model keeps
    envgrad's attention if it passes, and gets its own back if not. Parameters, modes and random state stay as they are.
    A model that has passed is not compared again.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        ...     num_attention_heads=2, num_key_value_heads=1)
        >>> cached_forward_fault(LlamaForCausalLM(config)) is None
        True
    """
    if model in _passed and str(model.config._attn_implementation) == IMPLEMENTATION:
        return None
    parameters = signature(model.forward).parameters
    for name in ("input_ids", "position_ids", "logits_to_keep"):
        if name not in parameters:
            return f"{type(model).__name__}.forward takes no {name}"
    if not any(one.kind is Parameter.VAR_KEYWORD for one in parameters.values()):
        return f"{type(model).__name__}.forward hands no keyword arguments on to its attention"
    previous = str(model.config._attn_implementation)
    fault: str | None
    with serving(model):
        try:
            rows = _random_rows(model)
            plain = [_plain(model, row) for row in rows]
            use_envgrad_attention(model)
            fault = _compare(model, partial(_model_forward, model), rows, plain)
        except _MODEL_ERRORS as error:
            fault = f"its forward over cached rows raised {type(error).__name__}: {error}"
    if fault is None:
        _passed.add(model)
    elif str(model.config._attn_implementation) != previous:
        model.set_attn_implementation(previous)
    return fault


def fast_decoder(model: PreTrainedModel, threads: int = 1) -> FastDecoder | None:
    """A decoder that computes what ``model`` computes, in one call of compiled kernels or in fewer operations than the
    module; None if there is none for it.

    ``model`` must have passed ``cached_forward_fault``. The decoder's logits are compared with the plain forward's in
    the same way; those of a model that has passed are not compared again.
    """
    for kind, passed in _fast_passed.items():
        decoder = _decoder(kind, model, threads)
        if decoder is None:
            continue
        if model in passed:
            return decoder
        with serving(model):
            try:
                decoder.refresh()
            except OtherShape:  # its rotation is of another kind
                continue
            rows = _random_rows(model)
            plain = [_plain(model, row) for row in rows]
            fault = _compare(model, decoder.forward, rows, plain, cache=decoder.new_cache(), layout=decoder.layout)
        if fault is None:
            passed.add(model)
            return decoder
        logger.debug("%s does not run the %s forward: %s", type(model).__name__, kind, fault)
    return None


def _decoder(kind: str, model: PreTrainedModel, threads: int) -> FastDecoder | None:
    if kind == "native":
        return NativeDecoder.of(model, threads)
    return FusedDecoder.of(model)


def _model_forward(model: PreTrainedModel, layout: DecodeLayout, tokens: list[int], keep: list[int]) -> Tensor:
    device = model.device
    return ragged_forward(model, layout, torch.tensor(tokens, device=device), torch.tensor(keep, device=device))


def _random_rows(model: PreTrainedModel) -> list[Tensor]:
    config = text_config(model)
    window = getattr(config, "sliding_window", None)
    longest = 24 if not isinstance(window, int) or window > _LONGEST_WINDOW else window + 24
    context = getattr(config, "max_position_embeddings", None)
    if isinstance(context, int):
        longest = max(4, min(longest, context))
    generator = torch.Generator().manual_seed(0)
    lengths = [longest, longest - 1, max(3, longest // 2)]
    rows = [torch.randint(0, int(config.vocab_size), (length,), generator=generator) for length in lengths]
    return [row.to(model.device) for row in rows]


def _plain(model: PreTrainedModel, row: Tensor) -> Tensor:
    output: Any = model(input_ids=row.unsqueeze(0), use_cache=False)
    logits: Tensor = output.logits[0].float()
    return logits


def _compare(
    model: PreTrainedModel,
    forward: Forward,
    rows: list[Tensor],
    plain: list[Tensor],
    *,
    cache: SlotMemory | None = None,
    layout: Any = DecodeLayout,
) -> str | None:
    """Prefill three rows in one step and copy the first; then suffixes beside a decoding row; then decode all."""
    cache = KVCache() if cache is None else cache
    run = partial(_run, forward, layout, cache, [*rows, rows[0]])
    cache.resize(len(rows) + 1, len(rows[0]))
    every, expected = [*rows, rows[0]], [*plain, plain[0]]
    third = max(1, len(rows[2]) // 3)
    done = [len(rows[0]) - 2, third + 1, third, third]
    got = [[one] for one in run([(0, 0, done[0]), (1, 0, done[1]), (2, 0, done[2])])]
    cache.copy(0, [3], third)
    got.append([got[0][0][:third]])
    for left in (1, 0):
        step = [(slot, at, len(row) - left) for slot, (at, row) in enumerate(zip(done, every, strict=True))]
        for (slot, _, stop), logits in zip(step, run(step), strict=True):
            got[slot].append(logits)
            done[slot] = stop
    difference = max(
        float((torch.cat(parts).float() - want).abs().max()) for parts, want in zip(got, expected, strict=True)
    )
    scale = max(1e-6, *(float(want.abs().max()) for want in plain))
    tolerance = 1e-3 if rows and next(model.parameters()).dtype in (torch.float32, torch.float64) else 5e-2
    if not difference <= tolerance * scale:
        return (
            f"its cached forward differs from the plain one by {difference:.2g} in logits of up to {scale:.2g} "
            "(attention that is not a plain softmax over the row's past)"
        )
    return None


def _run(
    forward: Forward, layout: Any, cache: SlotMemory, rows: list[Tensor], step: list[tuple[int, int, int]]
) -> list[Tensor]:
    """Logits of the tokens ``start .. stop`` of the rows in each slot."""
    device = rows[0].device
    made = layout(cache, [StepRow(slot=a, start=b, size=c - b) for a, b, c in step], device)
    tokens = [token for slot, start, stop in step for token in rows[slot][start:stop].tolist()]
    logits = forward(made, tokens, list(range(len(tokens))))
    if isinstance(made, DecodeLayout) and not made.layers_seen:
        raise NotImplementedError("its attention does not go through transformers' AttentionInterface")
    logits = logits.clone()  # a decoder may write to them in its next step
    return list(torch.split(logits, [stop - start for _, start, stop in step]))
