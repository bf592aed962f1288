"""How long sessions stay away between an answer and their next request, and when it pays to wait for them."""

from __future__ import annotations

from typing import Literal

from envgrad.sampling.requests import SamplerStats

_SMOOTHING = 0.1
_FIRST_STEP = 5e-3
_FIRST_TURN = 1e-3


class Turnaround:
    """Keeps running averages of the time away (after ``begin`` and after an answer apart) and of a decoding step.

    All times are seconds on one clock.

    Example:
        >>> turnaround = Turnaround()
        >>> turnaround.heard("begin", "a", 1.0)
        >>> {key: round(late, 3) for key, late in turnaround.expected(1.001).items()}
        {'a': 1.002}
        >>> turnaround.heard("request", "a", 1.0015)
        >>> turnaround.outside
        {}
    """

    def __init__(self) -> None:
        self.outside: dict[str, tuple[Literal["first", "next"], float]] = {}
        """open sessions without a request here: whether they have asked before, and since when they are away"""
        self._average: dict[Literal["first", "next"], float] = {"first": _FIRST_TURN, "next": _FIRST_TURN}
        self._step = _FIRST_STEP
        self._seen = (0, 0.0)

    @property
    def patience(self) -> float:
        """Seconds after which a session between turns is late."""
        return 2.0 * self._average["next"]

    def left(self, key: str, now: float) -> None:
        """The session got its answer."""
        self.outside[key] = ("next", now)

    def heard(self, kind: str, key: str, now: float) -> None:
        """A session began, asked, gave up a request, or ended."""
        if kind == "begin":
            self.outside[key] = ("first", now)
        elif kind == "cancel":
            self.outside[key] = ("next", now)
        elif kind == "end":
            self.outside.pop(key, None)
        elif key in self.outside:
            turn, since = self.outside.pop(key)
            self._average[turn] += _SMOOTHING * (max(0.0, now - since) - self._average[turn])

    def stepped(self, stats: SamplerStats) -> None:
        """Note the last step's cost; steps with prompts tell nothing about the next one's."""
        seconds = stats.decode_seconds - self._seen[1]
        if seconds > 0.0:
            self._step += _SMOOTHING * (seconds - self._step)
        self._seen = (stats.steps, stats.decode_seconds)

    def expected(self, now: float) -> dict[str, float]:
        """Sessions that should be back within a step, each with the time when it is late: a step past the average, or
        twice the average where that is sooner. Those in a slow tool are not waited for until they are about to return:
        a step without them costs them nothing."""
        found = {}
        for key, (turn, since) in self.outside.items():
            average = self._average[turn]
            late = since + average + min(average, self._step)
            if since + average <= now + self._step and late > now:
                found[key] = late
        return found

    def worth(self, expected: dict[str, float], here: int, started: float) -> float:
        """Until when to wait for ``expected``, with ``here`` requests held up since ``started``.

        Waiting costs each request here the time waited; stepping at once costs each expected one a step. So it pays
        for up to a step times their ratio, and never beyond the time when all are late.
        """
        return min(max(expected.values()), started + self._step * len(expected) / max(1, here))
