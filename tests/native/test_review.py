"""Compiled kernels and their slots at the edges: memory that is not theirs, and threads that end late."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from envgrad.native import packed_attention
from envgrad.native.compiler import library
from envgrad.native.decoder import Kernels
from envgrad.native.packed_attention import AttentionPlan, native_attention
from envgrad.sampling import native_decoder
from envgrad.sampling.decoder_shape import DecoderShape, OtherShape
from envgrad.sampling.fused import FusedDecoder
from envgrad.sampling.kv_cache import KVCache, StepRow
from envgrad.sampling.native_cache import NativeCache
from envgrad.sampling.native_decoder import NativeDecoder
from envgrad.sampling.requests import Request, SamplerStats
from envgrad.sampling.sampler import SamplingParams, Session
from envgrad.sampling.sampling_ops import SamplingBatch, sample_tokens
from envgrad.sampling.scheduler import Scheduler
from helpers.models import tiny_llama

needs_kernels = pytest.mark.skipif(library() is None, reason="needs a C++ compiler")


def test_a_head_with_more_tokens_than_the_embeddings_is_another_shape() -> None:
    """What it samples would be looked up beyond the table's memory."""
    model = tiny_llama()
    width, known = model.config.hidden_size, model.config.vocab_size
    model.lm_head = nn.Linear(width, known + 3, bias=False)
    with pytest.raises(OtherShape):
        DecoderShape.of(model)
    model.lm_head = nn.Linear(width, known, bias=False)
    assert DecoderShape.of(model).fits


def test_a_model_whose_layers_were_replaced_fits_no_more() -> None:
    class Other(nn.Linear):
        pass

    model = tiny_llama()
    shape = DecoderShape.of(model)
    attention: Any = model.model.layers[0].self_attn
    attention.q_proj = Other(attention.q_proj.in_features, attention.q_proj.out_features, bias=False)
    assert not shape.fits


def test_nothing_is_compiled_for_a_model_that_has_no_use_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise AssertionError("compiling takes seconds")

    monkeypatch.setattr(native_decoder, "library", refuse)
    assert NativeDecoder.of(tiny_llama().bfloat16()) is None
    with pytest.raises(AssertionError, match="seconds"):
        NativeDecoder.of(tiny_llama())


def played(scheduler: Scheduler, rows: int, tokens: int) -> int:
    """Rows of so many tokens that are admitted and end with the weights; the length of a slot."""
    for number in range(rows):
        session = Session(key=f"{number}", group=f"{number}", order=(number,))
        scheduler.begin(session)
        params = SamplingParams(max_tokens=1)
        scheduler.add(Request.of(list(range(tokens - 1)), params, session, max_context=4096))
    scheduler.admit(now=0.0, patience=0.0)
    for slot in scheduler.busy():
        slot.cached = tokens
    length = scheduler.cache.length
    for number in range(rows):
        scheduler.end(Session(key=f"{number}", group=f"{number}", order=(number,)))
    scheduler.drop_kv()
    scheduler.drop_kv()  # of the next weights
    return length


def test_one_long_row_does_not_make_all_later_slots_as_long() -> None:
    scheduler = Scheduler(KVCache(), SamplerStats(), max_sessions=64, max_context=4096, max_kv_tokens=None)
    assert played(scheduler, 1, 4000) == 4000
    assert played(scheduler, 1, 3000) == 4000, "what a row grew to before, at once"
    assert played(scheduler, 64, 100) <= 8 * 4000 // 64 + 32, "no more memory than there was"
    assert played(scheduler, 1, 4000) == 4000
    for expected in (4000, 192, 192):
        assert played(scheduler, 1, 90) == expected, "and it is forgotten in time"
    bounded = Scheduler(KVCache(), SamplerStats(), max_sessions=4, max_context=4096, max_kv_tokens=8192)
    assert played(bounded, 1, 4000) == 4000 and played(bounded, 1, 90) == 96


@needs_kernels
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", [NativeDecoder, FusedDecoder])
def test_numbers_and_their_memory_do_not_depend_on_torch_s_default_type(
    kind: type[NativeDecoder] | type[FusedDecoder], default: torch.dtype
) -> None:
    """It is one for all threads, and another one while a model in half precision is loaded in some of them."""
    model, row = tiny_llama(), [5, 6, 7, 8, 9]
    made = []
    for dtype in (torch.float32, default):
        torch.set_default_dtype(dtype)
        try:
            with torch.no_grad():
                decoder = kind.of(model)
                assert decoder is not None
                decoder.refresh()
                cache = decoder.new_cache()
                cache.resize(2, 32)
                layout: Any = decoder.layout
                step = layout(cache, [StepRow(1, 0, len(row))], torch.device("cpu"))
                logits = decoder.forward(step, row, None).clone()
                batch = SamplingBatch.of([SamplingParams(max_tokens=1, seed=3)] * len(row), logits.device)
                drawn = sample_tokens(logits, batch, [0] * len(row), [[]] * len(row), decoder.kernels)
        finally:
            torch.set_default_dtype(torch.float32)
        if isinstance(cache, NativeCache):
            assert cache.keys.dtype == cache.values.dtype == torch.float32
        made.append((logits, drawn))
    assert made[1][0].dtype == torch.float32 and torch.equal(made[0][0], made[1][0])
    assert made[0][1] == made[1][1]


@needs_kernels
def test_kernels_are_made_where_their_file_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    found = library()
    assert found is not None
    monkeypatch.setattr(found, "_name", "/nowhere/kernels.so")
    assert Kernels(1).vector in (4, 8, 16)


@needs_kernels
def test_pools_end_while_their_threads_still_look_for_work() -> None:
    for _ in range(200):
        kernels = Kernels(2)
        kernels.pack([torch.ones(2, 2)])
        del kernels
        gc.collect(0)


@needs_kernels
def test_attention_that_is_interrupted_leaves_its_threads_what_they_write_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C comes while the first thread computes, and the others have not ended."""
    tokens, going, reached = 64, threading.Event(), threading.Event()
    written: list[weakref.ref[torch.Tensor]] = []
    new = packed_attention._for_queries

    def noted(query: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        made = new(query, plan)
        written.append(weakref.ref(made))
        return made

    class Interrupted:
        @staticmethod
        def envgrad_packed_attention_forward(_: object) -> int:
            if threading.current_thread() is threading.main_thread():
                reached.wait(10)
                raise KeyboardInterrupt
            reached.set()
            going.wait(10)
            return 0

    monkeypatch.setattr(packed_attention, "_for_queries", noted)
    monkeypatch.setattr(packed_attention, "library", lambda: Interrupted)
    monkeypatch.setattr(packed_attention, "_threads", lambda *_: 2)
    x = torch.randn(2, tokens, 8)
    with pytest.raises(KeyboardInterrupt):
        native_attention(x, x, x, AttentionPlan.of([(0, (tokens,))]), None)
    others = [one for one in threading.enumerate() if one.name == "envgrad-attention"]
    gc.collect()
    assert len(others) == 1 and written[0]() is not None
    going.set()
    others[0].join(10)
    del others
    gc.collect()
    assert written[0]() is None
