"""Rounds that one process plays beside the training of all: an asynchronous run on several processes.

::

    rank 0    BufferedRounds --round--> exchange --> the round, its metrics --> every rank

One producer means that ages, the buffer's bound and the order of groups are those of a run on one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from envgrad.distributed.ranks import FAILED, Ranks
from envgrad.distributed.waves import SAVING
from envgrad.distributed.wire import Failed, Led, Stopped, from_bytes, to_bytes
from envgrad.errors import RankFailed, RankStopped, StoppedTogether
from envgrad.rollout.runner import Round
from envgrad.training.phases import Laps
from envgrad.training.rounds import RoundPlan, RoundSource, RoundsState

_STOP = "led/stop"


class LedRounds:
    """A ``RoundSource`` on every rank.

    Args:
        ranks: Who takes part.
        plan: What a round is.
        source: Plays it; None on all ranks but the first.
        arrived: The signal that came to this process, if one did.
    """

    def __init__(
        self, ranks: Ranks, plan: RoundPlan, source: RoundSource | None, arrived: Callable[[], int | None]
    ) -> None:
        self._ranks = ranks
        self._plan = plan
        self._source = source
        self._arrived = arrived
        self._unused = 0
        self.failed = False
        """whether the rollouts ended with an error that all ranks know of"""
        self.metrics: Mapping[str, float] = {}

    def next(self, laps: Laps) -> Round:
        """``RoundSource.next``.

        Raises:
            RankFailed: the rank that plays has failed, or is gone.
            StoppedTogether: a signal came to some rank.
        """
        if self._source is None:
            return self._follow(laps)
        with _Telling(self), self._watched():
            played = self._source.next(laps)
        self.metrics, self._unused = self._source.metrics, self._source.unused
        try:
            led = to_bytes(Led(played=played, metrics=dict(self.metrics), unused=self._unused))
        except RankFailed as unsendable:
            self.tell(unsendable)
            raise
        self._ranks.exchange(led)
        return played

    def _follow(self, laps: Laps) -> Round:
        self._plan.publish()  # weights that are cut are gathered by all
        number = self._arrived()
        if number is not None:
            self._ranks.say(_STOP, str(int(number)))
        found = from_bytes(self._ranks.exchange(b"", while_waiting=self._pass_on)[0])
        if isinstance(found, Failed):
            self.failed = True
            raise (RankStopped if found.saves else RankFailed)(f"rank 0 failed: {found.text}")
        if isinstance(found, Stopped):
            raise StoppedTogether(found.signal)
        if not isinstance(found, Led):
            raise AssertionError(f"rank 0 sent a {type(found).__name__} instead of a round")
        self.metrics, self._unused = found.metrics, found.unused
        laps.lap("idle")
        return found.played

    def _pass_on(self) -> None:
        """A signal to a rank that only waits is for the rank that plays."""
        number = self._arrived()
        if number is not None:
            self._ranks.say(_STOP, str(int(number)))

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        loop = self._plan.runner.loop
        loop.watch = self._look
        try:
            yield
        finally:
            loop.watch = None

    def _look(self) -> None:
        said = self._ranks.heard(FAILED)
        if said is not None:
            raise RankFailed(said)
        number, heard = self._arrived(), self._ranks.heard(_STOP)
        if number is not None or heard is not None:
            raise StoppedTogether(int(heard or number or 0))

    def tell(self, error: BaseException) -> None:
        """All other ranks end by ``error`` too."""
        self.failed = True
        if isinstance(error, StoppedTogether):
            self._ranks.exchange(to_bytes(Stopped(signal=error.signal)))
            return
        text = f"{type(error).__name__}: {error}"
        self._ranks.exchange(to_bytes(Failed(text=text, saves=isinstance(error, SAVING))))

    def keep(self) -> None:
        """``RoundSource.keep``."""
        if self._source is not None:
            self._source.keep()

    def settled(self) -> contextlib.AbstractContextManager[None]:
        """``RoundSource.settled``."""
        return contextlib.nullcontext() if self._source is None else self._source.settled()

    def state(self) -> RoundsState:
        """``RoundSource.state``; the first rank's is what a checkpoint holds."""
        if self._source is None:
            return RoundsState(tasks=self._plan.tasks.state_dict())
        return self._source.state()

    def restore(self, state: RoundsState) -> None:
        """``RoundSource.restore``."""
        if self._source is None:
            self._plan.tasks.load_state_dict(state.tasks)
        else:
            self._source.restore(state)

    @property
    def unused(self) -> int:
        """``RoundSource.unused``."""
        return self._unused if self._source is None else self._source.unused

    def close(self) -> None:
        """``RoundSource.close``."""
        if self._source is not None:
            self._source.close()


class _Telling:
    """An error inside is told to the other ranks, which wait for a round."""

    def __init__(self, rounds: LedRounds) -> None:
        self._rounds = rounds

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None and not isinstance(error, RankFailed):
            self._rounds.tell(error)
