from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envgrad.cli.plot import can_draw_png, save_png, text_plot, value_range


def test_a_rising_line_rises() -> None:
    plot = text_plot([0.0, 0.25, 0.5, 0.75, 1.0], width=5, height=5, braille=False).splitlines()
    assert plot == [
        "1.00 |    *",
        "     |   *",
        "     |  *",
        "     | *",
        "0.00 |*",
        "     +-----",
        "      1   5",
    ]


def test_references_are_drawn_and_named() -> None:
    plot = text_plot([1.0, 1.0], width=8, height=5, references={"random": 0.5}, braille=False).splitlines()
    assert plot[2] == "     |- - - -   random 0.500"
    assert plot[0] == "1.00 |********"


def test_braille_dots_are_where_they_belong() -> None:
    # One character is 2x4 dots: the line goes from the lower left to the upper right one.
    assert text_plot([0.0, 1.0], width=1, height=1).splitlines()[0] == "0.00 |" + chr(
        0x2800 + 0x40 + 0x04 + 0x10 + 0x08
    )


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=80), st.booleans())
def test_any_rewards_can_be_drawn(rewards: list[float], braille: bool) -> None:
    finite = [value for value in rewards if math.isfinite(value)]
    if finite and max(finite) - min(finite) == math.inf:
        return
    lines = text_plot(rewards, width=20, height=4, braille=braille).splitlines()
    assert len(lines) == 6


def test_the_axis_is_0_to_1_for_success_rates_only() -> None:
    assert value_range([0.1, float("nan")], [0.9]) == (0.0, 1.0)
    assert value_range([0.1], [1.5]) == (0.1, 1.5)
    assert value_range([]) == (0.0, 1.0)


def test_png_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "reward.png"
    curves = {"a$b": [0.1, 0.2], "_c": [0.3]}
    save_png(path, [0.1, float("nan")], title="x $ y", by_environment=curves, references={"$": 0.5})
    assert path.read_bytes().startswith(b"\x89PNG")


def test_matplotlib_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not can_draw_png()
