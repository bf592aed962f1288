from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envgrad.cli.text import ASCII_BARS, BLOCKS, buckets, clock, figure, printable, shorten, sparkline


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("\x1b[2J\x1b[Hgone", "gone"),
        ("\x1b]0;new title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x9b31mred", "red"),
        ("over\rwritten\x08", "overwritten"),
        ("a\u202eb\u2066c\u200bd\ufeff", "abcd"),
        ("line\r\nline\ttab", "line\nline tab"),
        ("\ud800", ""),
        ("[bold]kept[/bold]", "[bold]kept[/bold]"),
    ],
)
def test_hostile_text_is_made_inert(hostile: str, shown: str) -> None:
    assert printable(hostile) == shown


@given(st.text())
def test_no_control_character_is_left(text: str) -> None:
    shown = printable(text)
    assert not [c for c in shown if unicodedata.category(c) in ("Cc", "Cs") and c != "\n"]
    assert printable(shown) == shown


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=200), st.integers(1, 50))
def test_buckets_cover_every_value_once(values: list[float], count: int) -> None:
    found = buckets(values, count)
    assert len(found) == min(len(values), count)
    assert min(values) - 1e-9 <= min(found)
    assert max(found) <= max(values) + 1e-9
    if len(values) % count == 0:
        assert sum(found) / len(found) == pytest.approx(sum(values) / len(values), abs=1e-9)


def test_sparkline_goes_from_least_to_greatest() -> None:
    assert sparkline([1.0, 2.0, float("nan"), 8.0], bars=BLOCKS) == BLOCKS[0] + BLOCKS[1] + BLOCKS[7]
    assert sparkline([3.0, 3.0], bars=ASCII_BARS) == "__"
    assert len(sparkline([float(value) for value in range(1000)], 30)) == 30


def test_numbers_and_lengths_read_well() -> None:
    assert shorten("x" * 10, 4) == "xxxx ... (+6 characters)"
    assert clock(59.9) == "0:59"
    assert figure(float("nan")) == "nan"
