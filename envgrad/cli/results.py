"""The end of a run: the reward plot, where things lie, and the next command."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from envgrad.cli.figures import RunFigures
from envgrad.cli.plot import PLOT_EXTRA, can_draw_png, save_png, text_plot

if TYPE_CHECKING:
    from envgrad.training.trainer import RolloutTrainer


def fresh_folder(folder: Path) -> Path:
    """``folder`` if nothing is in it, else the first of ``folder-2``, ``folder-3``, ... that is free.

    Example:
        >>> import tempfile
        >>> taken = Path(tempfile.mkdtemp()) / "demo"
        >>> (taken / "episodes").mkdir(parents=True)
        >>> fresh_folder(taken).name
        'demo-2'
    """
    candidate, number = folder, 1
    while candidate.exists() and (not candidate.is_dir() or any(candidate.iterdir())):
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate


def show_plot(
    console: Console,
    figures: RunFigures,
    path: Path,
    *,
    title: str,
    references: Mapping[str, float] | None = None,
) -> dict[str, Path]:
    """Draw the rewards in the terminal and as a PNG; without matplotlib, say which extra brings it.

    Returns:
        The PNG under ``"plot"``, if it was drawn.
    """
    if not figures.rewards:
        return {}
    utf8 = console.encoding.lower().startswith("utf")
    width = max(20, min(console.width - 36, 72))
    console.print()
    console.print(Text(f"{title}: mean reward of each round", style="bold"))
    plot = text_plot(figures.rewards, width=width, references=references, braille=utf8)
    console.print(Text(plot), soft_wrap=True)
    if not can_draw_png():
        console.print(Text(PLOT_EXTRA, style="yellow"))
        return {}
    save_png(path, figures.rewards, title=title, by_environment=figures.by_environment, references=references)
    return {"plot": path}


def save_results(trainer: RolloutTrainer, folder: Path) -> dict[str, Path]:
    """Save the final model and the log; name what lies where."""
    trainer.save_model(str(folder / "model"))
    trainer.save_state()
    places = {"model": folder / "model", "log": folder / "trainer_state.json"}
    if trainer.episode_log is not None:
        places["episodes"] = trainer.episode_log.folder
    return places


def show_places(console: Console, places: Mapping[str, Path]) -> None:
    """A line for each thing that was written."""
    grid = Table.grid(padding=(0, 2))
    for name, path in places.items():
        # Folding, so that a long path can be copied whole.
        grid.add_row(Text(name, style="bold"), Text(str(path), overflow="fold"))
    console.print()
    console.print(grid)


def show_view(console: Console, folder: Path, places: Mapping[str, Path]) -> None:
    """The command that shows a run's episodes, if it has some."""
    if "episodes" in places:
        show_next(console, ["view", str(folder)], why="To look at its episodes in the browser")


def show_next(console: Console, words: Sequence[str], *, why: str) -> None:
    """A command to try next, ready to be copied: on one line whatever the terminal's width."""
    program = ["envgrad"] if Path(sys.argv[0]).name == "envgrad" else ["python", "-m", "envgrad"]
    console.print()
    console.print(Text(f"{why}:", style="bold"))
    console.print(Text(f"  {shlex.join([*program, *words])}", style="cyan"), soft_wrap=True)
