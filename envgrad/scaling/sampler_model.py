"""A sampler in simulated time: rows that decode together, prompts and results that are forwarded between them.

It follows the local engine (``sampling.scheduler``): a session keeps its keys and values while its environment works, a
group's prompt is forwarded once, new weights make it forget all of them, and the local sampler waits for sessions that
are about to return by the library's own rule (``sampling.turnaround``). Between two events nothing changes but lengths,
so that many decoding steps are one event here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from envgrad.sampling.requests import SamplerStats
from envgrad.sampling.turnaround import Turnaround
from envgrad.scaling.costs import SamplerCosts

if TYPE_CHECKING:
    import simpy

Process = Generator[Any, Any, None]
_MANY = 1 << 30


@dataclass(slots=True, kw_only=True, eq=False)
class SimulatedGroup:
    """What siblings share at a sampler."""

    prompt: int
    known: bool = False
    """its prompt's keys and values are there"""
    holders: int = 0
    """places that have it"""
    reader: SimulatedSession | None = None
    """the sibling that forwards the prompt for all now"""


@dataclass(slots=True, kw_only=True, eq=False)
class SimulatedSession:
    """One episode at a sampler."""

    key: str
    group: SimulatedGroup
    context: int
    """tokens of its row"""
    known: int = 0
    """of them, those whose keys and values are there"""
    remaining: int = 0
    """tokens of the answer in the making"""
    oldest: int | None = None
    """the first sampled token's version"""
    answered: simpy.Event | None = None
    has_place: bool = False


@dataclass(slots=True)
class Meter:
    """Seconds in which something was busy, also while it is.

    Example:
        >>> meter = Meter()
        >>> meter.begin(1.0); meter.end(3.0); meter.begin(10.0)
        >>> meter.at(9.0), meter.at(10.5)
        (2.0, 2.5)
    """

    done: float = 0.0
    since: float = math.inf

    def begin(self, now: float) -> None:
        self.since = now

    def end(self, now: float) -> None:
        self.done, self.since = self.done + now - self.since, math.inf

    def at(self, now: float) -> float:
        """Up to ``now``."""
        return self.done + max(0.0, now - self.since)


@dataclass(slots=True)
class Busy:
    """What a sampler did."""

    steps_taking: Meter = field(default_factory=Meter)
    decoding: float = 0.0
    """seconds in steps that only decoded"""
    prefill_tokens: int = 0
    sampled: int = 0
    steps: int = 0
    decode_steps: int = 0
    """of them, those that read no prompt"""
    changes: int = 0
    """of those, the ones that had other rows than the step before"""


