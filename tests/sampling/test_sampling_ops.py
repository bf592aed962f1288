from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from envgrad.errors import ConfigurationError
from envgrad.sampling.sampler import SamplingParams
from envgrad.sampling.sampling_ops import SamplingBatch, check_params, sample_tokens, uniforms

CPU = torch.device("cpu")


def draw(logits: Tensor, params: SamplingParams, count: int, history: list[int] | None = None) -> Tensor:
    """How often each token is drawn, over ``count`` positions of one seed."""
    batch = SamplingBatch.of([params] * count, CPU)
    rows = logits.expand(count, -1)
    tokens, _ = sample_tokens(rows, batch, list(range(count)), [history or []] * count)
    return torch.bincount(torch.tensor(tokens), minlength=logits.shape[-1])


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    expected = probabilities * counts.sum()
    kept = expected > 0
    assert int(counts[~kept].sum()) == 0
    return float(((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum())


def reference(logits: Tensor, params: SamplingParams, history: list[int]) -> Tensor:
    """The sampling distribution as transformers' own processors make it."""
    steps = LogitsProcessorList()
    if params.repetition_penalty != 1.0:
        steps.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    steps.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        steps.append(MinPLogitsWarper(params.min_p))
    return steps(torch.tensor([history]), logits.unsqueeze(0).clone()).softmax(-1)[0]


def test_uniforms_are_even_and_differ_by_seed_and_position() -> None:
    seeds, positions = np.divmod(np.arange(20000), 100)
    values = uniforms([int(seed) for seed in seeds], [int(position) for position in positions])
    assert len(set(values.tolist())) == 20000
    counts = np.histogram(values, bins=50, range=(0.0, 1.0))[0]
    assert ((counts - 400.0) ** 2 / 400.0).sum() < 85.4  # 49 degrees of freedom, p = 0.001
    correlation = np.corrcoef(values.reshape(200, 100)[:, :-1].ravel(), values.reshape(200, 100)[:, 1:].ravel())
    assert abs(correlation[0, 1]) < 0.03


@given(st.lists(st.integers(-(2**80), 2**80), min_size=1, max_size=5), st.integers(0, 2**40))
def test_uniforms_lie_strictly_inside_the_unit_interval_for_any_seed(seeds: list[int], position: int) -> None:
    values = uniforms(seeds, [position] * len(seeds))
    assert ((values > 0.0) & (values < 1.0)).all()
    assert values[0] == uniforms([seeds[0] % 2**64], [position])[0]


def test_tokens_follow_the_temperature_scaled_distribution() -> None:
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, float("-inf")])
    for temperature in (0.5, 1.0, 2.0):
        counts = draw(logits, SamplingParams(max_tokens=1, temperature=temperature, seed=3), 20000)
        assert chi_square(counts, (logits / temperature).softmax(-1)) < 18.5  # 4 degrees of freedom, p = 0.001


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 3},
        {"top_k": 100},
        {"top_p": 0.7},
        {"top_p": 0.01},
        {"min_p": 0.2},
        {"repetition_penalty": 1.8},
        {"top_k": 5, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.2, "temperature": 1.5},
    ],
)
def test_truncation_and_penalty_are_those_of_transformers(options: dict[str, float]) -> None:
    logits = torch.randn(9, generator=torch.Generator().manual_seed(1)) * 2
    history = [2, 2, 5]
    params = replace(SamplingParams(max_tokens=1, seed=5), **options)
    want = reference(logits, params, history)
    counts = draw(logits, params, 4000, history)
    assert set(counts.nonzero().flatten().tolist()) == set(want.nonzero().flatten().tolist())
    assert chi_square(counts, want) < 27.9  # at most 9 degrees of freedom


