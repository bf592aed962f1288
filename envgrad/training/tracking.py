"""Trackers (``report_to``): metrics through transformers' callbacks, and beside them episodes and the reward plot.

::

    round + samples --record--> the last round's ---log---> a few episodes --> tables, traces, text
    log history ------------------------------------end--> reward plot, settings with final figures

A tracker that cannot start ends the run before its first episode. One that fails later is named once, in the log, and
the run goes on. All are closed on every way out.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from transformers import TrainerCallback, TrainerState

from envgrad.config import RolloutConfig
from envgrad.environments.boundary import Raised, guard
from envgrad.errors import first_line
from envgrad.rollout.runner import Round
from envgrad.training.reward_plot import can_draw, draw_rewards, reward_curves
from envgrad.training.run_facts import final_figures, hyperparameters
from envgrad.training.tracking_backends import Tracker, tracker_of
from envgrad.training.tracking_episodes import episode_rows
from envgrad.types import TrainingSample

logger = logging.getLogger(__name__)

_EVENTS = ("on_train_end", "on_log", "on_evaluate", "on_save", "on_predict", "on_push_begin")


class Trackers:
    """What a trainer's callbacks report to.

    Args:
        callbacks: The trainer's own list, read whenever training or an evaluation begins.
        config: Of the run.
    """

    def __init__(self, callbacks: list[TrainerCallback], config: RolloutConfig) -> None:
        self._callbacks = callbacks
        self._config = config
        self._found: list[Tracker] = []
        self._depth = 0
        self._round: Round | None = None
        self._samples: Sequence[TrainingSample] = ()

    # -- life

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Within the outermost of these trackers may be written to; behind it their runs have ended."""
        self._depth += 1
        if self._depth == 1:
            self._adopt()
        failed = True
        try:
            yield
            failed = False
        finally:
            self._depth -= 1
            if not self._depth:
                self._round, self._samples = None, ()
                for tracker in self._found:
                    self._call(tracker, "closing", partial(tracker.end, failed=failed))
                    self._tell(tracker)

    def close(self) -> None:
        """End what is still open; the trainer is done."""
        for tracker in self._found:
            self._call(tracker, "closing", tracker.close)

    def _adopt(self) -> None:
        """Guard the events of reporting callbacks that are new in the list; they keep their class and their place."""
        known = {id(tracker.callback) for tracker in self._found}
        for callback in self._callbacks:
            tracker = None if id(callback) in known else tracker_of(callback, self._config.output_dir or "")
            if tracker is None:
                continue
            tracker.prepare()
            for event in _EVENTS:
                setattr(callback, event, partial(self._event, tracker, event, getattr(callback, event)))
            callback.on_train_begin = partial(self._start, tracker, callback.on_train_begin)
            self._found.append(tracker)

    # -- events

    def _start(self, tracker: Tracker, begin: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        outcome = guard(begin, *args, **kwargs)
        if isinstance(outcome, Raised):  # nothing is lost yet, and the user learns it at once
            outcome.error.add_note(f"raised as report_to={tracker.name!r} was started; report_to='none' trains without")
            raise outcome.error
        return outcome.value

    def _event(self, tracker: Tracker, event: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._call(tracker, event, partial(call, *args, **kwargs))

    def _call(self, tracker: Tracker, doing: str, call: Callable[[], object]) -> object:
        outcome = guard(call)
        if not isinstance(outcome, Raised):
            return outcome.value
        tracker.failed_calls += 1
        if tracker.failed_calls == 1:
            logger.warning(
                "report_to=%r failed (%s: %s); the run goes on, and this is said once. Checkpoints keep the metrics",
                tracker.name, doing, first_line(outcome.error), exc_info=outcome.error,
            )  # fmt: skip
        return None

    def _tell(self, tracker: Tracker) -> None:
        if tracker.failed_calls > 1:
            logger.warning("report_to=%r failed %d times in all", tracker.name, tracker.failed_calls)
        tracker.failed_calls = 0

    # -- what is shown

    def _open_ones(self) -> list[Tracker]:
        return [tracker for tracker in self._found if tracker.is_open]

    def record(self, played: Round, samples: Sequence[TrainingSample]) -> None:
        """The round that the next log shows a few episodes of."""
        if self._config.num_episodes_to_report and any(tracker.shows_episodes for tracker in self._found):
            self._round, self._samples = played, samples

    def show(self, logs: Mapping[str, float], state: TrainerState) -> None:
        """Behind each log: a step's episodes, and at the end of training the plot and the settings."""
        if "loss" in logs and self._round is not None:
            rows = episode_rows(
                self._round,
                self._samples,
                step=state.global_step,
                limit=self._config.num_episodes_to_report,
                seed=self._config.seed,
            )
            self._round, self._samples = None, ()
            for tracker in self._open_ones() if rows else ():
                self._call(tracker, "episodes", partial(tracker.episodes, rows, state.global_step))
        if "train_runtime" in logs:
            self._show_end(state)

    def _show_end(self, state: TrainerState) -> None:
        opened = self._open_ones()
        if not opened:
            return
        curves = reward_curves(state.log_history)
        if curves and can_draw():
            figure = draw_rewards(curves)
            for tracker in opened:
                self._call(tracker, "reward plot", partial(tracker.figure, figure, state.global_step))
        figures = {name: value for name, value in final_figures(state.log_history).items() if math.isfinite(value)}
        hparams = hyperparameters(self._config)
        for tracker in opened:  # last: TensorBoard's readers leave a file when there is another
            self._call(tracker, "summary", partial(tracker.summary, hparams, figures, state.global_step))
