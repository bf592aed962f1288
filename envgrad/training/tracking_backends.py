"""What each tracker can show beside metrics, and how it is closed: a class for each of transformers' callbacks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback
from transformers.integrations import INTEGRATION_TO_CALLBACK, TensorBoardCallback, TrackioCallback, WandbCallback
from transformers.integrations.integration_utils import default_logdir

from envgrad.training.tracking_episodes import EpisodeRow, table_columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HParam = bool | int | float | str
GLOBAL_STEP = "train/global_step"
"""the metric that transformers logs beside all others, and that wandb's charts have below them"""


class Tracker:
    """One of transformers' reporting callbacks. This one shows metrics only, and closes by itself."""

    def __init__(self, name: str, callback: Any) -> None:
        self.name = name
        self.callback = callback
        self.failed_calls = 0
        self.shows_episodes = False

    @property
    def is_open(self) -> bool:
        """Whether there is a run to write to."""
        return False

    def prepare(self) -> None:
        """Called once, before the callback's first event."""

    def episodes(self, rows: Sequence[EpisodeRow], step: int) -> None:
        """Show a few episodes of a step."""

    def summary(self, hparams: Mapping[str, HParam], metrics: Mapping[str, float], step: int) -> None:
        """Show how the run was set up and where it ended."""

    def figure(self, figure: Figure, step: int) -> None:
        """Show the reward plot."""

    def end(self, *, failed: bool) -> None:
        """Training or an evaluation is over. ``failed``: by an exception, so the callback has not heard of it."""

    def close(self) -> None:
        """Nothing more will come."""
        self.end(failed=False)


class TensorBoard(Tracker):
    """Episodes as text: Markdown, in which a transcript is a code block, so that nothing in it is markup."""

    def __init__(self, callback: TensorBoardCallback, output_dir: str) -> None:
        super().__init__("tensorboard", callback)
        self.shows_episodes = True
        self._output_dir = output_dir

    @property
    def is_open(self) -> bool:
        return self.callback.tb_writer is not None

    def prepare(self) -> None:
        if self.callback.logging_dir is None:  # an evaluation before training would write where the process runs
            self.callback.logging_dir = os.path.join(self._output_dir, default_logdir())

    def episodes(self, rows: Sequence[EpisodeRow], step: int) -> None:
        self.callback.tb_writer.add_text("train/episodes", "\n\n".join(map(_markdown, rows)), step)
        self.callback.tb_writer.flush()

    def summary(self, hparams: Mapping[str, HParam], metrics: Mapping[str, float], step: int) -> None:
        named = {f"hparam/{name}": value for name, value in metrics.items()}
        self.callback.tb_writer.add_hparams(dict(hparams), named, run_name=".", global_step=step)

    def figure(self, figure: Figure, step: int) -> None:
        self.callback.tb_writer.add_figure("train/reward_plot", figure, step, close=False)
        self.callback.tb_writer.flush()

    def end(self, *, failed: bool) -> None:
        writer, self.callback.tb_writer = self.callback.tb_writer, None
        if writer is not None:
            writer.close()


class Trackio(Tracker):
    """Episodes as a table and, message by message, as traces."""

    def __init__(self, callback: TrackioCallback) -> None:
        super().__init__("trackio", callback)
        self.shows_episodes = True
        self._run_name: str | None = None

    @property
    def _backend(self) -> Any:
        return self.callback._trackio

    @property
    def is_open(self) -> bool:
        return bool(self.callback._initialized) and self._backend.context_vars.current_run.get() is not None

    def prepare(self) -> None:
        setup: Callable[..., None] = self.callback.setup

        def named_setup(args: Any, *rest: Any, **kwargs: Any) -> None:
            """An evaluation after training opens the run again: without a name that would be another run."""
            given = args.run_name
            args.run_name = given or self._run_name
            try:
                setup(args, *rest, **kwargs)
            finally:
                args.run_name = given
            run = self._backend.context_vars.current_run.get()
            self._run_name = None if run is None else run.name

        self.callback.setup = named_setup

    def episodes(self, rows: Sequence[EpisodeRow], step: int) -> None:
        traces = [
            self._backend.Trace(messages=list(row.messages), metadata=row.figures | {"rewards": dict(row.rewards)})
            for row in rows
        ]
        table = self._backend.Table(data=table_columns(rows))
        self._backend.log({"train/episodes": table, "train/traces": traces, GLOBAL_STEP: step})

    def figure(self, figure: Figure, step: int) -> None:
        with _as_png(figure) as path:
            self._backend.log({"train/reward_plot": self._backend.Image(str(path)), GLOBAL_STEP: step})

    def end(self, *, failed: bool) -> None:
        if self.is_open:
            self.callback._initialized = False
            self._backend.finish()


