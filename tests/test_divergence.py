from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from envgrad.divergence import Divergence, TeacherSignal, generalized_jsd, sampled_token_divergence, with_tail
from envgrad.errors import ConfigurationError
from envgrad.head import logprobs_from_hidden

P = torch.tensor([[0.5, 0.3, 0.2]])
Q = torch.tensor([[0.2, 0.3, 0.5]])


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [
        (1.0, 0.5 * math.log(2.5) + 0.2 * math.log(0.4)),
        (0.0, 0.2 * math.log(0.4) + 0.5 * math.log(2.5)),
        # m = (0.35, 0.3, 0.35): both halves are 0.5 * log(0.5 / 0.35) + 0.2 * log(0.2 / 0.35)
        (0.5, 0.5 * math.log(0.5 / 0.35) + 0.2 * math.log(0.2 / 0.35)),
        # m = 0.75 p + 0.25 q = (0.425, 0.3, 0.275)
        (
            0.25,
            0.75 * (0.5 * math.log(0.5 / 0.425) + 0.2 * math.log(0.2 / 0.275))
            + 0.25 * (0.2 * math.log(0.2 / 0.425) + 0.5 * math.log(0.5 / 0.275)),
        ),
    ],
)
def test_divergences_of_three_tokens_by_hand(alpha: float, expected: float) -> None:
    found = Divergence(mode="full_logits", alpha=alpha).of_logs(P.log(), Q.log())
    assert found.item() == pytest.approx(expected, abs=1e-6)


def test_reverse_and_forward_differ_where_they_should() -> None:
    p, q = torch.tensor([[0.5, 0.5, 1e-9]]).log(), torch.tensor([[0.25, 0.5, 0.25]]).log()
    assert generalized_jsd(p, q, 1.0).item() == pytest.approx(0.5 * math.log(2), abs=1e-6)
    assert generalized_jsd(p, q, 0.0).item() > 4, "the teacher's third token is all but impossible for the student"


def test_the_top_k_are_the_students_and_are_renormalized() -> None:
    found = Divergence(mode="topk_logits", topk=2).of_logs(P.log(), Q.log())
    p, q = (5 / 8, 3 / 8), (2 / 5, 3 / 5)
    assert found.item() == pytest.approx(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)), abs=1e-6)


def test_the_tail_is_one_more_bucket() -> None:
    p, q = torch.tensor([[0.4, 0.3, 0.2, 0.1]]), torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    found = Divergence(mode="topk_logits", topk=2, add_tail=True, alpha=0.0).of_logs(p.log(), q.log())
    expected = 0.1 * math.log(0.1 / 0.4) + 0.2 * math.log(0.2 / 0.3) + 0.7 * math.log(0.7 / 0.3)
    assert found.item() == pytest.approx(expected, abs=1e-6)
    whole = with_tail(p.log()).exp()
    assert whole[0, -1].item() < 1e-6 and torch.isfinite(with_tail(p.log())).all()


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_top_k_over_the_whole_vocabulary_is_the_full_divergence(alpha: float) -> None:
    p, q = (torch.randn(5, 7, generator=torch.Generator().manual_seed(i)).log_softmax(-1) for i in (1, 2))
    full = Divergence(mode="full_logits", alpha=alpha).of_logs(p, q)
    assert torch.allclose(Divergence(mode="topk_logits", alpha=alpha, topk=50).of_logs(p, q), full, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_impossible_tokens_give_finite_values_and_gradients(alpha: float) -> None:
    logits = torch.tensor([[1.0, 2.0, -math.inf]], requires_grad=True)
    teacher = torch.tensor([[2.0, 1.0, -math.inf]]).log_softmax(-1)
    value = Divergence(mode="full_logits", alpha=alpha).of_logs(logits.log_softmax(-1), teacher)
    value.sum().backward()
    assert torch.isfinite(value).all() and logits.grad is not None and torch.isfinite(logits.grad).all()


def test_the_sampled_tokens_gradient_is_that_of_the_reverse_kl_in_expectation() -> None:
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([0.1, 0.6, -0.4], dtype=torch.float64).log_softmax(-1)
    (exact,) = torch.autograd.grad(generalized_jsd(logits.log_softmax(-1)[None], teacher[None], 1.0).sum(), logits)
    logs = logits.log_softmax(-1)
    expected = (logs.exp().detach() * sampled_token_divergence(logs, teacher)).sum()
    (sampled,) = torch.autograd.grad(expected, logits)
    assert torch.allclose(exact, sampled, atol=1e-12)


@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.2, 0.5, 1.0]), st.sampled_from([None, 2, 4]))
@settings(max_examples=40, deadline=None)
def test_no_divergence_is_negative_and_equal_distributions_have_none(seed: int, alpha: float, topk: int | None) -> None:
    draw = torch.Generator().manual_seed(seed)
    p, q = ((3 * torch.randn(4, 6, generator=draw)).log_softmax(-1) for _ in range(2))
    how = Divergence(mode="full_logits" if topk is None else "topk_logits", alpha=alpha, topk=topk)
    assert (how.of_logs(p, q) > -1e-6).all()
    assert how.of_logs(p, p.clone()).abs().max() < 1e-6


