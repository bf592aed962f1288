from __future__ import annotations

import pytest

from envgrad.sampling.requests import SamplerStats
from envgrad.sampling.turnaround import Turnaround


def test_averages_decide_who_is_expected() -> None:
    turnaround = Turnaround()
    for step in range(200):
        turnaround.left("a", float(step))
        turnaround.heard("request", "a", step + 0.25)
    assert turnaround.patience == pytest.approx(0.5, rel=1e-3)
    turnaround.left("a", 1000.0)
    turnaround.left("b", 1000.2)
    # a step is taken for 5 ms: nobody is due yet, then a, then nobody, then b
    assert turnaround.expected(1000.2) == {}
    assert turnaround.expected(1000.246) == {"a": pytest.approx(1000.255, abs=1e-3)}
    assert turnaround.expected(1000.26) == {}
    assert turnaround.expected(1000.453) == {"b": pytest.approx(1000.455, abs=1e-3)}
    turnaround.heard("end", "b", 1000.453)
    assert turnaround.outside.keys() == {"a"}
    # the time until a first request is its own average
    turnaround.heard("begin", "c", 1000.6)
    assert turnaround.expected(1000.6) == {"c": pytest.approx(1000.602)}
    assert "c" not in turnaround.expected(1000.7)


def test_waiting_is_worth_a_step_per_request_that_comes_back() -> None:
    turnaround = Turnaround()
    stats = SamplerStats()
    for _ in range(200):
        stats.steps += 1
        stats.decode_seconds += 0.01
        turnaround.stepped(stats)
    expected = {"a": 50.0, "b": 60.0}
    # 2 come back, 4 are held up: half a step; nobody is held up by an empty engine
    assert turnaround.worth(expected, 4, 0.0) == pytest.approx(0.005, rel=1e-2)
    assert turnaround.worth(expected, 0, 0.0) == pytest.approx(0.02, rel=1e-2)
    assert turnaround.worth({"a": 0.001}, 1, 0.0) == 0.001
