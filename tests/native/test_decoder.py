"""The compiled forward beside the torch model's, over ragged rows in slots; and what its numbers may not depend on."""

from __future__ import annotations

import gc
import os
import platform
import random
import signal
import threading
import time
from collections.abc import Iterator
from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from envgrad.native import compiler, decoder
from envgrad.native.compiler import library
from envgrad.native.decoder import Kernels
from envgrad.sampling.kv_cache import StepRow
from envgrad.sampling.native_cache import NativeLayout
from envgrad.sampling.native_decoder import NativeDecoder
from envgrad.sampling.requests import SharedPrefix
from helpers.native_rows import (
    CPU,
    LONGEST,
    Sizes,
    alone,
    assert_near,
    decoder_of,
    forward,
    in_pieces,
    model_of,
    own_logits,
    random_row,
    slots_of,
)

pytestmark = pytest.mark.skipif(library() is None, reason="needs a C++ compiler")

NARROWER = {8: "-mno-avx512f", 4: "-mno-avx"}
"""flags for vectors of so many floats, on x86"""

SIZES = st.builds(
    Sizes, layers=st.integers(1, 2), width=st.integers(5, 70), kv_heads=st.integers(1, 3), group=st.integers(1, 6),
    size=st.integers(2, 40).map(lambda half: 2 * half), mlp=st.integers(1, 70), vocabulary=st.integers(2, 90),
    biased=st.booleans(), normed=st.booleans(), tied=st.booleans(),
)  # fmt: skip


# -- kernels for this machine's vectors, and for narrower ones that it can compute as well ----------------------------


@pytest.fixture(scope="module", params=[None, *NARROWER], ids=["own", "8", "4"], autouse=True)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    vector: int | None = request.param
    if vector is None:
        yield
        return
    if platform.machine() not in ("x86_64", "AMD64") or Kernels(1).vector <= vector:
        pytest.skip("this machine has no such vectors beside its own")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("kernels")))
        patch.setattr(compiler, "_FLAGS", (*compiler._FLAGS, NARROWER[vector]))
        found = library.__wrapped__()
        assert found is not None and found.envgrad_vector() == vector
        patch.setattr(decoder, "library", lambda: found)
        yield


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    """Of the tokens whose logits were wanted."""
    wanted = ~found.isnan().any(1)
    assert not expected.isnan().any()
    assert torch.equal(found[wanted], expected[wanted])


LENGTHS = st.lists(st.integers(1, LONGEST - 5), min_size=1, max_size=5)
SEEDS = st.integers(0, 2**32)


@settings(max_examples=40, deadline=None)
@given(SIZES, LENGTHS)
def test_logits_are_those_of_the_torch_model(sizes: Sizes, lengths: list[int]) -> None:
    made = decoder_of(sizes)
    rows = [random_row(length, sizes.vocabulary, number) for number, length in enumerate(lengths)]
    memory = slots_of(made, len(rows), max(lengths))
    found = forward(made, memory, [(slot, 0, row) for slot, row in enumerate(rows)]).split(lengths)
    for row, logits in zip(rows, found, strict=True):
        assert_near(logits, own_logits(model_of(sizes), row))


@settings(max_examples=40, deadline=None)
@given(SIZES, LENGTHS, SEEDS)
def test_neither_threads_nor_the_rest_of_a_step_nor_pieces_nor_slots_change_a_bit(
    sizes: Sizes, lengths: list[int], seed: int
) -> None:
    rows = [random_row(length, sizes.vocabulary, number) for number, length in enumerate(lengths)]
    expected = [alone(decoder_of(sizes), row) for row in rows]
    for threads in (1, 2, 3):
        found = in_pieces(decoder_of(sizes, threads), rows, seed + threads)
        for one, other in zip(found, expected, strict=True):
            assert_same_bits(one, other)


