from __future__ import annotations

from pathlib import Path

import pytest

from envgrad.starter import STARTER_PATH
from envgrad.starter.figures import Figures, measure


class Picky:
    """Every call runs into an error; every episode pays a quarter."""

    def reset(self, seed: int) -> str:
        self.calls = 0
        return "Go."

    def guess(self, number: int) -> str:
        """
        Guess.

        Args:
            number: Any.
        """
        self.calls += 1
        raise ValueError("no such number")

    @property
    def done(self) -> bool:
        return self.calls >= 2

    def get_reward(self) -> float:
        return 0.25


def test_calls_that_fail_are_not_well_formed() -> None:
    assert measure(STARTER_PATH, "picky", Picky, tasks=5) == Figures(
        environment="picky", episodes=5, success=0.25, well_formed=0.0
    )


def test_figures_read_as_a_line() -> None:
    figures = Figures(environment="compass", episodes=9, success=0.25, well_formed=1.0)
    assert str(figures) == "compass: success 0.250, well-formed turns 1.000, over 9 episodes"


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none"):
        measure(tmp_path / "none", "picky", Picky, tasks=1)
