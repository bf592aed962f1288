from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from envgrad.errors import ConfigurationError
from envgrad.losses import LossInputs, entropy_threshold, importance_correction, off_policy_mask
from helpers.losses import inputs


@pytest.mark.parametrize(
    ("mode", "clip_min", "clip_max", "expected"),
    [
        ("token_truncate", None, 3.0, [2.0, 3.0, 0.5]),
        ("token_truncate", 1.0, None, [2.0, 4.0, 1.0]),
        ("token_mask", 1.0, 3.0, [2.0, 0.0, 0.0]),
        ("sequence_truncate", None, 3.0, [3.0, 3.0, 0.5]),  # 2 * 4 = 8
        ("sequence_mask", None, 9.0, [8.0, 8.0, 0.5]),
        ("sequence_mask", None, 3.0, [0.0, 0.0, 0.5]),
        ("sequence_mask", None, None, [8.0, 8.0, 0.5]),
    ],
)
def test_importance_correction(mode, clip_min, clip_max, expected) -> None:  # type: ignore[no-untyped-def]
    sampler = torch.tensor([-1.0, -2.0, -3.0])
    old = sampler + torch.tensor([2.0, 4.0, 0.5]).log()
    weights = importance_correction(
        old, sampler, torch.tensor([0, 0, 1]), 2, mode=mode, clip_min=clip_min, clip_max=clip_max
    )
    assert weights.tolist() == pytest.approx(expected)


def test_importance_correction_without_a_sampler_logprob_and_with_bad_options() -> None:
    old, index = torch.tensor([-1.0, -1.0]), torch.tensor([0, 0])
    sampler = torch.tensor([math.nan, -1.0])
    assert importance_correction(old, sampler, index, 1, mode="token_truncate", clip_max=2.0).tolist() == [1.0, 1.0]
    with pytest.raises(ConfigurationError, match="clip_min=2 must be below clip_max=1"):
        importance_correction(old, old, index, 1, mode="token_mask", clip_min=2, clip_max=1)
    with pytest.raises(ConfigurationError, match="mode='mask' must be one of"):
        importance_correction(old, old, index, 1, mode="mask")  # type: ignore[arg-type]


def drifted(logprobs: list[float], sampler: list[float], advantages: list[float], index: list[int]) -> LossInputs:
    base = inputs([1.0] * len(index), advantages, index)
    return replace(base, logprobs=torch.tensor(logprobs), sampler_logprobs=torch.tensor(sampler))


def test_off_policy_mask_drops_bad_sequences_that_the_policy_has_left() -> None:
    # means of sampler - policy: sequence 0: (1 + 0) / 2 = 0.5; 1: 1.0; 2: 1.0 with A > 0; 3: -3
    given_inputs = drifted(
        [-2.0, -2.0, -2.0, -2.0, -1.0], [-1.0, -2.0, -1.0, -1.0, -4.0], [-1.0, -1.0, -1.0, 1.0, -1.0], [0, 0, 1, 2, 3]
    )
    assert off_policy_mask(given_inputs, 0.75).tolist() == [1.0, 1.0, 0.0, 1.0, 1.0]
    assert off_policy_mask(given_inputs, 0.5).tolist() == [1.0, 1.0, 0.0, 1.0, 1.0]  # at the threshold it is kept
    assert off_policy_mask(given_inputs, 0.25).tolist() == [0.0, 0.0, 0.0, 1.0, 1.0]
    assert off_policy_mask(given_inputs, 2.0).tolist() == [1.0] * 5


def test_off_policy_mask_counts_a_token_without_a_sampler_logprob_as_no_drift() -> None:
    # (nan -> 0, 1): mean 0.5, not NaN, which no threshold would keep
    given_inputs = drifted([-2.0, -2.0], [math.nan, -1.0], [-1.0, -1.0], [0, 0])
    assert off_policy_mask(given_inputs, 0.6).tolist() == [1.0, 1.0]
    assert off_policy_mask(given_inputs, 0.4).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("share", "kept"), [(0.0, 1), (0.2, 3), (0.5, 6), (0.7, 8), (1.0, 11)])
def test_entropy_threshold_keeps_the_top_share(share: float, kept: int) -> None:
    # 11 values: the quantile 1 - share lies at place 10 * (1 - share); all values from there up are kept
    entropies = torch.randperm(11, generator=torch.Generator().manual_seed(3)).float()
    threshold = entropy_threshold(entropies, share)
    assert int((entropies >= threshold).sum()) == kept and threshold == 11 - kept


@given(st.lists(st.floats(0, 10, width=32), min_size=1, max_size=40), st.floats(0, 1))
def test_entropy_threshold_is_the_quantile_seen_from_above(values: list[float], share: float) -> None:
    entropies = torch.tensor(values)
    kept = entropies >= entropy_threshold(entropies, share)
    assert int(kept.sum()) >= 1
    place = (1 - share) * (len(values) - 1)
    assert int((~kept).sum()) <= math.ceil(round(place, 9))
    assert bool(kept[entropies == entropies.max()].all())
