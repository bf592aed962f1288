"""Logits -> tokens and log-probs, fused over the batch.

Each row draws one uniform number from a counter-based hash of (its seed, the index of the token in its answer), and
takes the token where the cumulative distribution passes it. So a row's tokens do not depend on what else is in the
batch, on the order of arrival, or on any generator's state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from envgrad.errors import ConfigurationError
from envgrad.native.decoder import Kernels
from envgrad.sampling.sampler import SamplingParams

Seeds: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint64]]

_UNIFORM_BITS = 48
_BLOCK, _ONE_BLOCK = 256, 2048
"""tokens in a block of the vocabulary; vocabularies up to the second are one block"""
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


def check_params(params: SamplingParams) -> None:
    """Refuse parameters that mean nothing.

    Raises:
        ConfigurationError: naming the parameter, its value and its range.

    Example:
        >>> check_params(SamplingParams(max_tokens=4, top_p=0.0))
        Traceback (most recent call last):
        envgrad.errors.ConfigurationError: top_p must be in (0, 1], got 0.0
    """
    rules = (
        ("max_tokens", params.max_tokens, params.max_tokens >= 1, "at least 1"),
        ("temperature", params.temperature, 0.0 <= params.temperature < float("inf"), "finite and at least 0"),
        ("top_p", params.top_p, 0.0 < params.top_p <= 1.0, "in (0, 1]"),
        ("top_k", params.top_k, params.top_k >= 0, "at least 0 (0 keeps all)"),
        ("min_p", params.min_p, 0.0 <= params.min_p <= 1.0, "in [0, 1]"),
        ("repetition_penalty", params.repetition_penalty, params.repetition_penalty > 0.0, "above 0"),
        ("stop_strings", params.stop_strings, all(params.stop_strings), "non-empty strings"),
    )
    for name, value, valid, rule in rules:
        if not valid:
            raise ConfigurationError(f"{name} must be {rule}, got {value!r}")


def uniforms(seeds: Sequence[int] | Seeds, positions: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """One number in (0, 1) per row, a function of its seed and position alone (SplitMix64, Steele et al. 2014, applied
    to the seed and then to the position).

    Example:
        >>> a, b = uniforms([7, 7], [0, 1]), uniforms([8, 7], [0, 1])
        >>> bool(a[1] == b[1]), bool(a[0] == b[0]), bool(a[0] == a[1])
        (True, False, False)
    """
    state = seeds if isinstance(seeds, np.ndarray) else _seeds(seeds)
    counter = np.array(positions, dtype=np.uint64)
    for word in (_STEP, (counter + np.uint64(1)) * _STEP):
        state = state + word
        state = (state ^ (state >> np.uint64(30))) * _MIX[0]
        state = (state ^ (state >> np.uint64(27))) * _MIX[1]
        state = state ^ (state >> np.uint64(31))
    whole = (state >> np.uint64(64 - _UNIFORM_BITS)).astype(np.float64)
    return (whole + 0.5) * 2.0**-_UNIFORM_BITS


def _seeds(seeds: Sequence[int]) -> Seeds:
    return np.array([seed & _MASK for seed in seeds], dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The parameters of the rows of one batch; built once for as long as the same rows decode together."""

    params: tuple[SamplingParams, ...]
    seeds: Seeds
    temperature: Tensor
    """(B, 1) float32, 1 for greedy rows"""
    greedy: Tensor | None
    """(B,) bool; None if no row is greedy"""
    plain: bool
    """every row's temperature is 1"""
    shaped: tuple[int, ...]
    """rows whose sampling distribution is not the full one (top-k, top-p, min-p, penalty)"""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> SamplingBatch:
        greedy = [one.greedy for one in params]
        temperature = [1.0 if one.greedy else one.temperature for one in params]
        return cls(
            params=tuple(params),
            seeds=_seeds([one.seed for one in params]),
            temperature=torch.tensor(temperature, dtype=torch.float32, device=device).unsqueeze(1),
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            plain=all(value == 1.0 for value in temperature),
            shaped=tuple(row for row, one in enumerate(params) if _is_shaped(one)),
        )