class SimulatedSampler:
    """One replica.

    Args:
        env: The simulation.
        costs: What its steps take.
        beside: How much longer steps take while ``training`` says so.
        lingers: Whether it waits for sessions that are about to return.
    """

    def __init__(self, env: simpy.Environment, costs: SamplerCosts, *, beside: float = 1.0, lingers: bool) -> None:
        self.env = env
        self.costs = costs
        self.busy = Busy()
        self.version = 0
        self.paused = False
        self.training = False
        self.computing = False
        self._beside = beside
        self._turnaround = Turnaround() if lingers else None
        self._rows: dict[SimulatedSession, None] = {}
        self._waiting: list[SimulatedSession] = []
        self._away: dict[SimulatedSession, None] = {}
        """sessions that keep their place while their environment works, longest away first"""
        self._wake = env.event()
        self._forgotten = False
        self._last: list[SimulatedSession] = []
        """rows of the step before, if it only decoded"""
        env.process(self._run())

    # -- the episodes' side

    def begin(self, session: SimulatedSession) -> None:
        """It will ask."""
        if self._turnaround is not None:
            self._turnaround.heard("begin", session.key, self.env.now)

    def ask(self, session: SimulatedSession, tokens: int) -> simpy.Event:
        """An event that comes when so many tokens are sampled."""
        session.remaining = tokens
        session.answered = self.env.event()
        self._waiting.append(session)
        self._away.pop(session, None)
        if self._turnaround is not None:
            self._turnaround.heard("request", session.key, self.env.now)
        self._changed()
        return session.answered

    def end(self, session: SimulatedSession) -> None:
        """It asks no more."""
        self._away.pop(session, None)
        session.has_place = False
        if self._turnaround is not None:
            self._turnaround.heard("end", session.key, self.env.now)
        self._changed()

    # -- the trainer's side

    def set_training(self, training: bool) -> None:
        """Whether training goes on beside it from now on."""
        if self._beside != 1.0 and training != self.training:
            self.training = training
            self._changed()
        self.training = training

    def pause(self) -> None:
        """No step begins until ``update``."""
        self.paused = True
        self._changed()

    def update(self, version: int) -> None:
        """New weights: keys and values are forgotten before the next step."""
        self.version, self._forgotten, self.paused = version, True, False
        self._changed()

    # -- its own

    def _changed(self) -> None:
        if not self._wake.triggered:
            self._wake.succeed()

    @property
    def _factor(self) -> float:
        return self._beside if self.training else 1.0

    def _run(self) -> Process:
        while True:
            self._wake = self.env.event()
            if self.paused or not (self._rows or self._waiting):
                self.computing = False
                yield self._wake
                continue
            if self._turnaround is not None:
                yield from self._linger(self._turnaround)
                self._wake = self.env.event()
            if self._forgotten:
                self._forget()
            self._admit()
            if not self._rows:
                self.computing = False
                yield self._wake
                continue
            self.computing = True
            unread = [one for one in self._rows if one.context - one.known > 1]
            if unread:
                yield from self._read(unread)
            else:
                yield from self._decode()

    def _linger(self, turnaround: Turnaround) -> Process:
        """As ``LocalSampler._linger``."""
        began = self.env.now
        expected = turnaround.expected(began)
        while expected:
            left = turnaround.worth(expected, len(self._rows) + len(self._waiting), began) - self.env.now
            if left <= 1e-9:
                break
            self._wake = self.env.event()
            self.computing = False
            yield self._wake | self.env.timeout(left)
            expected = {key: until for key, until in expected.items() if key in turnaround.outside}

    def _forget(self) -> None:
        self._forgotten = False
        for one in (*self._rows, *self._waiting, *self._away):
            one.known, one.group.known, one.group.reader = 0, False, None

    def _admit(self) -> None:
        """Sessions with a place go on; others take a free one, or that of the session longest away."""
        held, later = len(self._rows) + len(self._away), []
        held += sum(one.has_place for one in self._waiting)
        for one in self._waiting:
            if not one.has_place:
                if held >= self.costs.max_rows:
                    victim = next(iter(self._away), None)
                    if victim is None:
                        later.append(one)
                        continue
                    del self._away[victim]
                    self._lose_place(victim)
                    held -= 1
                held += 1
                one.has_place = True
                one.group.holders += 1
            self._rows[one] = None
        self._waiting = later

    def _lose_place(self, session: SimulatedSession) -> None:
        session.has_place, session.known = False, 0
        session.group.holders -= 1
        session.group.known = session.group.known and session.group.holders > 0

    def _read(self, unread: Sequence[SimulatedSession]) -> Process:
        """One step that forwards prompts and results; other rows decode in it."""
        budget, tokens = self.costs.prefill_budget, 0
        reading = dict.fromkeys(unread)
        for one in unread:
            group = one.group
            if not group.known and group.reader is not None and group.reader is not one and group.reader in self._rows:
                continue  # it waits for the sibling that forwards their prompt
            if group.known:
                one.known = max(one.known, min(group.prompt, one.context))
            else:
                group.reader = one
            size = min(budget, one.context - one.known)
            if size < 1 and one.known < one.context:
                break
            one.known += size
            budget, tokens = budget - size, tokens + size
            if one.known >= group.prompt:
                group.known, group.reader = True, None
        for one in reading:  # siblings whose whole row has just been read for them
            if one.group.known and one.context == one.group.prompt:
                one.known = one.context
        rows = [one for one in self._rows if one.context - one.known <= (0 if one in reading else 1)]
        seconds = self._factor * self.costs.seconds(rows=len(rows), context=self._context(self._rows), prefill=tokens)
        self._last = []
        self.busy.steps_taking.begin(self.env.now)
        yield self.env.timeout(seconds)
        self.busy.steps_taking.end(self.env.now)
        self.busy.prefill_tokens += tokens
        self._grow(rows, 1)

    def _context(self, rows: Iterable[SimulatedSession]) -> int:
        """Tokens of keys and values that a step over ``rows`` reads."""
        read = sum(one.known + 1 for one in rows)
        if not self.costs.shares_prompts:
            return read
        siblings = Counter(one.group for one in rows)
        return read - sum((count - 1) * group.prompt for group, count in siblings.items() if group.known)

    def _decode(self) -> Process:
        """As many decoding steps as nothing changes in."""
        costs, factor, rows = self.costs, self._factor, list(self._rows)
        context = self._context(rows)
        changed = rows != self._last
        self._last, extra = rows, costs.change if changed else 0.0
        self.busy.changes += changed
        most = min(one.remaining for one in rows)
        steps = min(most, self._until_return(rows, context))
        began, whole = self.env.now, factor * (extra + costs.run(steps=steps, rows=len(rows), context=context))
        self.busy.steps_taking.begin(began)
        yield self._wake | self.env.timeout(whole)
        spent = self.env.now - began
        if spent < whole * (1 - 1e-9):  # woken: the step in hand ends first
            left = max(0.0, spent / factor - extra)
            steps = min(steps, costs.steps_within(left, rows=len(rows), context=context))
            whole = factor * (extra + costs.run(steps=steps, rows=len(rows), context=context))
            yield self.env.timeout(max(0.0, whole - spent))
        self.busy.steps_taking.end(self.env.now)
        self.busy.decoding += whole
        self.busy.decode_steps += steps
        if self._turnaround is not None:
            for left in reversed(range(steps)):
                self._turnaround.stepped(SamplerStats(decode_seconds=self.busy.decoding - whole * left / steps))
        self._grow(rows, steps)

    def _until_return(self, rows: Sequence[SimulatedSession], context: float) -> int:
        """Steps until a session is so near its return that the sampler asks itself whether to wait."""
        if self._turnaround is None or not self._turnaround.outside:
            return _MANY
        turnaround, now = self._turnaround, self.env.now
        step = self._factor * self.costs.seconds(rows=len(rows), context=context)
        averages = {"next": turnaround.patience / 2, "first": 0.0}
        due = [since + averages[turn] - step - now for turn, since in turnaround.outside.values()]
        coming = [one for one in due if one > 0]
        return max(1, math.floor(min(coming) / step)) if coming else _MANY

    def _grow(self, rows: Sequence[SimulatedSession], steps: int) -> None:
        """Each of ``rows`` got so many tokens."""
        self.busy.steps += steps
        self.busy.sampled += steps * len(rows)
        for one in rows:
            if one.oldest is None:
                one.oldest = self.version
            one.remaining -= steps
            one.context += steps
            one.known = one.context - 1
            if one.remaining <= 0:
                del self._rows[one]
                self._away[one] = None
                if self._turnaround is not None:
                    self._turnaround.left(one.key, self.env.now)
                if one.answered is not None:
                    one.answered.succeed()
