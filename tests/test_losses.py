from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from envgrad.errors import ConfigurationError
from envgrad.logprobs import PolicyOutputs
from envgrad.losses import (
    LossInputs,
    LossType,
    Metric,
    cispo_surrogate,
    clip_metrics,
    clipped_surrogate,
    entropy_bonus,
    extreme_metric,
    importance_correction,
    importance_ratio,
    k3_kl,
    mean_metric,
    merge_metrics,
    policy_metrics,
    sample_means,
    sample_weights,
    step_totals,
    weighted_sum,
)
from envgrad.packing import StepTotals, pack
from envgrad.types import TrainingSample

LOG2 = math.log(2.0)


def row(trained: int, *, truncated: bool = False, untrained: int = 1) -> TrainingSample:
    size = 2 + trained + untrained
    mask = (0, 0) + (1,) * trained + (0,) * untrained
    return TrainingSample(
        token_ids=(1,) * size, mask=mask, logprobs=(0.0,) * size, versions=(0,) * size, advantages=(0.0,) * size,
        prompt_length=2, group="g", truncated=truncated,
    )  # fmt: skip


def inputs(ratios: list[float], advantages: list[float], sample_index: list[int] | None = None) -> LossInputs:
    """Weights 1; old log-probs -1, the policy's such that its ratio to them is ``ratios``."""
    size = len(ratios)
    old = -torch.ones(size)
    return LossInputs(
        logprobs=(old + torch.tensor(ratios).log()).requires_grad_(), old_logprobs=old, sampler_logprobs=old,
        advantages=torch.tensor(advantages), weights=torch.ones(size),
        sample_index=torch.tensor(sample_index or [0] * size), num_samples=1 + max(sample_index or [0]),
        total_tokens=size,
    )  # fmt: skip


# Weights: rows with 2 and 6 trained tokens, then a truncated one with 4


@pytest.mark.parametrize(
    ("loss_type", "expected", "expected_masked"),
    [
        ("grpo", [1 / 6, 1 / 18, 1 / 12], [1 / 6, 1 / 18, 0]),  # 1 / (3 * 2), 1 / (3 * 6), 1 / (3 * 4)
        ("bnpo", [1 / 12] * 3, [1 / 8, 1 / 8, 0]),
        ("dapo", [1 / 12] * 3, [1 / 8, 1 / 8, 0]),
        ("cispo", [1 / 12] * 3, [1 / 8, 1 / 8, 0]),
        ("dr_grpo", [1 / 30] * 3, [1 / 30, 1 / 30, 0]),  # 1 / (3 * 10)
    ],
)
def test_sample_weights(loss_type: LossType, expected: list[float], expected_masked: list[float]) -> None:
    rows = [row(2), row(6, untrained=3), row(4, truncated=True)]
    assert sample_weights(rows, loss_type, max_completion_length=10) == pytest.approx(expected)
    masked = sample_weights(rows, loss_type, max_completion_length=10, mask_truncated_completions=True)
    assert masked == pytest.approx(expected_masked)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "cispo", "dr_grpo"])
def test_nothing_to_train_weighs_nothing(loss_type: LossType) -> None:
    rows = [row(3, truncated=True), row(0)]
    weights = sample_weights(rows, loss_type, max_completion_length=10, mask_truncated_completions=True)
    assert weights == [0.0, 0.0]
    assert sample_weights([], loss_type, max_completion_length=10) == []


def test_totals_of_the_whole_step_are_the_denominators() -> None:
    assert step_totals([row(2), row(4, truncated=True)]) == StepTotals(num_samples=2, num_tokens=6)
    assert step_totals([row(2), row(4, truncated=True)], True) == StepTotals(num_samples=2, num_tokens=2)
    totals = StepTotals(num_samples=8, num_tokens=100)
    assert sample_weights([row(2)], "grpo", totals=totals) == [1 / 16]
    assert sample_weights([row(2)], "dapo", totals=totals) == [1 / 100]


def test_weight_errors() -> None:
    with pytest.raises(ConfigurationError, match="max_completion_length, which is None"):
        sample_weights([row(1)], "dr_grpo")
    with pytest.raises(ConfigurationError, match="loss_type='ppo' must be one of"):
        sample_weights([row(1)], "ppo")  # type: ignore[arg-type]


# Ratios and surrogates