def _is_shaped(params: SamplingParams) -> bool:
    return params.top_p < 1.0 or params.top_k > 0 or params.min_p > 0.0 or params.repetition_penalty != 1.0


def sample_tokens(
    logits: Tensor,
    batch: SamplingBatch,
    positions: Sequence[int],
    histories: Sequence[Sequence[int]],
    kernels: Kernels | None = None,
) -> tuple[list[int], list[float]]:
    """Sample one token per row.

    Args:
        logits: (B, V), any float dtype.
        batch: the rows' parameters.
        positions: index of the token in its row's answer, for each row.
        histories: each row's tokens so far (prompt and answer), read by the repetition penalty only.
        kernels: draw, where they can (rows that draw from the whole distribution, in float32 on a CPU); the draws are
            the same numbers.

    Returns:
        Tokens, and their log-probs under the full temperature-scaled distribution (temperature 1 for greedy rows).

    Raises:
        FloatingPointError: a row's logits are not finite.

    Example:
        >>> logits = torch.tensor([[0.0, 2.0, 1.0]])
        >>> batch = SamplingBatch.of([SamplingParams(max_tokens=1, temperature=0.0)], logits.device)
        >>> sample_tokens(logits, batch, [0], [[]])[0]
        [1]
    """
    if kernels is not None and not batch.shaped and logits.dtype == torch.float32 and logits.stride(1) == 1:
        found = kernels.draw(
            logits, temperature=batch.temperature, greedy=batch.greedy, seeds=batch.seeds, positions=positions
        )
        _check_finite(found[1])
        return found
    logits = logits.float()
    draws = torch.from_numpy(uniforms(batch.seeds, positions)).to(logits.device, _wide(logits)).unsqueeze(1)
    warm = logits if batch.plain else logits / batch.temperature
    if batch.shaped:
        logprobs = torch.log_softmax(warm, dim=-1)
        scores = _shape(logits, logprobs, batch, histories)
        tokens = _draw(scores, draws).tokens
    else:
        scores = warm
        drawn = _draw(scores, draws)
        tokens = drawn.tokens
    if batch.greedy is not None:
        tokens = torch.where(batch.greedy.unsqueeze(1), scores.argmax(-1, keepdim=True), tokens)
    picked = logprobs.gather(1, tokens) if batch.shaped else drawn.logprobs(scores, tokens)
    # one transfer for both: token ids are exact in either float type
    pair = torch.cat((tokens.to(draws.dtype), picked.to(draws.dtype)), dim=1).tolist()
    values = [row[1] for row in pair]
    _check_finite(values)
    return [int(row[0]) for row in pair], values


def _check_finite(values: Sequence[float]) -> None:
    if math.isnan(sum(values)):  # of any of them
        bad = next(row for row, value in enumerate(values) if value != value)
        raise FloatingPointError(
            f"the model's logits are not finite in row {bad} of {len(values)}; the weights have diverged "
            "(lower the learning rate, or set max_grad_norm)"
        )


def _wide(like: Tensor) -> torch.dtype:
    return torch.float32 if like.device.type == "mps" else torch.float64


class _Drawn(NamedTuple):
    """Tokens (B, 1), and what the scores' softmax divides by: ``exp(score - largest) / total``."""

    tokens: Tensor
    largest: Tensor
    total: Tensor

    def logprobs(self, scores: Tensor, tokens: Tensor) -> Tensor:
        """(B, 1) of ``softmax(scores)`` at ``tokens``."""
        return (scores.gather(1, tokens) - self.largest) - self.total.log()


