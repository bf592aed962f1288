"""The progress and the figures of an evaluation, live in a terminal, else as plain lines."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from envgrad.cli.text import clock, figure, printable
from envgrad.evaluation.cost import Cost
from envgrad.evaluation.estimates import Estimate
from envgrad.evaluation.summary import EvaluationSummary
from envgrad.types import Group

LINES = 10
"""plain lines in an evaluation, about"""


class EvalDisplay:
    """Counts groups as they end; a context manager, so that the terminal is given back on every way out.

    Example:
        >>> from envgrad.types import Task
        >>> group = Group(task=Task(position=0, split="eval", environment="e", group_id=1, seed=2), episodes=())
        >>> with EvalDisplay("starter on e", tasks=1, console=Console(width=60), live=False) as display:
        ...     display.add(group)
        1 of 1 tasks  reward -  0:00 left
    """

    def __init__(self, title: str, *, tasks: int, console: Console, live: bool) -> None:
        self._console = console
        self._tasks = tasks
        self._done = 0
        self._failed = 0
        self._rewards: list[float] = []
        self._began = time.monotonic()
        self._progress: Progress | None = None
        self._bar: TaskID | None = None
        if live:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
            )
            self._progress = Progress(*columns, console=console)
            self._bar = self._progress.add_task(printable(title), total=tasks, figures="")

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def add(self, group: Group) -> None:
        """One task's episodes have ended."""
        self._done += 1
        self._failed += len(group.failures)
        self._rewards += [episode.reward for episode in group.episodes if episode.reward is not None]
        if self._progress is not None and self._bar is not None:
            self._progress.update(self._bar, completed=self._done, figures=self._figures())
        elif self._done * LINES // self._tasks > (self._done - 1) * LINES // self._tasks:
            taken = time.monotonic() - self._began
            left = taken / self._done * (self._tasks - self._done)
            line = f"{self._done} of {self._tasks} tasks  {self._figures()}  {clock(left)} left"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _figures(self) -> str:
        reward = f"{math.fsum(self._rewards) / len(self._rewards):.3f}" if self._rewards else "-"
        return f"reward {reward}" + (f"  {self._failed} episodes failed" if self._failed else "")


def show_summary(console: Console, summary: EvaluationSummary, cost: Cost, *, success_reward: float) -> None:
    """The figures as a table: a column for all, and one for each environment if there are several."""
    columns = {"all": summary, **summary.environments} if summary.environments else {"": summary}
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), show_header=bool(summary.environments))
    table.add_column("", no_wrap=True)
    for name in columns:
        table.add_column(Text(printable(name)), justify="right", no_wrap=True)
    shown = list(columns.values())
    _row(table, "reward, with its 95% interval", (_estimate(one.reward) for one in shown), style="bold")
    for k in summary.pass_at:
        _row(table, f"pass@{k}", (_estimate(one.pass_at.get(k)) for one in shown))
    _row(table, "tasks", (_tasks(one) for one in shown))
    _row(table, "episodes", (figure_count(one.episodes) for one in shown))
    for reason in summary.stop_reasons:
        _row(table, f"  ended by {reason}", (f"{one.stop_reasons.get(reason, 0.0):.1%}" for one in shown))
    for kind in summary.failures:
        counts = (figure_count(one.failures.get(kind, 0)) for one in shown)
        _row(table, f"  failed: {kind}", counts, style="red")
    if summary.unscored_episodes:
        _row(table, "  without a reward", (figure_count(one.unscored_episodes) for one in shown), style="red")
    _row(table, "turns per episode", (figure(one.turns) for one in shown))
    _row(table, "tokens per episode", (figure(one.completion_length) for one in shown))
    console.print()
    console.print(table)
    console.print()
    console.print(Text(cost_line(cost)), soft_wrap=True)
    notes = (
        f"A success is a reward of at least {success_reward:g}. Intervals count tasks, not samples: those of one task "
        "are alike."
    )
    console.print(Text(notes, style="dim"))


def cost_line(cost: Cost) -> str:
    """Tokens, seconds and price in one line.

    Example:
        >>> from envgrad.evaluation.cost import Prices
        >>> cost_line(Cost(tokens_in=1500, tokens_out=20, seconds=4.0, prices=Prices(per_million_in=2.0)))
        '1,500 tokens in, 20 tokens out, 4.00 seconds, price 0.003'
    """
    parts = [f"{cost.tokens_in:,} tokens in", f"{cost.tokens_out:,} tokens out", f"{figure(cost.seconds)} seconds"]
    if cost.estimated:
        parts[1] += " (partly estimated: the server does not count)"
    if cost.requests is not None:
        parts.append(f"{cost.requests:,} requests" + (f" and {cost.retries} repeats" if cost.retries else ""))
    if cost.price is not None:
        parts.append(f"price {cost.price:.4g}")
    return ", ".join(parts)


def figure_count(value: int) -> str:
    return f"{value:,}"


def _row(table: Table, name: str, cells: Iterable[str], *, style: str = "") -> None:
    table.add_row(Text(name, style=style), *(Text(cell, style=style) for cell in cells))


def _estimate(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    if math.isnan(estimate.ci95):
        return f"{estimate.mean:.3f}"
    # A width of 0 would look like certainty.
    return f"{estimate.mean:.3f} " + (f"+- {estimate.ci95:.3f}" if estimate.ci95 else "(all tasks alike)")


def _tasks(summary: EvaluationSummary) -> str:
    unscored = f" ({summary.unscored_tasks:,} without a score)" if summary.unscored_tasks else ""
    return f"{summary.tasks:,}{unscored}"
