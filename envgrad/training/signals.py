"""What SIGINT and SIGTERM do to a run: the first ends it in order, the second at once.

::

    first signal   waiting for rollouts, in an evaluation, ...      raised there and then
                   in an optimizer step                             raised before its next micro-batch (the step is not
                                                                    made, and is kept for the checkpoint), or behind it
                   saving a checkpoint, closing                     raised when that is done
    then           a checkpoint is saved, environments and sampler are closed, the exception goes on
    second signal  the process ends by it, wherever it is

SIGINT is raised as ``KeyboardInterrupt``, SIGTERM as ``Terminated``, a ``SystemExit`` with code 143.

Where a run has several processes, a signal that comes to one of them stops all, at the same place: while rollouts are
played, or behind an optimizer step.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeAlias

from torch import nn
from transformers.trainer_utils import SaveStrategy

from envgrad.errors import StoppedTogether
from envgrad.training.checkpoint import AtomicCheckpoints

_Handler: TypeAlias = Callable[[int, FrameType | None], Any] | int | None

_SIGNALS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
"""what we handle, where the handler is still this one"""


class Terminated(SystemExit):
    """SIGTERM came; uncaught, it ends the process with exit code 128 + 15, as shells have it.

    Example:
        >>> Terminated().code
        143
    """

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


ECHO_SECONDS = 2.0
"""in which a launcher may pass on a signal that the process has got already"""


class StopSignals:
    """A context in which SIGINT and SIGTERM stop in order; handlers are put back as they were behind it.

    Only the main thread gets signals, so elsewhere it does nothing. Handlers of your own, and ignored signals, stay.
    Entering again inside changes nothing.
    """

    def __init__(self) -> None:
        self.together = False
        """whether a signal waits until all processes of the run have agreed on it (``tell``)"""
        self.told: signal.Signals | None = None
        """the signal that all have agreed on"""
        self._arrived_at = 0.0
        self.arrived: signal.Signals | None = None
        """the first signal of this context"""
        self._delivered = False
        self._held = 0
        self._entered = 0
        self._before: dict[signal.Signals, _Handler] = {}

    def __enter__(self) -> StopSignals:
        self._entered += 1
        if self._entered == 1:
            self.arrived, self.told, self._delivered, self._held = None, None, False, 0
            if threading.current_thread() is threading.main_thread():
                ours = [one for one, default in _SIGNALS.items() if signal.getsignal(one) is default]
                self._before = {one: signal.signal(one, self._handle) for one in ours}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._entered -= 1
        if self._entered:
            return
        before, self._before, self._held = self._before, {}, 0
        for one, handler in before.items():
            signal.signal(one, handler)
        if isinstance(error, StoppedTogether):
            raise _exception_of(signal.Signals(error.signal)) from error
        if kind is None:
            self.told = self.told or self.arrived  # nobody waits for this process any more
            self._deliver()

    def tell(self, number: int) -> None:
        """All processes have agreed to stop by this signal; it is raised where signals are."""
        self.told = signal.Signals(number)

    def hold(self) -> None:
        """From here on a signal waits, until as many calls of ``release``.

        Raises:
            KeyboardInterrupt, Terminated: one has come and has been lost on its way (in a finalizer, say).
        """
        if not self._held:
            self._deliver()
        self._held += 1

    def release(self) -> None:
        """
        Raises:
            KeyboardInterrupt, Terminated: one has come in the meantime.
        """
        self._held = max(0, self._held - 1)
        if not self._held:
            self._deliver()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """``hold`` and ``release``; an error goes before a signal."""
        self.hold()
        try:
            yield
        finally:
            self._held = max(0, self._held - 1)
        if not self._held:
            self._deliver()

    def caught(self) -> None:
        """The exception has arrived where it is dealt with; it is not raised again."""
        self._delivered = True

    def _deliver(self) -> None:
        number = self.told if self.together else self.arrived
        if number is not None and not self._delivered:
            raise _exception_of(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.arrived is not None:
            if self.together and time.monotonic() - self._arrived_at < ECHO_SECONDS:
                return
            _abort(signal.Signals(number))
        self.arrived, self._arrived_at = signal.Signals(number), time.monotonic()
        # Neither logging nor print: this may run in the middle of either.
        os.write(2, f"\n{name}: saving and closing; once more ends the process at once\n".encode())
        if not self._held:
            self._deliver()


def _exception_of(number: signal.Signals) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else Terminated()


def _abort(number: signal.Signals) -> None:
    if hasattr(sys, "ps1"):  # an interactive session outlives its run
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


class StoppableTrainer(AtomicCheckpoints):
    """``Trainer`` that signals stop between optimizer steps, whole checkpoints and nothing else."""

    _saved_step: int | None = None

    @property
    def signals(self) -> StopSignals:
        """The one of this trainer."""
        found: StopSignals = self.__dict__.setdefault("_signals", StopSignals())
        return found

    def save_on_the_way_out(self) -> None:
        """A checkpoint of the last step made, unless there is one, none was made, or ``save_strategy`` is ``"no"``."""
        self.signals.caught()
        step = self.state.global_step
        if step and step != self._saved_step and self.args.save_strategy != SaveStrategy.NO:
            self._save_checkpoint(self.model, trial=None)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        with self.signals.held():
            super()._save_checkpoint(model, trial)
            self._saved_step = self.state.global_step

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Called behind each optimizer step, which began to hold signals when its samples were taken."""
        self.signals.release()
        super()._maybe_log_save_evaluate(*args, **kwargs)
