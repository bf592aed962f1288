from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from envgrad.losses import (
    cispo_surrogate,
    clipped_surrogate,
    importance_ratio,
    k3_kl,
    sapo_surrogate,
    vespo_gamma,
)
from helpers.losses import inputs

LOG2 = math.log(2.0)


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


def slope(losses: torch.Tensor, logprobs: torch.Tensor) -> list[float]:
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    return gradient.tolist()


def test_sapo_is_a_soft_gate_with_the_gradient_of_the_ratio_at_one() -> None:
    given_inputs = inputs([1.0, 1.0, 2.0, 2.0], [3.0, -3.0, 1.0, -1.0])
    ratio = importance_ratio(given_inputs, "token")
    losses = sapo_surrogate(ratio, given_inputs.advantages, temperature_pos=1.0, temperature_neg=2.0)
    # sigmoid(0) = 1/2, so -A * 2 / t; at r = 2: sigmoid(1) = 0.731059 and sigmoid(2) = 0.880797
    assert losses.tolist() == pytest.approx([-6.0, 3.0, -4 * 0.731059, 2 * 0.880797], rel=1e-5)
    # d/dlogp = -A * 4 * s * (1 - s) * r: at r = 1 it is -A
    expected = [-3.0, 3.0, -4 * 0.731059 * 0.268941 * 2, 4 * 0.880797 * 0.119203 * 2]
    assert slope(losses, given_inputs.logprobs) == pytest.approx(expected, rel=1e-5)


def test_sapo_without_an_advantage_takes_the_negative_temperature_and_loses_nothing() -> None:
    losses = sapo_surrogate(torch.tensor([7.0]), torch.tensor([0.0]), temperature_pos=1.0, temperature_neg=2.0)
    assert losses.item() == 0.0


GAMMA = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}


def test_vespo_weighs_whole_sequences_by_the_gamma_of_their_product() -> None:
    # sequence 0: w = 2 * 0.25 = 0.5, A >= 0: 0.5^2 * e^(3 * 0.5) = 1.120422; sequence 1: w = 1.5, A < 0:
    # 1.5^3 * e^(2 * -0.5) = 1.241593
    given_inputs = inputs([2.0, 0.25, 1.5], [0.0, 1.0, -1.0], [0, 0, 1])
    phi = vespo_gamma(given_inputs, **GAMMA)
    assert phi.tolist() == pytest.approx([0.25 * math.exp(1.5)] * 2 + [1.5**3 * math.exp(-1.0)], rel=1e-5)
    assert not phi.requires_grad
    unchanged = vespo_gamma(inputs([1.0, 1.0], [1.0, -1.0], [0, 1]), **GAMMA)
    assert unchanged.tolist() == pytest.approx([1.0, 1.0])


def test_vespo_multiplies_the_samplers_correction_in() -> None:
    given_inputs = replace(inputs([2.0, 1.0], [1.0, 1.0]), importance=torch.tensor([0.5, 1.5]))
    # w = 2 * 0.5 * 1.5 = 1.5
    assert vespo_gamma(given_inputs, **GAMMA).tolist() == pytest.approx([1.5**2 * math.exp(-1.5)] * 2, rel=1e-5)
    masked = replace(inputs([1.0, 1.0], [1.0, 1.0]), importance=torch.tensor([0.0, 1.0]))
    # a masked token counts as 1e-8: 1e-16 * e^3
    assert vespo_gamma(masked, **GAMMA).tolist() == pytest.approx([1e-16 * math.exp(3.0)] * 2, rel=1e-3)


@given(st.lists(st.floats(-200, 200), min_size=1, max_size=5), st.sampled_from([-1.0, 0.0, 1.0]))
def test_vespo_is_finite_however_far_the_policy_went(drifts: list[float], advantage: float) -> None:
    base = inputs([1.0] * len(drifts), [advantage] * len(drifts))
    phi = vespo_gamma(replace(base, logprobs=base.old_logprobs + torch.tensor(drifts)), **GAMMA)
    # w^k e^(lambda (1 - w)) is largest at w = k / lambda: (2/3)^2 * e = 1.208 and 1.5^3 / e = 1.2416
    assert bool(torch.isfinite(phi).all()) and 0 <= float(phi.max()) < 1.25
