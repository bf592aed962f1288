from __future__ import annotations

from statistics import fmean, pstdev

import pytest

from envgrad.errors import ConfigurationError
from envgrad.scaling.workload import Draw, Workload


def load(**changes: object) -> Workload:
    given: dict[str, object] = {
        "groups": 3, "siblings": 4, "turns": Draw(mean=2), "prompt_tokens": 10, "turn_tokens": Draw(mean=5),
        "result_tokens": 3,
    }  # fmt: skip
    return Workload(**(given | changes))  # type: ignore[arg-type]


def test_draws_have_their_mean_and_variation() -> None:
    drawn = [Draw(mean=4.0, cv=0.5).at("x", number) for number in range(20_000)]
    assert fmean(drawn) == pytest.approx(4.0, rel=0.02)
    assert pstdev(drawn) == pytest.approx(2.0, rel=0.05)


def test_a_step_in_numbers() -> None:
    one = load(asynchronous=True, max_staleness=2)
    assert (one.episodes, one.in_flight, one.row_tokens, one.sampled_tokens) == (12, 36, 23, 120)
    assert load(asynchronous=True, max_staleness=2, concurrency=11).in_flight == 8  # whole groups
    assert one.row_length((5, 7, 9)) == 10 + 21 + 6


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"groups": 0}, "groups=0"),
        ({"turns": Draw(mean=0.5)}, "turns=0.5"),
        ({"concurrency": 3}, "concurrency=3"),
        ({"asynchronous": True, "max_staleness": 0}, "max_staleness"),
        ({"result_tokens": -1}, "result_tokens=-1"),
    ],
)
def test_what_cannot_be_is_named(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        load(**changes)


def test_a_negative_mean() -> None:
    with pytest.raises(ConfigurationError, match="at least 0"):
        Draw(mean=-1.0)
