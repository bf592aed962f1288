"""What goes on while a round is played, as spans of time; and the round's wall clock, cut into phases by them.

Many episodes are in play at once, so phases overlap: a tool runs while other episodes decode. A span is what one
activity took, and ``partition`` gives each moment to what the caller waits for::

    engine    |prefill|decode  |        |decode |          a forward runs: the moment is its phase's
    episode 0         |tools------------|                  none runs: the moment is shared by the episodes in user code
    episode 1                  |tools|                     neither: the moment is idle
    phases    |prefill|decode  |tools   |decode |idle|

Spans are appended by the rollout's thread and the sampler's, and taken when the round is over.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

ROLLOUT_PHASES = ("reset", "prefill", "decode", "tools", "reward")

SpanKind: TypeAlias = Literal["reset", "prefill", "decode", "tools", "reward", "sample"]
"""``sample``: an episode waits for its answer; it has no moment of its own"""

_FORWARD = ("prefill", "decode")
_USER = ("reset", "tools", "reward")


class Span(NamedTuple):
    """Something that went on from ``start`` to ``end``, in seconds of one clock. (A tuple: made per step and turn.)"""

    kind: SpanKind
    start: float
    end: float
    episodes: int = 1
    """how many episodes it went on for"""
    tokens: int = 0
    """tokens that the model forwarded in it"""


class Activity:
    """Collects spans, from any thread.

    Args:
        clock: Seconds, always growing.

    Example:
        >>> now = iter([1.0, 3.0])
        >>> activity = Activity(clock=lambda: next(now))
        >>> with activity.during("tools"):
        ...     pass
        >>> activity.take()
        [Span(kind='tools', start=1.0, end=3.0, episodes=1, tokens=0)]
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._spans: deque[Span] = deque()  # appending and popping are atomic

    @contextmanager
    def during(self, kind: SpanKind, episodes: int = 1) -> Iterator[None]:
        """What is inside is of this kind, however it ends."""
        start = self.clock()
        try:
            yield
        finally:
            self._spans.append(Span(kind, start, self.clock(), episodes))

    def forwarded(self, start: float, end: float, *, prefill: int, decode: int) -> None:
        """A step of the sampler: ``prefill`` tokens of prompts and suffixes were forwarded and ``decode`` sampled ones.
        Its time is cut in proportion to them, as all were in one forward."""
        tokens = prefill + decode
        middle = start + (end - start) * (prefill / tokens if tokens else 0.0)
        if prefill:
            self._spans.append(Span("prefill", start, middle, tokens=prefill))
        if decode or not prefill:
            self._spans.append(Span("decode", middle, end, tokens=decode))

    def take(self) -> list[Span]:
        """The spans that have ended, and start anew."""
        spans: list[Span] = []
        while self._spans:
            spans.append(self._spans.popleft())
        return spans


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivityReport:
    """A round's activity in numbers.

    Example:
        >>> spans = [Span("decode", 0.0, 2.0, tokens=4), Span("tools", 1.0, 5.0), Span("reset", 4.0, 5.0)]
        >>> report = ActivityReport.of(spans, 0.0, 6.0)
        >>> report.seconds
        {'reset': 0.5, 'prefill': 0.0, 'decode': 2.0, 'tools': 2.5, 'reward': 0.0}
        >>> report.episode_seconds, report.forwarded_tokens
        ({'reset': 1.0, 'tools': 4.0, 'reward': 0.0, 'sample': 0.0}, 4)
    """

    seconds: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(ROLLOUT_PHASES, 0.0))
    """wall-clock seconds by phase; what is missing to the round's time was idle"""
    episode_seconds: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys((*_USER, "sample"), 0.0))
    """seconds summed over episodes, also where they overlap each other or a forward"""
    forwarded_tokens: int = 0
    """tokens that the sampler's model forwarded"""

    @classmethod
    def of(cls, spans: Sequence[Span], began: float, ended: float) -> ActivityReport:
        """The report of the time from ``began`` to ``ended``; what is outside of it is cut off."""
        totals = dict.fromkeys((*_USER, "sample"), 0.0)
        for span in spans:
            if span.kind in totals:
                totals[span.kind] += _cut(span, began, ended) * span.episodes
        return cls(
            seconds=partition(spans, began, ended),
            episode_seconds=totals,
            forwarded_tokens=sum(span.tokens for span in spans),
        )


def _cut(span: Span, began: float, ended: float) -> float:
    return max(0.0, min(span.end, ended) - max(span.start, began))


def partition(spans: Sequence[Span], began: float, ended: float) -> dict[str, float]:
    """Wall-clock seconds of ``ROLLOUT_PHASES`` between ``began`` and ``ended``; their sum is at most the time between.

    A moment in which a forward runs is its phase's. Any other is shared by ``reset``, ``tools`` and ``reward`` in
    proportion to the episodes that are in them.
    """
    seconds = dict.fromkeys(ROLLOUT_PHASES, 0.0)
    changes: list[tuple[float, str, int]] = []
    for span in spans:
        if span.kind in seconds and _cut(span, began, ended) > 0.0:
            changes.append((max(span.start, began), span.kind, span.episodes))
            changes.append((min(span.end, ended), span.kind, -span.episodes))
    changes.sort()
    running = dict.fromkeys(ROLLOUT_PHASES, 0)
    forwards = users = 0
    last = began
    for at, kind, change in changes:
        if at > last:
            if forwards or users:
                part = (at - last) / (forwards or users)
                for phase in _FORWARD if forwards else _USER:
                    seconds[phase] += part * running[phase]
            last = at
        running[kind] += change
        if kind in _FORWARD:
            forwards += change
        else:
            users += change
    return seconds