def test_logprobs_are_of_the_full_scaled_distribution_and_rows_do_not_mix() -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)) * 3
    params = [
        SamplingParams(max_tokens=1, seed=1),
        SamplingParams(max_tokens=1, seed=2, temperature=0.6, top_p=0.5),
        SamplingParams(max_tokens=1, temperature=0.0),
        SamplingParams(max_tokens=1, seed=3, top_k=2, repetition_penalty=1.5),
        SamplingParams(max_tokens=1, temperature=0.0, repetition_penalty=100.0),
        SamplingParams(max_tokens=1, seed=4, temperature=1.7),
    ]
    best = int(logits[4].argmax())
    histories = [[1], [2], [3], [4], [best], [5]]
    positions = [0, 9, 3, 4, 5, 6]
    tokens, logprobs = sample_tokens(logits, SamplingBatch.of(params, CPU), positions, histories)
    for row, one in enumerate(params):
        alone = sample_tokens(logits[row : row + 1], SamplingBatch.of([one], CPU), [positions[row]], [histories[row]])
        assert alone[0] == [tokens[row]] and alone[1] == pytest.approx([logprobs[row]], abs=1e-6)
        scaled = logits[row] / (1.0 if one.greedy else one.temperature)
        assert logprobs[row] == pytest.approx(float(scaled.log_softmax(-1)[tokens[row]]), abs=1e-5)
    assert tokens[2] == int(logits[2].argmax())
    assert tokens[4] != best


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 3000), st.floats(0.5, 60.0), st.integers(0, 5))
def test_a_token_of_probability_zero_is_never_taken(seed: int, vocabulary: int, scale: float, cut: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(8, vocabulary, generator=generator) * scale
    logits[:, torch.randperm(vocabulary, generator=generator)[: vocabulary // 2]] = float("-inf")
    params = [SamplingParams(max_tokens=1, seed=seed + row, top_k=cut if row % 2 else 0) for row in range(8)]
    tokens, logprobs = sample_tokens(logits, SamplingBatch.of(params, CPU), list(range(8)), [[]] * 8)
    assert all(math.isfinite(one) for one in logprobs)
    assert all(0 <= token < vocabulary for token in tokens)


def test_the_highest_and_lowest_draws_stay_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.full((1, 70000), -3.0)
    logits[0, -1] = logits[0, 0] = float("-inf")
    batch = SamplingBatch.of([SamplingParams(max_tokens=1)], CPU)
    for value, token in ((1.0 - 2.0**-49, 69998), (2.0**-49, 1), (1.0, 69998)):
        monkeypatch.setattr("envgrad.sampling.sampling_ops.uniforms", lambda *_, value=value: np.array([value]))
        assert sample_tokens(logits, batch, [0], [[]])[0] == [token]


def test_half_precision_logits_are_widened_first() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(2)).bfloat16()
    batch = SamplingBatch.of([SamplingParams(max_tokens=1, seed=row, temperature=0.8) for row in range(4)], CPU)
    tokens, logprobs = sample_tokens(logits, batch, [0] * 4, [[]] * 4)
    want = (logits.float() / 0.8).log_softmax(-1)
    assert logprobs == pytest.approx([float(want[row, token]) for row, token in enumerate(tokens)], abs=1e-6)


def test_logits_that_are_not_finite_are_named() -> None:
    batch = SamplingBatch.of([SamplingParams(max_tokens=1)] * 2, CPU)
    for bad in (float("nan"), float("inf")):
        logits = torch.zeros(2, 5)
        logits[1, 3] = bad
        with pytest.raises(FloatingPointError, match="row 1 of 2"):
            sample_tokens(logits, batch, [0, 0], [[], []])


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 0}, {"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.1},
        {"top_k": -1}, {"min_p": -0.1}, {"repetition_penalty": 0.0}, {"stop_strings": ("",)},
    ],
)  # fmt: skip
def test_bad_parameters_are_named(options: dict[str, float]) -> None:
    (name,) = options
    with pytest.raises(ConfigurationError, match=f"^{name} must be"):
        check_params(replace(SamplingParams(max_tokens=3), **options))


@pytest.mark.parametrize("vocabulary", [5, 300, 2048, 2049, 2560, 5000])
def test_a_large_vocabulary_is_drawn_from_as_a_small_one(vocabulary):
    """The token is the one at which the plain cumulative distribution passes the draw, whatever the blocks are."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(64, vocabulary, generator=generator) * 4
    params = [SamplingParams(max_tokens=1, seed=seed, temperature=0.7) for seed in range(64)]
    tokens, logprobs = sample_tokens(logits, SamplingBatch.of(params, logits.device), [3] * 64, [[]] * 64)
    exact = torch.log_softmax(logits.double() / 0.7, -1)
    cumulative = exact.exp().cumsum(-1)
    draws = torch.from_numpy(uniforms(list(range(64)), [3] * 64))[:, None] * cumulative[:, -1:]
    expected = torch.searchsorted(cumulative, draws, right=True).squeeze(1).tolist()
    assert tokens == expected
    assert torch.allclose(
        torch.tensor(logprobs), exact.gather(1, torch.tensor(tokens)[:, None]).squeeze(1).float(), atol=2e-6
    )


def test_no_token_without_probability_is_drawn_at_the_edges_of_blocks():
    logits = torch.full((256, 4096), -torch.inf)
    logits[:, 255], logits[:, 256], logits[:, 4095] = 0.0, 0.0, 0.0
    params = [SamplingParams(max_tokens=1, seed=seed) for seed in range(256)]
    tokens, _ = sample_tokens(logits, SamplingBatch.of(params, logits.device), [0] * 256, [[]] * 256)
    assert set(tokens) == {255, 256, 4095}
    assert all(60 < tokens.count(token) < 110 for token in set(tokens))
