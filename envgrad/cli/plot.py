"""The reward plot: in the terminal by text alone, and as a PNG where matplotlib is installed."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from envgrad.cli.text import figure, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT_EXTRA = "no PNG was drawn: matplotlib is not installed; pip install 'envgrad[plot]'"

# A braille cell is 2 dots wide and 4 high; these are the bits of its dots, by row and column.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BRAILLE = 0x2800


def value_range(values: Sequence[float], references: Sequence[float] = ()) -> tuple[float, float]:
    """Lower and upper end of the reward axis: 0 to 1 where everything lies inside, else what is needed.

    Example:
        >>> value_range([0.2, 0.7]), value_range([-1.0, 3.0]), value_range([5.0, 5.0])
        ((0.0, 1.0), (-1.0, 3.0), (4.5, 5.5))
    """
    shown = [value for value in (*values, *references) if math.isfinite(value)]
    if not shown or (min(shown) >= 0 and max(shown) <= 1):
        return 0.0, 1.0
    low, high = min(shown), max(shown)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def text_plot(
    rewards: Sequence[float],
    *,
    width: int = 60,
    height: int = 10,
    references: Mapping[str, float] | None = None,
    braille: bool = True,
) -> str:
    """A line plot of ``rewards`` over steps, ``width`` x ``height`` characters without its axes.

    Args:
        rewards: One value per step; those that are not finite are left out.
        width: Characters of the plotting area.
        height: Lines of the plotting area.
        references: Named levels, drawn as dotted lines and named at the right.
        braille: Draw with braille dots (8 per character); else with ``*`` and ``-``.

    Example:
        >>> print(text_plot([0.0, 0.5, 1.0], width=5, height=3, braille=False))
        1.00 |    *
             |  **
        0.00 |**
             +-----
              1   3
    """
    levels = references or {}
    low, high = value_range(rewards, list(levels.values()))
    canvas = _Canvas(width, height, braille=braille)
    rows: dict[int, list[str]] = {}
    for name, level in levels.items():
        y = _scale(level, low, high, canvas.rows)
        for x in range(0, canvas.columns, 4 if braille else 2):
            canvas.dot(x, y, mark="-")
        rows.setdefault(height - 1 - y * height // canvas.rows, []).append(f"{printable(name)} {figure(level)}")
    _draw(canvas, rewards, low, high)
    labels = {0: f"{high:.2f}", height - 1: f"{low:.2f}"}
    margin = max(len(label) for label in labels.values())
    lines = [
        f"{labels.get(index, ''):>{margin}} |{text}  {', '.join(rows.get(index, []))}".rstrip()
        for index, text in enumerate(canvas.lines())
    ]
    last = str(len(rewards))
    lines.append(f"{'':>{margin}} +{'-' * width}")
    lines.append(f"{'':>{margin}}  {'1':<{width - len(last)}}{last}")
    return "\n".join(lines)


class _Canvas:
    """Dots on a grid of characters; row 0 of the dots is at the bottom."""

    def __init__(self, width: int, height: int, *, braille: bool) -> None:
        self._braille = braille
        self._across, self._down = (2, 4) if braille else (1, 1)
        self.columns, self.rows = width * self._across, height * self._down
        self._bits = [[0] * width for _ in range(height)]
        self._marks = [[" "] * width for _ in range(height)]

    def dot(self, x: int, y: int, *, mark: str = "*") -> None:
        from_top = self.rows - 1 - y
        row, column = from_top // self._down, x // self._across
        self._bits[row][column] |= _DOTS[from_top % 4][x % 2]
        self._marks[row][column] = mark

    def lines(self) -> list[str]:
        if not self._braille:
            return ["".join(row) for row in self._marks]
        return ["".join(chr(_BRAILLE + bits) if bits else " " for bits in row) for row in self._bits]


def _scale(value: float, low: float, high: float, count: int) -> int:
    """The index, of ``count``, at which ``value`` lies between ``low`` and ``high``."""
    return round((value - low) / (high - low) * (count - 1)) if high > low else 0


def _draw(canvas: _Canvas, values: Sequence[float], low: float, high: float) -> None:
    """A line through the finite values, one column of dots at a time."""
    last = max(len(values) - 1, 1)
    points = [
        (_scale(index, 0, last, canvas.columns), _scale(value, low, high, canvas.rows))
        for index, value in enumerate(values)
        if math.isfinite(value)
    ]
    for x, y in points[:1]:
        canvas.dot(x, y)
    for (x0, y0), (x1, y1) in pairwise(points):
        length = max(x1 - x0, abs(y1 - y0), 1)
        for part in range(length + 1):
            canvas.dot(x0 + round((x1 - x0) * part / length), y0 + round((y1 - y0) * part / length))


def can_draw_png() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def save_png(
    path: Path,
    rewards: Sequence[float],
    *,
    title: str,
    by_environment: Mapping[str, Sequence[float]] | None = None,
    references: Mapping[str, float] | None = None,
) -> None:
    """Draw the mean reward of each step as a PNG, without a display.

    Args:
        path: The file; its folder is made.
        rewards: One value per step.
        title: The plot's heading.
        by_environment: Further curves by name, in a run on several environments.
        references: Named levels to hold the curve against.

    Raises:
        ImportError: matplotlib is not installed; ask ``can_draw_png`` first.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    picture = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(picture)
    axes: Axes = picture.add_subplot()
    several = by_environment if by_environment is not None and len(by_environment) > 1 else {}
    # A dollar sign or a leading underscore in a name would be read as math or hide the curve.
    for name, values in several.items():
        steps = range(1, len(values) + 1)
        axes.plot(steps, values, linewidth=1.2, alpha=0.8, label=_label(name))
    axes.plot(
        range(1, len(rewards) + 1), rewards, color="black", linewidth=2, marker="o", markersize=2.5, label="mean reward"
    )
    styles = ("--", ":", "-.")
    for index, (name, level) in enumerate((references or {}).items()):
        axes.axhline(
            level,
            color=f"C{index + 1}",
            linestyle=styles[index % 3],
            linewidth=1.2,
            label=f"{_label(name)} {level:.2f}",
        )
    low, high = value_range(
        [*rewards, *(value for values in several.values() for value in values)], list((references or {}).values())
    )
    margin = 0.03 * (high - low)
    axes.set_ylim(low - margin, high + margin)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("round of rollouts")
    axes.set_ylabel("mean reward")
    axes.set_title(title.replace("$", r"\$"))
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, format="png")


def _label(name: str) -> str:
    return printable(name).replace("$", r"\$").lstrip("_") or "environment"