def _draw(scores: Tensor, draws: Tensor) -> _Drawn:
    """Tokens (B, 1) where the cumulative distribution of ``softmax(scores)`` passes ``draws`` (B, 1).

    In two steps, over blocks of the vocabulary and then inside one block, so that a large vocabulary is passed over as
    few times as can be: once for the exponentials, once for the blocks' sums.
    """
    rows, vocabulary = scores.shape
    size = vocabulary if vocabulary <= _ONE_BLOCK else _BLOCK
    blocks = -(-vocabulary // size)
    largest = scores.amax(-1, keepdim=True)
    if blocks * size == vocabulary:
        weights = (scores - largest).exp_()
    else:
        weights = scores.new_zeros(rows, blocks * size)
        torch.sub(scores, largest, out=weights[:, :vocabulary])
        weights[:, :vocabulary].exp_()
    parts = weights.view(rows, blocks, size)
    ends = parts.sum(-1).to(draws.dtype).cumsum(-1)
    total = ends[:, -1:]
    aim = _below(draws * total, total)
    block = torch.searchsorted(ends, aim, right=True).clamp_(max=blocks - 1)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = parts.gather(1, block.unsqueeze(-1).expand(-1, -1, size)).squeeze(1).to(draws.dtype).cumsum(-1)
    # The block's own sum may differ from the one above by rounding.
    aim = _below(aim - before, inside[:, -1:])
    token = torch.searchsorted(inside, aim, right=True).clamp_(max=size - 1)
    return _Drawn((block * size + token).clamp_(max=vocabulary - 1), largest, total)


def _below(aim: Tensor, end: Tensor) -> Tensor:
    """``aim``, strictly below ``end``: then the first entry above it exists and has a probability above zero."""
    return torch.minimum(aim, torch.nextafter(end, torch.zeros_like(end)))


def _shape(logits: Tensor, logprobs: Tensor, batch: SamplingBatch, histories: Sequence[Sequence[int]]) -> Tensor:
    """Scores (B, V) of the sampling distribution, minus infinity where a token is cut; in the order of
    ``transformers``: penalty, temperature, top-k, top-p, min-p."""
    index = torch.tensor(batch.shaped, device=logits.device)
    params = [batch.params[row] for row in batch.shaped]
    scores = logits.index_select(0, index)
    for row, one in enumerate(params):
        if one.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(set(histories[batch.shaped[row]])), dtype=torch.long, device=logits.device)
            value = scores[row, seen]
            penalty = one.repetition_penalty
            scores[row, seen] = torch.where(value > 0, value / penalty, value * penalty)
    scores = scores / batch.temperature.index_select(0, index)
    vocabulary = scores.shape[1]
    if any(one.top_k for one in params):
        keep = _column([one.top_k or vocabulary for one in params], scores, torch.long).clamp(max=vocabulary)
        largest = min(max(one.top_k for one in params), vocabulary)
        threshold = scores.topk(largest, dim=-1).values.gather(1, keep.clamp(max=largest) - 1)
        scores = scores.masked_fill((scores < threshold) & (keep < vocabulary), float("-inf"))
    if any(one.top_p < 1.0 for one in params):
        ordered, order = scores.sort(dim=-1, descending=True)
        mass = ordered.softmax(-1)
        before = mass.cumsum(-1) - mass
        # the smallest set that reaches top_p: a token stays if the mass before it does not reach it yet
        top_p = _column([one.top_p for one in params], scores)
        cut = (before >= top_p) & (top_p < 1.0)
        cut[:, 0] = False
        scores = scores.masked_fill(torch.zeros_like(cut).scatter_(1, order, cut), float("-inf"))
    if any(one.min_p > 0.0 for one in params):
        floor = _column([one.min_p for one in params], scores).log()
        scores = scores.masked_fill(scores < scores.amax(-1, keepdim=True) + floor, float("-inf"))
    return logprobs.index_copy(0, index, scores)


def _column(values: Sequence[float], like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device).unsqueeze(1)
