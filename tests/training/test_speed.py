from __future__ import annotations

import pytest
import torch

from envgrad.errors import ConfigurationError
from envgrad.training.speed import Load, Speed, measure
from helpers.models import tiny_llama

SMALL = Load(rows=9, prompt=6, answer=4, repeats=1)


def test_tokens_are_counted_and_nothing_beats_its_floor() -> None:
    model = tiny_llama()
    before = [one.detach().clone() for one in model.parameters()]
    found = measure(model.eval(), SMALL)
    assert found.parameters == model.num_parameters()
    assert found.decoding.tokens == 9 * 4
    assert found.training.tokens == 8 * 4  # one group of 8 siblings
    for speed in (found.decoding, found.training):
        assert speed.seconds > 0 and speed.floor is not None and 0 < speed.floor < speed.seconds
    assert found.machine.matmul > 1e6 and found.machine.reads > 1e6
    assert not model.training
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert all(one.grad is None for one in model.parameters())


def test_the_floor_is_that_of_the_operations() -> None:
    model = tiny_llama()
    short, long = measure(model, SMALL), measure(model, Load(rows=9, prompt=6, answer=64, repeats=1))
    assert short.training.floor is not None and long.training.floor is not None
    assert long.training.floor * long.machine.matmul > 10 * short.training.floor * short.machine.matmul


def test_rates() -> None:
    speed = Speed(tokens=100, seconds=2.0, floor=0.5)
    assert speed.as_dict() == {
        "tokens": 100, "seconds": 2.0, "tokens_per_second": 50.0, "floor_seconds": 0.5, "floor_share": 0.25,
    }  # fmt: skip
    assert Speed(tokens=1, seconds=1.0, floor=None).share is None


def test_what_cannot_be_measured() -> None:
    with pytest.raises(ConfigurationError, match="the model's context has 512"):
        measure(tiny_llama(), Load(rows=1, prompt=500, answer=20))
    with pytest.raises(ConfigurationError, match="rows=0 must be at least 1"):
        Load(rows=0)
