from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from envgrad.errors import ConfigurationError
from envgrad.scaling.hardware import Reached, accelerator
from envgrad.scaling.plan import Plan, best_plan, make_plan
from envgrad.scaling.roofline import Machines
from envgrad.scaling.shapes import SHAPES
from envgrad.scaling.workload import Draw, Workload

LOAD = Workload(
    groups=32, siblings=8, turns=Draw(mean=4), prompt_tokens=500, turn_tokens=Draw(mean=200), result_tokens=100,
    latency=Draw(mean=2.0),
)  # fmt: skip


def plan(size: str = "8B", load: Workload = LOAD, gpus: int = 16, trainers: int = 8, **more: Any) -> Plan:
    machines = Machines(gpu=accelerator("h100"), gpus=gpus, trainers=trainers, reached=Reached(), **more)
    return make_plan(SHAPES[size], load, machines)


def test_training_takes_its_operations_at_the_rate_that_is_assumed() -> None:
    found = plan()
    shape, cost = SHAPES["8B"], SHAPES["8B"].cost
    tokens = 32 * 500 + 256 * (1600 - 500)
    pairs = 32 * 500 * 501 / 2 + 256 * (1599 * 1600 - 500 * 501) / 2
    work = 6 * shape.body * tokens + 6 * shape.head_weights * 256 * 800 + 3 * cost.attention * pairs
    optimizer = 28 * shape.parameters / (8 * 3.35e12 * 0.6)
    assert not found.checkpointing
    assert found.step.training == pytest.approx(work / (8 * 989e12 * 0.4) + optimizer, rel=0.01)


def test_a_decoding_step_reads_the_weights_and_the_keys_and_values() -> None:
    costs = plan().costs.sampler
    shape = SHAPES["8B"]
    assert costs.step == pytest.approx(0.004 + 2 * (shape.body + shape.head_weights) / (3.35e12 * 0.6))
    assert costs.context == pytest.approx(shape.kv_bytes(2) / (3.35e12 * 0.6))


def test_more_of_anything_is_not_slower() -> None:
    step = plan().step
    assert plan(trainers=12, gpus=20).step.training < step.training
    assert plan(gpus=32).step.rollout < step.rollout
    assert plan(load=replace(LOAD, latency=Draw(mean=20.0))).step.seconds > step.seconds
    assert plan("14B").step.seconds > step.seconds
    assert plan(load=replace(LOAD, asynchronous=True)).step.seconds < step.seconds


def test_the_best_split_is_the_quickest_of_all() -> None:
    for load in (LOAD, replace(LOAD, asynchronous=True)):
        every = [plan(load=load, trainers=trainers) for trainers in range(3, 16)]
        best = best_plan(lambda trainers, load=load: plan(load=load, trainers=trainers), 16)
        assert best.step.seconds <= 1.002 * min(one.step.seconds for one in every)


def test_what_does_not_fit_says_what_would() -> None:
    with pytest.raises(ConfigurationError, match="--trainer-gpus"):
        plan(trainers=1)
    with pytest.raises(ConfigurationError, match="--trainer-gpus 16 leaves none"):
        plan(trainers=16)
    with pytest.raises(ConfigurationError, match="give more --gpus"):
        best_plan(lambda trainers: plan("70B", trainers=trainers, gpus=2), 2)


def test_one_device_trains_and_samples_in_turn() -> None:
    found = plan("0.6B", gpus=1, trainers=1)
    assert found.costs.replicas == 1 and found.costs.storage.publish == 0.0
    beside = plan("0.6B", load=replace(LOAD, asynchronous=True), gpus=1, trainers=1)
    assert beside.costs.sampler_beside == beside.costs.trainer_beside == 2.0
    # in turn, activations make room for keys and values, and the weights are the trainer's own
    assert (found.sampler.weights, beside.sampler.weights) == (0.0, 2.0 * SHAPES["0.6B"].parameters)
    less = beside.trainer.total(checkpointing=False) - beside.trainer.held + beside.sampler.weights
    assert found.sampler.kv_room - beside.sampler.kv_room == pytest.approx(less)


def test_every_part_is_listed_with_its_end() -> None:
    found = plan(load=replace(LOAD, asynchronous=True)).saturation
    named = {"trainer", "samplers", "environments", "keys and values", "episode loop", "weight publish", "checkpoint"}
    assert {one.part for one in found} == named | {"buffer", "episode log"}
    assert [one.share for one in found] == sorted((one.share for one in found), reverse=True)
    assert "buffer" not in {one.part for one in plan().saturation}
    tenfold = {one.part: one.share for one in plan(load=replace(LOAD, groups=320)).saturation}
    once = {one.part: one.share for one in plan().saturation}
    assert tenfold["keys and values"] == pytest.approx(10 * once["keys and values"])


def test_the_price_of_a_step() -> None:
    found = plan()
    assert found.price(3.0) == pytest.approx(3.0 * 16 * found.step.seconds / 3600)
    with pytest.raises(ConfigurationError, match="price-per-hour"):
        found.price(-1.0)


def test_without_a_log_nothing_is_written() -> None:
    assert plan(log_episodes=False).step.log_bytes == 0 < plan().step.log_bytes


def test_json(tmp_path: object) -> None:
    data = json.loads(json.dumps(plan().as_dict(), allow_nan=False))
    assert data["memory"]["trainer"]["total"] < 80e9 and data["replicas"] == 8
    assert data["costs"]["sources"]["trainer"].startswith("not measured")


def test_the_simulation_of_a_plan_is_near_it() -> None:
    pytest.importorskip("simpy")
    for load in (LOAD, replace(LOAD, asynchronous=True)):
        found = plan(load=replace(load, turn_tokens=Draw(mean=200, cv=0.5)))
        assert found.simulate(steps=2).seconds == pytest.approx(found.step.seconds, rel=0.25)