class Wandb(Tracker):
    """Episodes as a table. A run that was there before stays open; ours ends with the trainer, or when training fails.

    After a training that ended well it stays open, as transformers leaves it, so that ``evaluate`` adds to it.
    """

    def __init__(self, callback: WandbCallback) -> None:
        super().__init__("wandb", callback)
        self.shows_episodes = True
        self._own: Any = None

    @property
    def _backend(self) -> Any:
        return self.callback._wandb

    @property
    def is_open(self) -> bool:
        return bool(self.callback._initialized) and self._backend.run is not None

    def prepare(self) -> None:
        setup: Callable[..., None] = self.callback.setup

        def owning_setup(*args: Any, **kwargs: Any) -> None:
            before = self._backend.run
            try:
                setup(*args, **kwargs)
            finally:
                self._own = self._backend.run if before is None else None
                self.callback._initialized = self._backend.run is not None  # else the next training would not try

        self.callback.setup = owning_setup

    def episodes(self, rows: Sequence[EpisodeRow], step: int) -> None:
        records = table_columns(rows)
        columns = list(records[0])
        table = self._backend.Table(columns=columns, data=[[record[name] for name in columns] for record in records])
        self._backend.log({"train/episodes": table, GLOBAL_STEP: step})

    def figure(self, figure: Figure, step: int) -> None:
        with _as_png(figure) as path:
            self._backend.log({"train/reward_plot": self._backend.Image(str(path)), GLOBAL_STEP: step})

    def end(self, *, failed: bool) -> None:
        if failed:
            self._finish(exit_code=1)

    def close(self) -> None:
        self._finish(exit_code=0)

    def _finish(self, *, exit_code: int) -> None:
        own, self._own = self._own, None
        if own is not None and own is self._backend.run:
            self.callback._initialized = False
            own.finish(exit_code=exit_code)


def tracker_of(callback: TrainerCallback, output_dir: str) -> Tracker | None:
    """How a callback is handled; None if it is none of transformers' reporting ones."""
    if isinstance(callback, TensorBoardCallback):
        return TensorBoard(callback, output_dir)
    if isinstance(callback, TrackioCallback):
        return Trackio(callback)
    if isinstance(callback, WandbCallback):
        return Wandb(callback)
    for name, kind in INTEGRATION_TO_CALLBACK.items():
        if isinstance(callback, kind):
            return Tracker(name, callback)
    return None


def _markdown(row: EpisodeRow) -> str:
    figures = ", ".join(f"{name} {_figure(value)}" for name, value in row.figures.items() if name != "step")
    rewards = ", ".join(f"{name} {_figure(value)}" for name, value in row.rewards.items())
    lines = [figures, f"rewards: {rewards}" if rewards else "", "", *row.transcript.splitlines()]
    return "\n".join(f"    {line}" for line in lines)


def _figure(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)


@contextlib.contextmanager
def _as_png(figure: Figure) -> Iterator[Path]:
    """A figure as a file; trackers copy it when it is logged."""
    with TemporaryDirectory(prefix="envgrad-plot-") as folder:
        path = Path(folder) / "reward.png"
        figure.savefig(path, format="png")
        yield path
