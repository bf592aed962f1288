from __future__ import annotations

import math

import pytest

from envgrad.algorithms.entropy_control import EntropyController
from envgrad.errors import ConfigurationError


def test_the_coefficient_rises_while_the_entropy_is_low_and_falls_else() -> None:
    control = EntropyController(coefficient=0.1, target=1.0, delta=0.25, least=0.0, most=0.5)
    assert control.applied == 0.0  # nothing is known before the first step
    found = []
    for entropy in (1.0, 0.5, 0.9, 1.1, 2.0, 2.0):
        control.update(entropy)
        found.append((round(control.coefficient, 9), round(control.applied, 9)))
    # at the target it still rises; capped at 0.5; above the target it falls and is not applied, down to 0
    assert found == [(0.35, 0.35), (0.5, 0.5), (0.5, 0.5), (0.25, 0.0), (0.0, 0.0), (0.0, 0.0)]


def test_its_state_goes_through_a_checkpoint() -> None:
    first = EntropyController(coefficient=0.1, target=1.0, delta=0.25)
    first.update(0.5)
    second = EntropyController(coefficient=0.1, target=1.0, delta=0.25)
    assert second.last_entropy == math.inf
    second.load_state_dict(first.state_dict())
    assert second == first and second.applied == 0.35


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"least": 0.5, "most": 0.2}, "entropy_coef_min=0.5 must be at most entropy_coef_max=0.2"),
        ({"delta": 0.0}, "entropy_coef_delta=0.0 must be above 0"),
        ({"coefficient": 2.0}, "entropy_coef=2.0 must start within"),
        ({"target": 0.0}, "entropy_target=0.0 must be above 0"),
    ],
)
def test_bad_options_are_named(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        EntropyController(**({"coefficient": 0.0, "target": 1.0} | options))
