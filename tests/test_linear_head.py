from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from envgrad import linear_head
from envgrad.linear_head import linear_head_logprobs
from envgrad.logprobs import EntropyMode, logprobs_from_hidden


def head_reference(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logs = (nn.functional.linear(hidden, weight, bias) / temperature).log_softmax(-1)
    return logs[torch.arange(len(targets)), targets], -(logs.exp() * logs).sum(-1)


@pytest.mark.parametrize("kind", ["linear", "other"])
@pytest.mark.parametrize("entropy", ["none", "metric", "grad"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("max_logits", [2**24, 70, 1])
def test_the_chunked_head_equals_the_plain_one(
    monkeypatch: pytest.MonkeyPatch, max_logits: int, with_bias: bool, entropy: EntropyMode, kind: str
) -> None:
    monkeypatch.setattr(linear_head, "MAX_LOGITS", max_logits)
    monkeypatch.setattr("envgrad.head.MAX_LOGITS", max_logits)
    torch.manual_seed(1)
    head = nn.Linear(5, 23, bias=with_bias).double()
    head.weight.data.mul_(3)
    hidden = torch.randn(7, 5, dtype=torch.double, requires_grad=True)
    targets, up, up_entropy = torch.randint(0, 23, (7,)), torch.randn(7), torch.randn(7)
    if kind == "other":  # a hook makes the head one that must be called
        head.register_forward_hook(lambda module, args, output: output)
    outputs = logprobs_from_hidden(hidden, head, targets, temperature=0.7, entropy=entropy)
    loss = (outputs.logprobs * up).sum()
    if entropy == "grad":
        assert outputs.entropy is not None
        loss = loss + (outputs.entropy * up_entropy).sum()
    loss.backward()
    ours = [hidden.grad, *(parameter.grad for parameter in head.parameters())]
    hidden.grad = None
    head.zero_grad()
    logprobs, entropies = head_reference(hidden, head.weight, head.bias, targets, 0.7)
    assert torch.allclose(outputs.logprobs.double(), logprobs, atol=1e-5)
    if entropy == "none":
        assert outputs.entropy is None
    else:
        assert outputs.entropy is not None and torch.allclose(outputs.entropy.double(), entropies, atol=1e-5)
    ((logprobs * up).sum() + (entropies * up_entropy).sum() * (entropy == "grad")).backward()
    for a, b in zip(ours, [hidden.grad, *(parameter.grad for parameter in head.parameters())], strict=True):
        assert a is not None and b is not None and torch.allclose(a, b, atol=1e-5)


def test_a_frozen_head_gets_no_gradient_but_hands_it_on() -> None:
    weight, hidden = torch.randn(9, 4), torch.randn(3, 4, requires_grad=True)
    for max_logits in (2**24, 9):
        logprobs, _ = linear_head_logprobs(hidden, weight, None, torch.tensor([0, 1, 2]), max_logits=max_logits)
        logprobs.sum().backward()
    assert hidden.grad is not None and hidden.grad.abs().sum() > 0 and weight.grad is None


def test_extreme_logits_stay_finite() -> None:
    weight = torch.tensor([[1e4], [-1e4]])
    hidden = torch.ones(1, 1, requires_grad=True)
    logprobs, entropy = linear_head_logprobs(hidden, weight, None, torch.tensor([1]), entropy="grad")
    assert logprobs.item() == -2e4 and entropy is not None and entropy.item() == 0
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all()


def test_head_memory_does_not_grow_with_tokens_times_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_head, "MAX_LOGITS", 1000)
    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    head = nn.Linear(4, 100, bias=False)
    hidden = torch.randn(300, 4, requires_grad=True)
    with Largest():
        outputs = logprobs_from_hidden(hidden, head, torch.zeros(300, dtype=torch.int64), entropy="metric")
        outputs.logprobs.sum().backward()
    assert largest <= 1200  # hidden has 1200 elements; tokens x vocabulary would be 30000
