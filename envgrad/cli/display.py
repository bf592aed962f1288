"""``RunDisplay``: a run's progress, live in a terminal, else as plain lines."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from envgrad.cli.figures import RunFigures
from envgrad.cli.text import bars_for, clock, figure, printable, sparkline
from envgrad.cli.transcript import headline, transcript
from envgrad.rollout.runner import Round
from envgrad.training.run_facts import final_figures
from envgrad.types import Episode

SAMPLE_SECONDS = 4.0
"""how long one sample episode stays, so that it can be read"""
_LOGGED = ("loss", "kl", "entropy", "grad_norm", "learning_rate")


class PlaysRounds(Protocol):
    """What the display needs of a trainer."""

    @property
    def last_round(self) -> Round | None: ...

    @property
    def doing(self) -> str | None: ...


class RunDisplay(TrainerCallback):
    """Shows a run while it trains; a context manager, so that the terminal is given back on every way out.

    Live: step and time left, reward with its curve (of each environment too, if there are several), seconds and share
    of each phase, what most of the time is spent on, rates, failures, and a sample episode. Plain: one line per logged
    step.

    Args:
        title: What is trained on what.
        console: Where to show it; the standard output by default.
        live: Whether to draw; by default if the console is a terminal.

    Example:
        >>> with RunDisplay("starter on Compass", console=Console(width=60), live=False) as display:
        ...     pass  # display.attach(trainer); trainer.train()
    """

    def __init__(self, title: str, *, console: Console | None = None, live: bool | None = None) -> None:
        self.console = console or Console()
        self.live = self.console.is_terminal if live is None else live
        self.figures = RunFigures()
        self._title = printable(title)
        self._bars = bars_for(self.console.encoding)
        self._trainer: PlaysRounds | None = None
        self._logs: dict[str, float] = {}
        self._shares: dict[str, float] = {}
        self._evaluation: dict[str, float] = {}
        self._lines_at = 0
        self._rewards_shown = 0
        self._sample: Episode | None = None
        self._sample_since = 0.0
        self._samples = 0
        self._screen: Live | None = None

    def attach(self, trainer: PlaysRounds) -> None:
        """Read the episodes from this trainer; call it before training."""
        self._trainer = trainer

    def __enter__(self) -> Self:
        if self.live:
            self._screen = Live(get_renderable=self.render, console=self.console, refresh_per_second=4)
            self._screen.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._screen is not None:
            self._screen.stop()
            self._screen = None

    # -- events of the loop

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.figures.start(step=state.global_step, max_steps=state.max_steps)
        self._lines_at = state.global_step

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # The trainer takes up a round inside its step, so the latest one is seen at its end.
        self.figures.end_fetch()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.figures.end_training()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        played = self._trainer.last_round if self._trainer is not None else None
        self.figures.end_step(state.global_step, played)
        self._choose_sample()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        logged = logs or {}
        if not any(name.startswith("eval_") for name in logged):
            self._logs |= {name: float(logged[name]) for name in _LOGGED if name in logged}
            shares = {name: float(value) for name, value in logged.items() if name.startswith("share/")}
            self._shares = shares or self._shares
            self._print_progress()
        self.figures.pause_over()

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        self._evaluation = dict(metrics or {})
        if not self.live:
            line = f"evaluation at step {state.global_step}  {self._evaluation_text()}"
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        self.figures.pause_over()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.figures.pause_over()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._print_progress()  # steps after the last log
        self.figures.phase = "done"

    # -- plain lines

    def _print_progress(self) -> None:
        if self.live or self.figures.step == self._lines_at:
            return
        self._lines_at = self.figures.step
        self.console.print(self.progress_line(), markup=False, highlight=False, soft_wrap=True)
        self._rewards_shown = len(self.figures.rewards)

    def progress_line(self) -> str:
        """One line: step, reward since the last line, rates, shares of the phases, failures, time left."""
        figures = self.figures
        new = figures.rewards[self._rewards_shown :] or figures.rewards[-1:]
        reward = f"{sum(new) / len(new):.3f}" if new else "-"
        parts = [f"step {figures.step}/{figures.max_steps}", f"reward {reward}"]
        if len(figures.by_environment) > 1:
            parts += [
                f"{printable(name)} {values[-1]:.3f}" for name, values in figures.by_environment.items() if values
            ]
        parts += [f"{name} {self._logs[name]:.3g}" for name in ("loss", "kl") if name in self._logs]
        parts += [
            f"{figure(figures.episodes_per_second())} episodes/s",
            f"{figure(figures.tokens_per_second())} tokens/s",
            " ".join(f"{name} {share:.0%}" for name, share in figures.shares().items()),
            self._failure_text(),
            f"{clock(figures.eta())} left",
        ]
        return "  ".join(parts)

    def _failure_text(self) -> str:
        failures = self.figures.failures
        kinds = f" ({', '.join(f'{kind} {count}' for kind, count in sorted(failures.items()))})" if failures else ""
        dropped = f", groups dropped {self.figures.dropped_groups}" if self.figures.dropped_groups else ""
        return f"failures {failures.total()}{kinds}{dropped}"

    def _evaluation_text(self) -> str:
        """Rewards and pass@k, each with half of its 95% interval if it is known; per environment and dataset too."""
        found = final_figures([self._evaluation])
        words = []
        for name, value in found.items():
            head, slash, environment = name.partition("/")
            if not head.endswith("_ci95"):
                half = found.get(f"{head}_ci95{slash}{environment}")
                words.append(f"{printable(name)} {value:.3f}" + (f" +- {half:.3f}" if half else ""))
        return "  ".join(words)

    # -- live

    def _choose_sample(self) -> None:
        """Another episode of the latest round, from group to group and sibling to sibling."""
        played, now = self.figures.last_round, time.monotonic()
        if played is None or not played.groups or (self._sample and now - self._sample_since < SAMPLE_SECONDS):
            return
        group = played.groups[self._samples % len(played.groups)]
        if group.episodes:
            self._sample = group.episodes[self._samples % len(group.episodes)]
            self._sample_since = now
        self._samples += 1

    def render(self) -> RenderableType:
        """What is shown now."""
        self._choose_sample()  # in a long step too
        parts: list[RenderableType] = [self._head(), self._rewards(), self._pace()]
        if self._sample is not None:
            room = self.console.height - 15 - len(self.figures.by_environment)
            parts.append(Text(f"sample  {headline(self._sample)}", style="dim"))
            parts.append(transcript(self._sample, max_lines=max(4, min(14, room)), max_characters=120))
        return Padding(Group(*parts), (1, 0, 0, 0))

    def _head(self) -> RenderableType:
        figures = self.figures
        bar = ProgressBar(
            total=max(figures.max_steps, 1), completed=figures.step, width=max(8, self.console.width // 4)
        )
        left = f"{clock(figures.eta())} left" if figures.step < figures.max_steps else ""
        beside = None if self._trainer is None else self._trainer.doing
        doing = figures.phase if figures.phase == "done" else f"{beside or figures.phase} {clock(figures.in_phase())}"
        grid = Table.grid(padding=(0, 2))
        grid.add_row(Text(f"step {figures.step}/{figures.max_steps or '?'}"), bar, Text(left), Text(doing, style="dim"))
        return Group(Text(self._title, style="bold"), grid)

    def _rewards(self) -> RenderableType:
        figures = self.figures
        grid = Table.grid(padding=(0, 2))
        rows = {"reward": figures.rewards}
        if len(figures.by_environment) > 1:
            rows |= {f"  {printable(name)}": values for name, values in figures.by_environment.items()}
        width = max(10, self.console.width - 50)
        for name, values in rows.items():
            last = f"{values[-1]:.3f}" if values else "-"
            first = f"from {values[0]:.3f}" if values else ""
            curve = sparkline(values, width, bars=self._bars)
            grid.add_row(
                Text(name, style="bold"), Text(last, style="bold green"), Text(curve, style="green"), Text(first)
            )
        if not self._evaluation:
            return grid
        evaluation = Table.grid(padding=(0, 2))  # of its own: its long text would push the curves aside
        evaluation.add_row(Text("evaluation", style="bold"), Text(self._evaluation_text()))
        return Group(grid, evaluation)

    def _pace(self) -> RenderableType:
        figures = self.figures
        seconds, shares = figures.phases(), figures.shares()
        grid = Table.grid(padding=(0, 2))
        phases = "   ".join(f"{name} {seconds[name]:.2f} s {shares[name]:.0%}" for name in seconds)
        grid.add_row(Text("a step", style="bold"), Text(phases))
        rates = (
            f"{figure(figures.episodes_per_second())} episodes/s   {figure(figures.tokens_per_second())} tokens/s   "
            f"{figures.total_episodes} episodes   "
        )
        failed = Text(self._failure_text(), style="red" if figures.failures or figures.dropped_groups else "")
        grid.add_row(Text("pace", style="bold"), Text(rates).append_text(failed))
        if self._shares:
            spent = sorted(self._shares.items(), key=lambda one: -one[1])[:5]
            shown = "   ".join(f"{name.removeprefix('share/').replace('_', ' ')} {share:.0%}" for name, share in spent)
            grid.add_row(Text("spent on", style="bold"), Text(shown))
        if self._logs:
            logged = "   ".join(f"{name} {value:.3g}" for name, value in self._logs.items())
            grid.add_row(Text("logged", style="bold"), Text(logged))
        return grid