@settings(max_examples=40, deadline=None)
@given(SIZES, st.integers(1, 60), st.lists(st.integers(1, 12), min_size=2, max_size=4), st.integers(1, 3), SEEDS)
def test_rows_that_read_a_common_prefix_in_one_place_compute_the_same(
    sizes: Sizes, common: int, lengths: list[int], threads: int, seed: int
) -> None:
    made, count = decoder_of(sizes, threads), len(lengths)
    prompt = random_row(common, sizes.vocabulary)
    rows = [prompt + random_row(length, sizes.vocabulary, 1 + number) for number, length in enumerate(lengths)]
    slots = random.Random(seed).sample(range(count + 1), count)
    memory = slots_of(made, count + 1, max(map(len, rows)))
    forward(made, memory, [(slots[0], 0, prompt)])
    memory.copy(slots[0], slots[1:], common)
    for slot in slots[1:]:  # whole blocks are read where they come from
        memory.keys[:, slot, :, : common // memory.vector].fill_(torch.nan)
    prefix = SharedPrefix(7, common)
    parts = [(slot, common, row[common:]) for slot, row in zip(slots, rows, strict=True)]
    together = forward(made, memory, parts, [prefix] * count).split(lengths)
    for row, logits in zip(rows, together, strict=True):
        assert torch.equal(logits, alone(made, row)[common:])
        assert_near(logits, own_logits(model_of(sizes), row)[common:])


def test_siblings_with_equal_tokens_have_equal_bits_where_they_share_and_after() -> None:
    made = decoder_of(Sizes(), 2)
    row, common = random_row(LONGEST, 61), 37
    memory = slots_of(made, 3, LONGEST)
    forward(made, memory, [(0, 0, row[:common])])
    memory.copy(0, [1, 2], common)
    prefixes = [SharedPrefix(1, common)] * 3
    for at in range(common, LONGEST):
        logits = forward(made, memory, [(slot, at, row[at : at + 1]) for slot in range(3)], prefixes)
        assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


@pytest.mark.parametrize("sizes", [Sizes(), Sizes(biased=True, kv_heads=1, group=5, size=6), Sizes(normed=True)])
def test_a_weight_that_is_no_number_reaches_all_logits_that_are_made_of_it(sizes: Sizes) -> None:
    row = list(range(20))
    for name, _ in model_of(sizes).named_parameters():
        model = deepcopy(model_of(sizes))
        with torch.no_grad():
            model.get_parameter(name)[9 if "head" in name or "embed" in name else 0] = torch.nan
        reached = alone(decoder_of(model, 2), row).isnan()
        expected = torch.ones(20, 61, dtype=torch.bool)
        if "embed" in name:
            expected[:9] = False  # the past of the token
        elif "lm_head" in name:
            expected[:, :9] = expected[:, 10:] = False
        assert torch.equal(reached, expected), name


@pytest.mark.parametrize("which", ["keys", "values"])
def test_a_past_that_is_no_number_is_not_left_out(which: str) -> None:
    made, row = decoder_of(Sizes(layers=1)), random_row(40, 61)
    memory = slots_of(made, 1, 40)
    forward(made, memory, [(0, 0, row[:39])])
    for at in range(39):
        poked = made.new_cache()
        poked.resize(1, 40)
        poked.keys.copy_(memory.keys)
        poked.values.copy_(memory.values)
        block, lane = divmod(at, memory.vector)
        if which == "keys":
            poked.keys[0, 0, :, block, 1, lane] = torch.nan
        else:
            poked.values[0, 0, :, at, 1] = torch.nan
        assert forward(made, poked, [(0, 39, row[39:])]).isnan().all(), at


@pytest.mark.parametrize("scale", [30.0, 300.0])
def test_steep_gates_and_sharp_attention_are_right(scale: float) -> None:
    model = deepcopy(model_of(Sizes(normed=True)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate_proj" in name or "q_norm" in name:
                parameter.mul_(scale)
    row = random_row(40, 61)
    assert_near(alone(decoder_of(model), row), own_logits(model, row), 1e-3)


# -- slots ------------------------------------------------------------------------------------------------------------


def test_memory_that_is_used_again_with_fewer_slots_is_read_where_it_is_written() -> None:
    made, row = decoder_of(Sizes()), random_row(40, 61)
    expected = alone(made, row)
    memory = made.new_cache()
    memory.resize(12, 48)
    first = forward(made, memory, [(11, 0, row)])
    place = memory.keys.data_ptr()
    memory.drop()
    assert memory.slots == memory.length == memory.num_bytes == 0
    memory.resize(0, 48)
    memory.resize(5, 48)
    assert memory.keys.data_ptr() == place, "a small cache's memory is kept"
    forward(made, memory, [(0, 0, row[:30])])
    memory.copy(0, [4], 30)
    assert torch.equal(first, expected)
    assert torch.equal(forward(made, memory, [(4, 30, row[30:])]), expected[30:])


def test_slots_move_shrink_and_grow_with_their_rows() -> None:
    made, rows = decoder_of(Sizes()), [random_row(50, 61, seed) for seed in range(3)]
    memory = slots_of(made, 3, 21)
    forward(made, memory, [(slot, 0, row[:20]) for slot, row in enumerate(rows)])
    memory.resize(2, 50, keep=[2, 0])
    memory.resize(7, 90)
    memory.resize(7, 50)
    assert (memory.slots, memory.length) == (7, 50)
    found = forward(made, memory, [(0, 20, rows[2][20:]), (1, 20, rows[0][20:])]).split(30)
    for logits, row in zip(found, (rows[2], rows[0]), strict=True):
        assert torch.equal(logits, alone(made, row)[20:])


@pytest.mark.parametrize("count", [1, 15, 16, 17, 33])
def test_a_copy_has_the_first_tokens_and_the_source_keeps_its_own(count: int) -> None:
    made, row = decoder_of(Sizes()), random_row(48, 61)
    memory = slots_of(made, 4, 48)
    forward(made, memory, [(2, 0, row[:40])])
    memory.copy(2, [0, 3], count)
    parts = [(0, count, row[count:]), (2, 40, row[40:]), (3, count, row[count:])]
    one, source, other = forward(made, memory, parts).split([48 - count, 8, 48 - count])
    expected = alone(made, row)
    assert torch.equal(one, expected[count:]) and torch.equal(other, one) and torch.equal(source, expected[40:])


def test_a_layout_advances_to_the_next_step_s() -> None:
    made, row = decoder_of(Sizes()), random_row(30, 61)
    expected, memory = alone(made, row), slots_of(made, 2, 40)
    forward(made, memory, [(0, 0, row[:20]), (1, 0, row[:5])])
    prefixes = [None, SharedPrefix(1, 5)]
    layout = NativeLayout(memory, [StepRow(0, 20, 1), StepRow(1, 5, 1)], CPU, prefixes)
    rows = [[StepRow(0, 20 + step, 1), StepRow(1, 5 + step, 1)] for step in range(8)]
    assert not layout.followed_by(rows[0], prefixes) and not layout.followed_by(rows[2], prefixes)
    assert not layout.followed_by(rows[1][:1], prefixes[:1]) and not layout.followed_by(rows[1], [None, None])
    for now, then in pairwise(rows):
        logits = made.forward(layout, [row[now[0].start], row[now[1].start]], None)
        assert torch.equal(logits[0], expected[now[0].start])
        assert torch.equal(logits[1], expected[now[1].start])
        assert layout.followed_by(then, prefixes)
        layout.advance()
        assert (layout.index == NativeLayout(memory, then, CPU, prefixes).index).all()
    assert not NativeLayout(memory, [StepRow(0, 3, 2)], CPU).followed_by([StepRow(0, 5, 1)], [None])


def test_a_step_in_which_nothing_is_wanted_stores_what_it_reads() -> None:
    made, row = decoder_of(Sizes(), 2), random_row(30, 61)
    memory = slots_of(made, 1, 30)
    assert forward(made, memory, [(0, 0, row[:25])], keep=[]).shape == (0, 61)
    assert torch.equal(forward(made, memory, [(0, 25, row[25:])], keep=[2, 4]), alone(made, row)[[27, 29]])


# -- threads and processes --------------------------------------------------------------------------------------------


def test_decoders_with_threads_of_their_own_compute_at_the_same_time() -> None:
    sizes, row = Sizes(width=64, mlp=64), random_row(60, 61)
    expected = alone(decoder_of(sizes), row)
    found: list[bool] = []

    def compute(made: NativeDecoder) -> None:
        found.extend(torch.equal(alone(made, row), expected) for _ in range(20))

    every = [NativeDecoder.of(model_of(sizes)) for _ in range(3)]
    for made in every:
        assert made is not None
        made.kernels = Kernels(2)
        made.refresh()
    threads = [threading.Thread(target=compute, args=(made,)) for made in every]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert found == [True] * 60


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_computes_alone_and_frees_what_it_has() -> None:
    model, row = model_of(Sizes()), random_row(30, 61)
    made = NativeDecoder.of(model)
    assert made is not None
    made.kernels = Kernels(3)
    made.refresh()
    expected = alone(made, row)
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)
        same = torch.equal(alone(made, row), expected)
        del made
        gc.collect()
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(alone(made, row), expected)


def test_threads_end_with_their_kernels() -> None:
    def tasks() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    if not os.path.isdir("/proc/self/task"):
        pytest.skip("needs /proc")
    before = tasks()
    kernels = Kernels(4)
    new = tasks() - before
    assert len(new) == 3
    del kernels
    gc.collect()
    until = time.monotonic() + 20.0
    while tasks() & new:  # one that has been joined may still be listed
        assert time.monotonic() < until
        time.sleep(0.01)
