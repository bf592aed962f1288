"""The simulated pipeline: times that can be computed by hand, and what must hold for every workload."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envgrad.errors import ConfigurationError
from envgrad.scaling.costs import Costs, LoopCosts, SamplerCosts, StorageCosts, TrainerCosts
from envgrad.scaling.simulation import simulate
from envgrad.scaling.workload import Draw, Workload

pytest.importorskip("simpy")

SIMPLE = Costs(sampler=SamplerCosts(step=0.1), trainer=TrainerCosts(step=2.0))


def load(**changes: Any) -> Workload:
    given: dict[str, Any] = {
        "groups": 2, "siblings": 2, "turns": Draw(mean=2), "prompt_tokens": 10, "turn_tokens": Draw(mean=5),
        "latency": Draw(mean=1.0),
    }  # fmt: skip
    return Workload(**(given | changes))


@st.composite
def loads(draw: st.DrawFn) -> Workload:
    siblings, spread, ahead = draw(st.integers(1, 4)), draw(st.sampled_from([0.0, 0.6])), draw(st.integers(0, 3))
    at_once = draw(st.none() | st.integers(1, 4))
    return load(
        groups=draw(st.integers(1, 6)),
        siblings=siblings,
        turns=Draw(mean=draw(st.integers(1, 4)), cv=spread / 2),
        turn_tokens=Draw(mean=draw(st.integers(1, 30)), cv=spread),
        latency=Draw(mean=draw(st.sampled_from([0.0, 0.5, 5.0])), cv=spread),
        result_tokens=6,
        asynchronous=ahead > 0,
        max_staleness=max(1, ahead),
        concurrency=None if at_once is None else at_once * siblings,
    )


@st.composite
def costs(draw: st.DrawFn) -> Costs:
    step, loop = draw(st.sampled_from([0.002, 0.05])), draw(st.sampled_from([0.0, 0.003]))
    beside = draw(st.sampled_from([1.0, 1.5]))
    rows = draw(st.sampled_from([2, 1000]))
    return Costs(
        sampler=SamplerCosts(step=step, row=step / 50, context=step / 1e5, prefill=step / 100, max_rows=rows),
        trainer=TrainerCosts(step=0.1, token=draw(st.sampled_from([1e-4, 1e-2]))),
        loop=LoopCosts(turn=loop, episode=loop),
        storage=StorageCosts(
            publish=draw(st.sampled_from([0.0, 1.0])), checkpoint=1.0, checkpoint_every=3, log_rate=1e5
        ),
        replicas=draw(st.integers(1, 3)),
        local=draw(st.booleans()),
        sampler_beside=beside,
        trainer_beside=beside,
    )


def test_a_synchronous_step_is_its_parts_one_after_the_other() -> None:
    costs = replace(SIMPLE, storage=StorageCosts(publish=0.25, checkpoint=6.0, checkpoint_every=2))
    found = simulate(load(), costs, steps=4)
    # ten tokens at 0.1 s, two calls of 1 s, 2 s of training, the publish, and half a checkpoint
    assert found.seconds == pytest.approx(1.0 + 2.0 + 2.0 + 0.25 + 3.0)
    assert found.mean("waiting") == pytest.approx(3.0)
    assert found.environment_seconds == pytest.approx(8.0)
    assert found.trainer_busy == pytest.approx(2.0 / 8.25)
    assert found.rows == pytest.approx(4.0)


def test_waves_where_not_all_groups_fit() -> None:
    found = simulate(load(groups=3, concurrency=2), SIMPLE, steps=2)
    assert found.seconds == pytest.approx(3 * 3.0 + 2.0)


def test_asynchronous_steps_overlap() -> None:
    # an episode takes 3 s and training 2 s: with two rounds in flight (2 + 3) / 2, with three as long as training
    assert simulate(load(asynchronous=True), SIMPLE, steps=8).seconds == pytest.approx(2.5, rel=0.01)
    found = simulate(load(asynchronous=True, max_staleness=2), SIMPLE, steps=9)
    assert found.seconds == pytest.approx(2.0, rel=0.05)
    assert found.trainer_busy == pytest.approx(1.0, rel=0.05)


def test_a_checkpoint_beside_training_costs_nothing_until_the_next_one() -> None:
    storage = StorageCosts(checkpoint=8.0, checkpoint_every=2, checkpoint_blocks=False)
    assert simulate(load(), replace(SIMPLE, storage=storage), steps=4).seconds == pytest.approx(5.0)
    slow = replace(storage, checkpoint=14.0)  # longer than the two steps between two of them
    assert simulate(load(), replace(SIMPLE, storage=slow), steps=4, warm_up=4).seconds == pytest.approx(7.0)


def test_a_slow_log_holds_the_trainer_up_when_its_queue_is_full() -> None:
    # a round's rows have 4 x 20 tokens; at 4 bytes a token and 40 bytes a second that is 8 s a step
    storage = StorageCosts(log_bytes_per_token=4.0, log_rate=40.0, log_rounds=2)
    found = simulate(load(), replace(SIMPLE, storage=storage), steps=4, warm_up=12)
    assert found.seconds == pytest.approx(8.0)
    assert found.log_busy == pytest.approx(1.0)
    assert found.log_bytes == pytest.approx(4 * 20 * 4.0)
    soon = simulate(load(), replace(SIMPLE, storage=storage), steps=1, warm_up=0)
    assert soon.seconds == pytest.approx(5.0)  # nobody waits while there is room


def test_the_loop_is_one_thread() -> None:
    found = simulate(load(latency=Draw(mean=0.0)), replace(SIMPLE, loop=LoopCosts(turn=0.5)), steps=2)
    # four episodes of two turns come to it at once: each waits for those before it
    assert found.loop_busy * found.seconds == pytest.approx(4.0)
    assert found.seconds >= 2.0 + 1.0 + 4.0 - 0.5


@settings(max_examples=50, deadline=None)
@given(loads(), costs(), st.integers(1, 5))
def test_every_task_is_trained_once_or_counted(load: Workload, costs: Costs, steps: int) -> None:
    found = simulate(load, costs, steps=steps)
    made = load.rounds_in_flight + 1 + steps + (load.rounds_in_flight if load.asynchronous else 0)
    assert found.tasks["trained"] == made * load.groups
    assert found.tasks["stale"] == 0  # the buffer's bound acts where groups start
    assert found.tasks["unfinished"] == 0  # no group starts for a round behind the last one
    assert all(one.staleness <= (load.max_staleness if load.asynchronous else 0) for one in found.steps)
    assert all(one.buffered + one.playing <= load.rounds_in_flight * load.groups for one in found.steps)
    parts = ("waiting", "training", "publish", "checkpoint", "log")
    for one in found.steps:
        assert math.fsum(getattr(one, name) for name in parts) == pytest.approx(one.seconds)
    shares = (found.trainer_busy, found.sampler_busy, found.loop_busy, found.log_busy)
    assert all(-1e-9 <= share <= 1 + 1e-9 for share in shares)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(loads(), costs())
def test_slower_parts_make_no_quicker_steps(load: Workload, costs: Costs) -> None:
    """Beyond noise: who meets whom in the sampler changes, and with it how many rows share a step."""
    steps = 4 * load.rounds_in_flight
    found = simulate(load, costs, steps=steps).seconds
    slower = (
        replace(costs, trainer=replace(costs.trainer, step=costs.trainer.step + 0.5)),
        replace(costs, storage=replace(costs.storage, publish=costs.storage.publish + 0.5)),
    )
    for one in slower:
        assert simulate(load, one, steps=steps).seconds >= found * 0.9
    waiting = replace(load, latency=Draw(mean=load.latency.mean * 1.5 + 0.5, cv=load.latency.cv))
    assert simulate(waiting, costs, steps=steps).seconds >= found * 0.9


@settings(max_examples=30, deadline=None, derandomize=True)
@given(loads(), costs())
def test_more_environments_at_once_are_not_slower(load: Workload, costs: Costs) -> None:
    """Beyond noise, as above."""
    steps = 4 * load.rounds_in_flight
    few = simulate(replace(load, concurrency=load.siblings), costs, steps=steps).seconds
    many = simulate(replace(load, concurrency=None), costs, steps=steps).seconds
    assert many <= few * 1.1


def test_the_same_is_simulated_twice() -> None:
    one = load(turn_tokens=Draw(mean=9, cv=1.0), latency=Draw(mean=0.3, cv=1.0), asynchronous=True)
    assert simulate(one, SIMPLE, steps=3) == simulate(one, SIMPLE, steps=3)


def test_a_number_of_steps() -> None:
    with pytest.raises(ConfigurationError, match="steps=0"):
        simulate(load(), SIMPLE, steps=0)


def test_without_simpy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "simpy", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'envgrad\[plan\]'"):
        simulate(load(), SIMPLE, steps=1)