def test_token_and_sequence_ratios() -> None:
    given_inputs = inputs([2.0, 8.0, 3.0], [1.0, 1.0, 1.0], [0, 0, 1])
    assert importance_ratio(given_inputs, "token").tolist() == pytest.approx([2.0, 8.0, 3.0])
    ratio = importance_ratio(given_inputs, "sequence")
    assert ratio.tolist() == pytest.approx([4.0, 4.0, 3.0])  # exp of the mean log: sqrt(2 * 8)
    ratio.sum().backward()
    # d(2 * exp((a + b) / 2)) / da = 4
    assert given_inputs.logprobs.grad is not None
    assert given_inputs.logprobs.grad.tolist() == pytest.approx([4.0, 4.0, 3.0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "delta", "loss", "slope"),
    [
        (1.0, 2.0, None, -2.0, -2.0),  # unchanged policy: loss -A, gradient -A
        (1.0, -2.0, None, 2.0, 2.0),
        (1.25, 2.0, None, -2.5, -2.5),  # inside [0.8, 1.28]
        (1.5, 2.0, None, -2.56, 0.0),  # 1.28 * 2, clipped
        (0.5, 2.0, None, -1.0, -1.0),  # too low with A > 0: not clipped
        (0.5, -2.0, None, 1.6, 0.0),  # 0.8 * 2, clipped
        (1.5, -2.0, None, 3.0, 3.0),  # too high with A < 0: not clipped
        (5.0, -2.0, 3.0, 6.0, 0.0),  # but bounded by delta
        (2.0, -2.0, 3.0, 4.0, 4.0),
        (5.0, 2.0, 3.0, -2.56, 0.0),
    ],
)
def test_clipped_surrogate(ratio: float, advantage: float, delta: float | None, loss: float, slope: float) -> None:
    given_inputs = inputs([ratio], [advantage])
    found = clipped_surrogate(
        importance_ratio(given_inputs, "token"), given_inputs.advantages, epsilon=0.2, epsilon_high=0.28, delta=delta
    )
    assert found.item() == pytest.approx(loss)
    found.sum().backward()
    assert given_inputs.logprobs.grad is not None
    assert given_inputs.logprobs.grad.item() == pytest.approx(slope)  # d ratio / d logp = ratio


def test_cispo_truncates_the_weight_and_keeps_the_gradient() -> None:
    given_inputs = inputs([2.0, 9.0, 0.1], [1.0, 1.0, -3.0])
    ratio = importance_ratio(given_inputs, "token")
    losses = cispo_surrogate(ratio, given_inputs.advantages, given_inputs.logprobs, epsilon_high=5.0)
    logprobs = [-1 + math.log(2), -1 + math.log(9), -1 + math.log(0.1)]
    assert losses.tolist() == pytest.approx([-2 * logprobs[0], -5 * logprobs[1], 0.3 * logprobs[2]])
    losses.sum().backward()
    assert given_inputs.logprobs.grad is not None
    assert given_inputs.logprobs.grad.tolist() == pytest.approx([-2.0, -5.0, 0.3])


@given(st.floats(-20, 0), st.floats(-20, 0))
def test_k3_is_never_negative_and_zero_where_both_agree(a: float, b: float) -> None:
    assert k3_kl(torch.tensor(a).double(), torch.tensor(b).double()).item() >= -1e-12
    assert k3_kl(torch.tensor(a), torch.tensor(a)).item() == 0


def test_k3_value() -> None:
    assert k3_kl(torch.tensor([-LOG2]), torch.tensor([0.0])).item() == pytest.approx(2 - LOG2 - 1)


def test_k3_times_the_ratio_has_the_gradient_of_the_reverse_kl() -> None:
    logits = torch.tensor([0.3, -0.4, 1.1], dtype=torch.double, requires_grad=True)
    reference = torch.tensor([0.5, 0.2, -0.3], dtype=torch.double).log_softmax(0)
    logs = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logs.exp() * (logs - reference)).sum(), logits, retain_graph=True)
    samples = (logs - logs.detach()).exp() * k3_kl(logs, reference)  # one sample of each token, weighted by its chance
    (estimated,) = torch.autograd.grad((logs.detach().exp() * samples).sum(), logits)
    assert torch.allclose(exact, estimated)


