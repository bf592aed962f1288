"""``RichProgressCallback``: progress and the last metrics in one live panel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class RichProgressCallback(TrainerCallback):
    """Shows a progress bar and, below it, the metrics of the last log, by the part of their name before the slash.

    Example:
        >>> GRPOTrainer(..., callbacks=[RichProgressCallback()])  # doctest: +SKIP
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._live: Live | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        console = self._console or Console()
        self._progress = Progress(console=console)
        self._progress.add_task("Training", total=state.max_steps, completed=state.global_step)
        self._live = Live(self._panel(Text("Nothing logged yet.")), console=console)
        self._live.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, object] | None = None,
        **kwargs: Any,
    ) -> None:
        if self._live is not None and logs:
            tables = Columns(metric_tables(logs), expand=True)
            self._live.update(self._panel(Panel(tables, title=f"Step {state.global_step}", border_style="green")))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._live is not None:
            self._live.stop()
        self._live = self._progress = None

    def _panel(self, below: RenderableType) -> Panel:
        return Panel(Group(self._progress or "", below))


def metric_tables(logs: Mapping[str, object]) -> list[Panel]:
    """A table for each first part of the names."""
    groups: dict[str, dict[str, object]] = defaultdict(dict)
    for name, value in logs.items():
        group, slash, rest = name.partition("/")
        groups[group if slash else ""][rest if slash else name] = value
    tables = []
    for group, metrics in groups.items():
        table = Table(box=None, show_header=False, title=Text(group, style="bold blue") if group else None)
        table.add_column(no_wrap=True)
        table.add_column(justify="right")
        for name, value in metrics.items():
            table.add_row(Text(name), f"{value:.3f}" if isinstance(value, (int, float)) else Text(str(value)))
        tables.append(Panel(table, border_style="cyan"))
    return tables
