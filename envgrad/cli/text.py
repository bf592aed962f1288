"""Text that is safe and short to show: nothing a model or an environment wrote can move the cursor or add markup."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise

# Escape sequences as a whole, so that no "[31m" stays behind: CSI, OSC (titles, links), then any other two bytes.
_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"
    r"|\x9b[0-?]*[ -/]*[@-~]"
    r"|[\x1b]\][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[@-_]"
)
# Control characters; direction overrides and isolates; zero-width and byte-order marks; lone surrogates.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")

BLOCKS = "".join(chr(code) for code in range(0x2581, 0x2589))
"""eight bars of growing height"""
ASCII_BARS = "_.-~=+*#"


def printable(text: str) -> str:
    """``text`` without escape sequences, control and invisible characters; newlines stay, tabs become spaces.

    Example:
        >>> printable("\\x1b[31mred\\x1b[0m\\tand\\x07 plain")
        'red and plain'
    """
    return _HIDDEN.sub("", _ESCAPES.sub("", text.replace("\r\n", "\n")).replace("\t", " "))


def shorten(text: str, limit: int) -> str:
    """At most ``limit`` characters, with the number of those left out.

    Example:
        >>> shorten("abcdefgh", 5), shorten("abc", 5)
        ('abcde ... (+3 characters)', 'abc')
    """
    return text if len(text) <= limit else f"{text[:limit]} ... (+{len(text) - limit} characters)"


def buckets(values: Sequence[float], count: int) -> list[float]:
    """``values`` averaged into at most ``count`` buckets of almost equal size.

    Example:
        >>> buckets([1.0, 3.0, 5.0, 7.0], 2)
        [2.0, 6.0]
    """
    if len(values) <= count:
        return list(values)
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    return [math.fsum(values[start:end]) / (end - start) for start, end in pairwise(edges)]


def sparkline(values: Sequence[float], width: int = 40, *, bars: str = BLOCKS) -> str:
    """A line of bars from the least to the greatest of ``values``; values that are not finite are left out.

    Example:
        >>> sparkline([0.0, 0.5, 1.0], bars="_=#")
        '_=#'
        >>> sparkline([])
        ''
    """
    shown = buckets([value for value in values if math.isfinite(value)], width)
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    if high == low:
        return bars[0] * len(shown)
    top = len(bars) - 1
    return "".join(bars[round((value - low) / (high - low) * top)] for value in shown)


def bars_for(encoding: str) -> str:
    """The bars that a stream of this encoding can show.

    Example:
        >>> bars_for("ascii")
        '_.-~=+*#'
    """
    return BLOCKS if encoding.lower().replace("_", "-").startswith("utf") else ASCII_BARS


def clock(seconds: float) -> str:
    """Minutes and seconds, or hours too.

    Example:
        >>> clock(75.4), clock(3725), clock(float("inf"))
        ('1:15', '1:02:05', '-')
    """
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def figure(value: float) -> str:
    """A rate or count to three digits or so.

    Example:
        >>> figure(0.1234), figure(3.456), figure(312.7), figure(51234.0)
        ('0.123', '3.46', '313', '51,234')
    """
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"