@pytest.mark.parametrize("mode", ["full_logits", "topk_logits"])
@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_gradients_by_finite_differences(mode: str, alpha: float) -> None:
    how = Divergence(mode=mode, alpha=alpha, topk=3 if mode == "topk_logits" else None, add_tail=mode == "topk_logits")
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 5, generator=draw, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(2, 5, generator=draw, dtype=torch.float64).log_softmax(-1)
    assert torch.autograd.gradcheck(lambda x: how.of_logs(x.log_softmax(-1), teacher), (logits,))


class Adapted(nn.Linear):
    """A head that is no plain linear layer, and notes how many rows it is asked for."""

    def __init__(self) -> None:
        super().__init__(4, 9)
        self.rows: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(x.shape[0])
        return super().forward(x)


@pytest.mark.parametrize("rows", [1, 3, 5, 100])
@pytest.mark.parametrize("mode", ["full_logits", "topk_logits"])
def test_the_head_in_chunks_equals_the_naive_computation(monkeypatch: pytest.MonkeyPatch, rows: int, mode: str) -> None:
    monkeypatch.setattr("envgrad.head.MAX_LOGITS", 9 * 4 * rows)
    torch.manual_seed(0)
    head, teacher_head = Adapted(), nn.Linear(4, 9)
    hidden = torch.randn(13, 4, requires_grad=True)
    states, index = torch.randn(6, 4), torch.tensor([0, 3, 4, 8, 9, 12])
    targets = torch.randint(0, 9, (13,))
    how = Divergence(mode=mode, alpha=0.5, topk=4 if mode == "topk_logits" else None)
    asked: list[int] = []

    def logits(first: int, last: int) -> Tensor:
        asked.append(last - first)
        return teacher_head(states[first:last]) / 0.7

    signal = TeacherSignal(divergence=how, index=index, logits=logits)
    outputs = logprobs_from_hidden(hidden, head, targets, temperature=0.7, entropy="metric", teacher=signal)
    coefficients = torch.randn(6)
    ((outputs.divergence * coefficients).sum() + outputs.logprobs.sum()).backward()
    ours = [hidden.grad.clone(), head.weight.grad.clone(), head.bias.grad.clone()]
    assert max(head.rows) <= rows and max(asked) <= rows
    assert teacher_head.weight.grad is None

    hidden.grad = None
    head.zero_grad()
    logs = (nn.functional.linear(hidden, head.weight, head.bias) / 0.7).log_softmax(-1)
    teacher = (teacher_head(states) / 0.7).log_softmax(-1).detach()
    divergence = how.of_logs(logs[index], teacher)
    ((divergence * coefficients).sum() + logs[torch.arange(13), targets].sum()).backward()
    assert torch.allclose(outputs.divergence, divergence, atol=1e-5)
    for a, b in zip(ours, [hidden.grad, head.weight.grad, head.bias.grad], strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "all"}, "distillation_mode='all' must be one of"),
        ({"mode": "full_logits", "alpha": 1.5}, r"distillation_alpha=1.5 must be in \[0, 1\]"),
        ({"alpha": 0.5}, "must be 1.0 for distillation_mode='sampled_token'"),
        ({"mode": "topk_logits"}, "distillation_topk=None must be at least 1"),
        ({"mode": "full_logits", "topk": 5}, "distillation_topk=5 cannot act"),
        ({"mode": "full_logits", "add_tail": True}, "distillation_add_tail=True cannot act"),
    ],
)
def test_options_that_cannot_work_are_errors(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Divergence(**options)
