from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envgrad.errors import ConfigurationError
from envgrad.scaling.costs import Costs, SamplerCosts, StorageCosts, TrainerCosts

COSTS = SamplerCosts(step=0.01, row=1e-4, context=1e-6, prefill=2e-5, prefill_step=0.003)


def test_a_step_in_seconds() -> None:
    assert COSTS.seconds(rows=10, context=1000) == pytest.approx(0.01 + 0.001 + 0.001)
    assert COSTS.seconds(rows=1, context=0, prefill=100) == pytest.approx(0.01 + 1e-4 + 0.003 + 0.002)
    by_step = sum(COSTS.seconds(rows=4, context=100 + 4 * number) for number in range(7))
    assert COSTS.run(steps=7, rows=4, context=100) == pytest.approx(by_step)


@given(st.integers(1, 300), st.integers(1, 200), st.floats(0, 1e6))
def test_the_number_of_steps_is_the_first_that_is_long_enough(steps: int, rows: int, context: float) -> None:
    whole = COSTS.run(steps=steps, rows=rows, context=context)
    assert COSTS.steps_within(whole, rows=rows, context=context) == steps
    more = COSTS.seconds(rows=rows, context=context) * 0.1
    assert COSTS.steps_within(whole + more, rows=rows, context=context) == steps + 1


def test_training_is_a_sum() -> None:
    costs = TrainerCosts(step=1.0, episode=0.1, token=0.01, pair=0.001)
    assert costs.seconds(episodes=2, tokens=3, pairs=4) == pytest.approx(1.234)


def test_json_and_back() -> None:
    costs = Costs(sampler=COSTS, trainer=TrainerCosts(token=1.0), storage=StorageCosts(log_rate=math.inf), local=True)
    data = costs.as_dict()
    assert data["storage"]["log_rate"] is None
    assert Costs.from_dict(data) == costs


def test_a_file_of_something_else() -> None:
    with pytest.raises(ConfigurationError, match="no costs of a plan"):
        Costs.from_dict({"sampler": {"speed": 3}})
    with pytest.raises(ConfigurationError, match="no costs of a plan"):
        Costs.from_dict({})
