"""The reward plot of a run, from its log history; drawn where matplotlib is installed."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curve: TypeAlias = list[tuple[int, float]]
"""steps and rewards"""

_REWARD, _EVAL = "reward", "eval_reward"


def reward_curves(history: Sequence[Mapping[str, Any]]) -> dict[str, Curve]:
    """Mean rewards by name: ``reward``, ``eval_reward``, and of several environments each one's.

    Example:
        >>> reward_curves([{"step": 1, "reward": 0.5, "loss": 0.1}, {"step": 1, "eval_reward": 0.75}])
        {'reward': [(1, 0.5)], 'eval_reward': [(1, 0.75)]}
    """
    curves: dict[str, Curve] = {}
    for entry in history:
        for name, value in entry.items():
            own = name in (_REWARD, _EVAL) or name.startswith((f"{_REWARD}/", f"{_EVAL}/"))
            if own and isinstance(value, (int, float)) and math.isfinite(value):
                curves.setdefault(name, []).append((int(entry.get("step", 0)), float(value)))
    return curves


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_rewards(curves: Mapping[str, Curve]) -> Figure:
    """A figure of ``reward_curves``, without a display.

    Raises:
        ImportError: matplotlib is not installed; ask ``can_draw`` first.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    picture = Figure(figsize=(8, 4.5), dpi=100, layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.add_subplot()
    for name, points in curves.items():
        steps, values = zip(*points, strict=True)
        style: dict[str, Any] = {"marker": "o", "markersize": 3, "linestyle": "--" if name.startswith(_EVAL) else "-"}
        if name == _REWARD:
            style |= {"color": "black", "linewidth": 2}
        # A dollar sign would be read as math.
        axes.plot(steps, values, label=name.replace("$", r"\$"), **style)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("mean reward")
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize=8)
    return picture