def test_sums() -> None:
    given_inputs = replace(inputs([1.0, 1.0, 1.0], [0.0] * 3), weights=torch.tensor([0.5, 0.0, 2.0]))
    assert weighted_sum(torch.tensor([1.0, 7.0, 3.0]), given_inputs).item() == 6.5
    assert sample_means(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([0, 2, 2]), 3).tolist() == [1.0, 0.0, 4.0]
    entropy = torch.tensor([1.0, 2.0, 3.0])
    bonus = entropy_bonus(replace(given_inputs, entropy=entropy, total_tokens=12.0), 0.1)
    assert bonus.item() == pytest.approx(-0.1 * 6 / 12)
    assert entropy_bonus(replace(given_inputs, entropy=entropy, total_tokens=math.inf), 0.1).item() == 0
    with pytest.raises(AssertionError, match="entropy='grad'"):
        entropy_bonus(given_inputs, 0.1)


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


# Metrics


def test_clip_metrics() -> None:
    given_inputs = inputs([0.5, 0.5, 1.5, 1.0], [-1.0, 1.0, 1.0, -1.0], [0, 0, 1, 1])
    given_inputs = replace(given_inputs, weights=torch.tensor([1.0, 1.0, 1.0, 2.0]))
    ratio = importance_ratio(given_inputs, "token")
    found = merge_metrics([clip_metrics(ratio, given_inputs, epsilon=0.2, epsilon_high=0.28, level="token")])
    assert found == pytest.approx(
        {
            "clip_ratio/low_mean": 0.25,
            "clip_ratio/high_mean": 0.25,
            "clip_ratio/region_mean": 0.5,
            "clip_ratio/low_min": 0.0,
            "clip_ratio/high_max": 0.5,
        }
    )


def test_sequence_level_means_count_sequences() -> None:
    given_inputs = inputs([1.0] * 4, [1.0] * 4, [0, 0, 0, 1])
    values = torch.tensor([1.0, 1.0, 1.0, 0.0])
    assert merge_metrics([{"x": mean_metric(values, given_inputs)}]) == {"x": 0.75}
    assert merge_metrics([{"x": mean_metric(values, given_inputs, "sequence")}]) == {"x": 0.5}


def test_policy_metrics_skip_tokens_without_weight() -> None:
    given_inputs = inputs([1.0, 2.0, 9.0], [1.0] * 3)
    given_inputs = replace(
        given_inputs, weights=torch.tensor([1.0, 1.0, 0.0]), entropy=torch.tensor([1.0, 2.0, 100.0]),
        sampler_logprobs=torch.tensor([-1.5, -1.0, 50.0]),
    )  # fmt: skip
    found = merge_metrics([policy_metrics(importance_ratio(given_inputs, "token"), given_inputs)])
    assert found == pytest.approx({"ratio/max": 2.0, "sampler_mismatch": (0.5 + LOG2) / 2, "entropy": 1.5})


def test_merging_weighs_by_count_and_drops_what_nobody_counted() -> None:
    def part(mean: float, count: float, top: float) -> dict[str, Metric]:
        one = torch.tensor(count)
        return {
            "mean": Metric(value=torch.tensor(mean * count), count=one),
            "top": Metric(value=torch.tensor(top), count=one, reduce="max"),
            "bottom": Metric(value=torch.tensor(top), count=one, reduce="min"),
        }

    parts = [part(1.0, 1.0, 5.0), part(3.0, 3.0, 2.0), part(math.nan, 0.0, math.inf)]
    assert merge_metrics(parts) == {"mean": 2.5, "top": 5.0, "bottom": 2.0}
    assert merge_metrics(parts[2:]) == {}
    unweighted = replace(inputs([1.0], [1.0]), weights=torch.zeros(1))
    assert extreme_metric(torch.ones(1), unweighted, "max").count == 0


def test_inputs_of_a_micro_batch() -> None:
    micro_batch = pack([row(2), row(3)], [0.5, 0.25]).micro_batches[0]
    micro_batch = replace(micro_batch, ref_logprobs=torch.full((5,), 7.0), importance=torch.full((5,), 8.0))
    found = LossInputs.of(micro_batch, PolicyOutputs(torch.full((5,), 1.0), torch.full((5,), 2.0)))
    for name in ("old_logprobs", "sampler_logprobs", "advantages", "weights", "sample_index", "num_samples",
                 "total_tokens", "ref_logprobs", "importance"):  # fmt: skip
        assert getattr(found, name) is getattr(micro_batch, name)
    assert found.logprobs[0] == 1 and found.entropy is not None and found.entropy[0] == 2
