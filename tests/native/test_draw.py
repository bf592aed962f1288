"""Tokens that the kernels draw, beside the distribution in double precision and beside torch's operations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from envgrad.native.compiler import library
from envgrad.native.decoder import Kernels
from envgrad.sampling.sampler import SamplingParams
from envgrad.sampling.sampling_ops import SamplingBatch, sample_tokens, uniforms

pytestmark = pytest.mark.skipif(library() is None, reason="needs a C++ compiler")

CPU = torch.device("cpu")
SEEDS = st.integers(0, 2**31)


def params_of(temperatures: list[float], seed: int) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=1, temperature=one, seed=seed + n) for n, one in enumerate(temperatures)]


def assert_drawn(logits: Tensor, params: list[SamplingParams], positions: list[int], threads: int) -> None:
    batch, kernels = SamplingBatch.of(params, CPU), Kernels(threads)
    tokens, logprobs = sample_tokens(logits, batch, positions, [[]] * len(params), kernels)
    draws = uniforms([one.seed for one in params], positions)
    for row, (one, token, found, draw) in enumerate(zip(params, tokens, logprobs, draws, strict=True)):
        logs = (logits[row].double() / (one.temperature or 1.0)).log_softmax(-1)
        assert found == pytest.approx(float(logs[token]), abs=2e-5)
        if one.temperature == 0.0:
            assert token == int(logits[row].argmax())
            continue
        ends = logs.exp().cumsum(0)
        begin, end = (float(ends[token - 1]) if token else 0.0), float(ends[token])
        assert begin - 1e-5 <= draw <= end + 1e-5 and logs[token] > -200


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 2100), st.lists(st.sampled_from([0.0, 0.3, 1.0, 1.7]), min_size=1, max_size=7),
    st.sampled_from([0.1, 3.0, 40.0]), st.integers(1, 3), SEEDS, SEEDS,
)  # fmt: skip
def test_tokens_are_where_the_running_sum_passes_the_draw(
    vocabulary: int, temperatures: list[float], spread: float, threads: int, seed: int, position: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = len(temperatures)
    padded = spread * torch.randn(rows, vocabulary + 5, generator=generator)  # rows need not lie side by side
    positions = [(position + row) % 5000 for row in range(rows)]
    assert_drawn(padded[:, :vocabulary], params_of(temperatures, seed), positions, threads)


def test_neither_threads_nor_the_other_rows_change_what_a_row_draws() -> None:
    logits = 3 * torch.randn(40, 1500, generator=torch.Generator().manual_seed(0))
    params, positions = params_of([1.0, 0.7] * 20, 5), list(range(40))
    batch = SamplingBatch.of(params, CPU)
    expected = sample_tokens(logits, batch, positions, [[]] * 40, Kernels(1))
    assert sample_tokens(logits, batch, positions, [[]] * 40, Kernels(3)) == expected
    for row in (0, 7, 39):
        alone = SamplingBatch.of(params[row : row + 1], CPU)
        found = sample_tokens(logits[row : row + 1], alone, [row], [[]], Kernels(1))
        assert found == (expected[0][row : row + 1], expected[1][row : row + 1])
    torch_tokens, torch_logprobs = sample_tokens(logits, batch, positions, [[]] * 40)
    assert torch_tokens == expected[0] and torch_logprobs == pytest.approx(expected[1], abs=1e-5)


def test_what_has_no_weight_is_never_drawn_and_the_first_of_equals_is_the_best() -> None:
    logits = torch.full((64, 700), -torch.inf)
    logits[:, [3, 600]] = 1.0
    tokens, logprobs = sample_tokens(
        logits, SamplingBatch.of(params_of([1.0] * 32 + [0.0] * 32, 1), CPU), [0] * 64, [[]] * 64, Kernels(2)
    )
    assert set(tokens[:32]) == {3, 600} and set(tokens[32:]) == {3}
    assert logprobs == pytest.approx([-0.6931472] * 64, abs=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 5, 18])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error_that_names_the_row(bad: float, place: int, temperature: float) -> None:
    logits = torch.zeros(3, 19)
    logits[1, place] = bad
    batch = SamplingBatch.of(params_of([temperature] * 3, 0), CPU)
    with pytest.raises(FloatingPointError, match="row 1 of 3"):
        sample_tokens(logits, batch, [0, 0, 0], [[]] * 3, Kernels(1))
