"""Micro-batches side by side give, bit for bit, what they give one after the other."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from envgrad import GRPOTrainer, custom
from envgrad.logprobs import install_policy_forward
from envgrad.losses import LossOutputs
from envgrad.training import step_passes as trainer_module
from envgrad.training.passes import TrainingThreads, passes_side_by_side, side_by_side_fits
from helpers.models import Letters, config, flat, tiny_llama, tokenizer_of, zoo


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make(folder: Any, **changes: Any) -> GRPOTrainer:
    algorithm = changes.pop("algorithm", None)
    return GRPOTrainer(
        tiny_llama(),
        args=config(folder, max_tokens_per_microbatch=64, per_device_train_batch_size=16, **changes),
        environment_factory=Letters,
        processing_class=tokenizer_of(),
        algorithm=algorithm,
    )


def taken(monkeypatch: pytest.MonkeyPatch, way: str) -> list[int]:
    """How many micro-batches each step had that went this way."""
    found: list[int] = []
    inner = getattr(trainer_module, way)

    def spy(micro_batches: Any, *args: Any) -> Any:
        found.append(len(micro_batches))
        return inner(micro_batches, *args)

    monkeypatch.setattr(trainer_module, way, spy)
    return found


def test_a_run_side_by_side_is_the_run_one_by_one(tmp_path, monkeypatch, two_threads):
    beside = taken(monkeypatch, "passes_side_by_side")
    weights = []
    for threads in (2, 1):
        torch.set_num_threads(threads)
        trainer = make(tmp_path, max_steps=3, deterministic=True)
        trainer.train()
        weights.append(flat(trainer.model))
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert len(losses) == 3
    assert len(beside) == 3 and min(beside) > 1, "several micro-batches a step, side by side in one of the runs"
    assert torch.equal(*weights)


@pytest.mark.parametrize("changes", [{"algorithm": custom(loss=lambda inputs: -inputs.logprobs)}, {"fp16": False}])
def test_a_users_own_loss_is_called_one_by_one(tmp_path, monkeypatch, two_threads, changes):
    beside = taken(monkeypatch, "passes_side_by_side")
    make(tmp_path, max_steps=1, **changes).train()
    assert bool(beside) == ("algorithm" not in changes)


def test_one_thread_runs_one_by_one(tmp_path, monkeypatch):
    beside = taken(monkeypatch, "passes_side_by_side")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        make(tmp_path, max_steps=1).train()
    finally:
        torch.set_num_threads(before)
    assert not beside


class Half:
    """A micro-batch of this test: its loss is ``scale * sum(weight ** 2) / 2``, its gradient ``scale * weight``."""

    def __init__(self, scale: float) -> None:
        self.scale = scale


def loss_of(weight: nn.Parameter, seen: set[str]) -> Any:
    def forward(half: Any) -> LossOutputs:
        seen.add(threading.current_thread().name)
        assert torch.get_num_threads() == 1
        if half.scale < 0:
            raise ValueError("this micro-batch cannot be computed")
        return LossOutputs(loss=half.scale * (weight**2).sum() / 2, metrics={})

    return forward


def test_gradients_are_added_as_each_is_yielded(two_threads):
    weight, unused = nn.Parameter(torch.tensor([2.0, 3.0])), nn.Parameter(torch.ones(1))
    seen: set[str] = set()
    halves: Any = [Half(scale) for scale in (1.0, 2.0, 4.0, 8.0)]
    got = []
    with TrainingThreads() as pool:
        for outputs in passes_side_by_side(halves, loss_of(weight, seen), [weight, unused], pool, 2):
            assert weight.grad is not None
            got.append((outputs.loss.item(), weight.grad.tolist()))
        for _ in passes_side_by_side(halves, loss_of(weight, seen), [weight], pool, 2):
            assert len(threads()) == 2, "the same threads again"
    assert got == [(6.5, [2.0, 3.0]), (13.0, [6.0, 9.0]), (26.0, [14.0, 21.0]), (52.0, [30.0, 45.0])]
    assert unused.grad is None, "as a backward leaves it"
    assert all(name.startswith("envgrad-training") for name in seen)
    assert torch.get_num_threads() == 2 and not threads()


def threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("envgrad-training")]


def test_an_error_comes_in_its_place(two_threads):
    weight = nn.Parameter(torch.tensor([1.0]))
    halves: Any = [Half(scale) for scale in (1.0, -1.0, 4.0, 8.0, 16.0)]
    with TrainingThreads() as pool:
        passes = passes_side_by_side(halves, loss_of(weight, set()), [weight], pool, 2)
        assert next(passes).loss.item() == 0.5
        with pytest.raises(ValueError, match="cannot be computed"):
            next(passes)
    assert weight.grad is not None and weight.grad.tolist() == [1.0]
    assert torch.get_num_threads() == 2 and not threads()


def test_leaving_early_adds_no_more_and_computes_no_more(two_threads):
    weight = nn.Parameter(torch.tensor([1.0]))
    halves: Any = [Half(1.0) for _ in range(9)]
    calls: list[int] = []

    def forward(half: Any) -> LossOutputs:
        calls.append(1)
        return loss_of(weight, set())(half)

    with TrainingThreads() as pool:
        with contextlib.closing(passes_side_by_side(halves, forward, [weight], pool, 2)) as passes:
            next(passes)
        computed = len(calls)
        assert not threads()
        assert weight.grad is not None and weight.grad.tolist() == [1.0] and computed <= 5
    assert len(calls) == computed and not threads()


def with_dropout(model: Any) -> None:
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1


CHANGES = {
    "dropout": with_dropout,
    "a hook on a weight": lambda model: model.lm_head.weight.register_hook(lambda gradient: gradient),
    "a hook behind a gradient": lambda model: model.lm_head.weight.register_post_accumulate_grad_hook(
        lambda weight: None
    ),
    "a hook on a module": lambda model: model.model.layers[0].register_forward_hook(lambda *_: None),
    "activation checkpointing": lambda model: model.gradient_checkpointing_enable(),
    "half precision": lambda model: model.to(torch.bfloat16),
    "nothing to train": lambda model: model.requires_grad_(False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_does_not_run_side_by_side(name):
    model = tiny_llama()
    install_policy_forward(model)
    assert side_by_side_fits(model, model)
    CHANGES[name](model)
    assert not side_by_side_fits(model, model)


def test_only_layers_that_are_known_and_only_unwrapped():
    assert not side_by_side_fits(bloom := zoo("bloom", 64), bloom)
    model = tiny_llama()
    assert not side_by_side_fits(nn.DataParallel(model), model)


def test_large_models_keep_their_cores_busy_by_themselves(monkeypatch):
    model = tiny_llama()
    size = sum(4 * one.numel() for one in model.parameters())
    monkeypatch.setattr("envgrad.cores.SMALL_BYTES", size)
    assert side_by_side_fits(model, model)
    monkeypatch.setattr("envgrad.cores.SMALL_BYTES", size - 1)
    assert not side_by_side_fits(model, model)
