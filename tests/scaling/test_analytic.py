"""The equations against hand-computed steps, and against the simulation over random workloads."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import median

import pytest

from envgrad.scaling.analytic import estimate
from envgrad.scaling.costs import Costs, LoopCosts, SamplerCosts, StorageCosts, TrainerCosts
from envgrad.scaling.simulation import simulate
from envgrad.scaling.workload import Draw, Workload

SIMPLE = Costs(sampler=SamplerCosts(step=0.1), trainer=TrainerCosts(step=2.0))
LOAD = Workload(
    groups=2, siblings=2, turns=Draw(mean=2), prompt_tokens=10, turn_tokens=Draw(mean=5), latency=Draw(mean=1.0)
)


def test_a_synchronous_step_is_the_sum_of_its_parts() -> None:
    found = estimate(LOAD, replace(SIMPLE, storage=StorageCosts(publish=0.5, checkpoint=8.0, checkpoint_every=4)))
    assert found.seconds == pytest.approx(3.0 + 2.0 + 0.5 + 2.0)
    assert (found.rollout, found.training, found.publish, found.checkpoint) == pytest.approx((3.0, 2.0, 0.5, 2.0))
    assert found.limit == "trainer"
    assert estimate(LOAD, SIMPLE).limit == "environments"
    assert found.episode.rows == pytest.approx(4 / 3)  # a third of the time is spent at the sampler


def test_an_asynchronous_step_is_the_longest_of_its_parts() -> None:
    beside = replace(LOAD, asynchronous=True)
    assert estimate(beside, SIMPLE).seconds == pytest.approx((2.0 + 3.0) / 2)
    assert estimate(replace(beside, max_staleness=3), SIMPLE).seconds == pytest.approx(2.0)
    assert estimate(replace(beside, max_staleness=3), SIMPLE).limit == "trainer"
    loop = replace(SIMPLE, loop=LoopCosts(turn=2.0))
    assert estimate(beside, loop).limit == "loop"
    assert estimate(beside, loop).seconds == pytest.approx(4 * 2 * 2.0, rel=0.1)


def test_a_slow_log_bounds_the_step() -> None:
    costs = replace(SIMPLE, storage=StorageCosts(log_bytes_per_token=1.0, log_rate=1.0))
    assert estimate(LOAD, costs).seconds == pytest.approx(4 * 20)
    assert estimate(LOAD, costs).limit == "log"


def test_pairs_grow_with_the_spread_of_lengths() -> None:
    costs = replace(SIMPLE, trainer=TrainerCosts(pair=1.0))
    even, uneven = LOAD, replace(LOAD, turn_tokens=Draw(mean=5, cv=0.5))
    prompt, row = 10 * 11 / 2, 19 * 20 / 2
    assert estimate(even, costs).training == pytest.approx(2 * prompt + 4 * (row - prompt))
    # the variance of two answers' sum is 2 x 2.5 ** 2
    assert estimate(uneven, costs).training - estimate(even, costs).training == pytest.approx(4 * 12.5 / 2)


def _random_case(draw: random.Random) -> tuple[Workload, Costs]:
    local, beside, siblings = draw.random() < 0.3, draw.random() < 0.5, draw.choice([4, 8])
    costs = Costs(
        sampler=SamplerCosts(
            step=draw.choice([0.002, 0.01, 0.02]),
            row=draw.choice([1e-5, 1e-4]),
            context=draw.choice([0.0, 1e-8, 1e-7]),
            prefill=draw.choice([1e-6, 2e-5]),
            max_rows=draw.choice([16, 64, 1000]),
        ),
        trainer=TrainerCosts(step=0.02, token=draw.choice([1e-5, 1e-4]), pair=draw.choice([0.0, 1e-9])),
        loop=LoopCosts(turn=draw.choice([0.0, 1e-3]), episode=1e-3),
        storage=StorageCosts(publish=draw.choice([0.0, 0.5])),
        replicas=1 if local else draw.choice([1, 4]),
        local=local,
    )
    load = Workload(
        groups=draw.choice([4, 8, 16]),
        siblings=siblings,
        turns=Draw(mean=draw.choice([1, 3, 6]), cv=draw.choice([0.0, 0.0, 0.3])),
        prompt_tokens=draw.choice([64, 512]),
        turn_tokens=Draw(mean=draw.choice([24, 100]), cv=draw.choice([0.0, 0.5])),
        result_tokens=draw.choice([0, 60]),
        latency=Draw(mean=draw.choice([0.0, 0.2, 2.0]), cv=draw.choice([0.0, 0.5, 1.0])),
        asynchronous=beside,
        max_staleness=draw.choice([1, 2]),
        concurrency=draw.choice([None, None, 4 * siblings]),
    )
    return load, costs


def test_equations_and_simulation_agree_within_the_bound_that_the_page_states() -> None:
    pytest.importorskip("simpy")
    draw, apart = random.Random(1), []
    for _ in range(30):
        load, costs = _random_case(draw)
        simulated = simulate(load, costs, steps=12 if load.asynchronous else 4).seconds
        apart.append(abs(estimate(load, costs).seconds / simulated - 1))
    assert median(apart) < 0.10
    assert sum(one < 0.30 for one in apart) >= 0.9 * len(apart)
    assert max(apart) < 0.60
