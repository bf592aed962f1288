"""The whole pipeline in simulated time: tasks, environments, samplers, buffer, trainer, publishes, checkpoints, log.

Synchronous rounds and asynchronous ones as ``training.rounds`` and ``training.producer`` play them; the buffer is the
library's own (``training.buffer``), with its bound on age. simpy runs the events.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from envgrad.errors import ConfigurationError
from envgrad.scaling.costs import Costs
from envgrad.scaling.rounds_model import BesideRounds, InlineRounds, TakenRound, load_simpy
from envgrad.scaling.sampler_model import Meter, SimulatedGroup, SimulatedSampler, SimulatedSession
from envgrad.scaling.simulated import Simulated, SimulatedStep
from envgrad.scaling.workload import Workload

if TYPE_CHECKING:
    import simpy

Process = Generator[Any, Any, None]
_PIECES = 40
"""into which a step's training is cut where it competes with the sampler"""


def simulate(load: Workload, costs: Costs, *, steps: int = 8, warm_up: int | None = None) -> Simulated:
    """Play ``steps`` optimizer steps that count, those before and behind them too.

    Args:
        load: What is played.
        costs: What it costs.
        steps: That count.
        warm_up: Before them; by default as many as fill the buffer, and one more.

    Raises:
        ConfigurationError: simpy is not installed, or a number of steps below 1.

    Example: one episode of one answer of 10 tokens, at 0.1 s a token, trained in 1 s.
        >>> from envgrad.scaling.costs import SamplerCosts, TrainerCosts
        >>> from envgrad.scaling.workload import Draw
        >>> load = Workload(groups=1, siblings=1, turns=Draw(mean=1), prompt_tokens=5, turn_tokens=Draw(mean=10))
        >>> found = simulate(load, Costs(sampler=SamplerCosts(step=0.1), trainer=TrainerCosts(step=1.0)), steps=2)
        >>> round(found.seconds, 6), round(found.trainer_busy, 6), found.tasks["trained"]
        (2.0, 0.5, 4)
    """
    if steps < 1:
        raise ConfigurationError(f"steps={steps} must be at least 1")
    first = load.rounds_in_flight + 1 if warm_up is None else warm_up
    behind = load.rounds_in_flight if load.asynchronous else 0
    return Pipeline(load, costs, first, steps, behind).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Totals:
    """What was done up to a moment; the counted part is the difference of two."""

    time: float
    trainer: float
    loop: float
    log: float
    sampler: float
    environments: float
    log_bytes: float
    sampled: int
    sampler_steps: int


@dataclass(slots=True)
class Pipeline:
    """A run in the making; ``run`` plays it."""

    load: Workload
    costs: Costs
    first: int
    counted: int
    behind: int
    env: simpy.Environment = field(init=False)
    loop: simpy.Resource = field(init=False)
    samplers: list[SimulatedSampler] = field(init=False)
    log_queue: simpy.Container = field(init=False)
    log_jobs: simpy.Store = field(init=False)
    trainer_meter: Meter = field(default_factory=Meter)
    loop_meter: Meter = field(default_factory=Meter)
    log_meter: Meter = field(default_factory=Meter)
    environment_seconds: float = 0.0
    log_bytes: float = 0.0
    steps: list[SimulatedStep] = field(default_factory=list)
    tasks: Counter[str] = field(default_factory=Counter)
    version: int = 0
    checkpointing: simpy.Process | None = None
    marks: list[_Totals] = field(default_factory=list)
    positions: Any = field(default_factory=itertools.count)
    plans: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    def run(self) -> Simulated:
        simpy = load_simpy()
        self.env = simpy.Environment()
        self.loop = simpy.Resource(self.env)
        costs, storage = self.costs, self.costs.storage
        self.samplers = [
            SimulatedSampler(self.env, costs.sampler, beside=costs.sampler_beside, lingers=costs.local)
            for _ in range(costs.replicas)
        ]
        self.log_queue = simpy.Container(self.env, capacity=storage.log_rounds, init=storage.log_rounds)
        self.log_jobs = simpy.Store(self.env)
        self.env.process(self._write_log())
        rounds = BesideRounds(self) if self.load.asynchronous else InlineRounds(self)
        self.env.run(until=self.env.process(self._train(rounds)))
        return self._report()

    # -- the trainer

    def _train(self, rounds: InlineRounds | BesideRounds) -> Process:
        env, storage = self.env, self.costs.storage
        for step in range(self.first + self.counted + self.behind):
            if step in (self.first, self.first + self.counted):
                self.marks.append(self._totals())
            began = env.now
            for one in self.samplers:
                one.pause()
            yield env.timeout(storage.publish)
            self.version = step
            for one in self.samplers:
                one.update(step)
            published = env.now
            taken: list[TakenRound] = []
            yield from rounds.next(taken)
            waited, logged = env.now - published, env.now
            yield from self._log(taken[0])
            logged, trained = env.now - logged, env.now
            yield from self._compute(taken[0])
            trained, saved = env.now - trained, env.now
            self.tasks["trained"] += len(taken[0].positions)
            if storage.checkpoint_every and (step + 1) % storage.checkpoint_every == 0:
                yield from self._checkpoint()
            self.steps.append(
                SimulatedStep(
                    seconds=env.now - began, waiting=waited, training=trained, publish=published - began,
                    checkpoint=env.now - saved, log=logged, staleness=taken[0].staleness, buffered=taken[0].buffered,
                    playing=taken[0].playing,
                )
            )  # fmt: skip
        if len(self.marks) < 2:
            self.marks.append(self._totals())
        self.tasks["unfinished"] = rounds.unfinished

    def _compute(self, taken: TakenRound) -> Process:
        tokens, pairs = self.training_work(taken.positions)
        episodes = len(taken.positions) * self.load.siblings
        seconds = self.costs.trainer.seconds(episodes=episodes, tokens=tokens, pairs=pairs)
        self._set_training(True)
        self.trainer_meter.begin(self.env.now)
        if self.costs.trainer_beside == 1.0:
            yield self.env.timeout(seconds)
        else:
            for _ in range(_PIECES):
                beside = any(one.computing for one in self.samplers)
                yield self.env.timeout(seconds / _PIECES * (self.costs.trainer_beside if beside else 1.0))
        self._set_training(False)
        self.trainer_meter.end(self.env.now)

    def _set_training(self, training: bool) -> None:
        for one in self.samplers:
            one.set_training(training)

    def plan_of(self, position: int, sibling: int) -> tuple[int, ...]:
        """An episode's answers, drawn once."""
        found = self.plans.get((position, sibling))
        if found is None:
            found = self.plans[position, sibling] = self.load.turn_plan(position, sibling)
        return found

    def training_work(self, positions: list[int]) -> tuple[float, float]:
        """Tokens and pairs of a step: each group's prompt once, and no row's last token."""
        load = self.load
        tokens = pairs = 0.0
        for position in positions:
            tokens += load.prompt_tokens
            pairs += _pairs(load.prompt_tokens)
            for sibling in range(load.siblings):
                needed = load.row_length(self.plan_of(position, sibling)) - 1
                tokens += needed - load.prompt_tokens
                pairs += _pairs(needed) - _pairs(load.prompt_tokens)
        return tokens, pairs

    # -- checkpoints and the log

    def _checkpoint(self) -> Process:
        seconds = self.costs.storage.checkpoint
        if self.checkpointing is not None and self.checkpointing.is_alive:
            yield self.checkpointing
        if self.costs.storage.checkpoint_blocks:
            yield self.env.timeout(seconds)
        else:
            self.checkpointing = self.env.process(self._sleep(seconds))

    def _sleep(self, seconds: float) -> Process:
        yield self.env.timeout(seconds)

    def _log(self, taken: TakenRound) -> Process:
        """Hand a round to the log's thread; wait where too many wait already."""
        rows = sum(
            self.load.row_length(self.plan_of(position, sibling))
            for position in taken.positions
            for sibling in range(self.load.siblings)
        )
        size = rows * self.costs.storage.log_bytes_per_token
        self.log_bytes += size
        if not math.isinf(self.costs.storage.log_rate):
            yield self.log_queue.get(1)
            self.log_jobs.put(size)

    def _write_log(self) -> Process:
        while True:
            size = yield self.log_jobs.get()
            self.log_meter.begin(self.env.now)
            yield self.env.timeout(size / self.costs.storage.log_rate)
            self.log_meter.end(self.env.now)
            yield self.log_queue.put(1)

    # -- episodes

    def play_group(self, position: int) -> Generator[Any, Any, int]:
        """Play a group's episodes; returns the version of their oldest token."""
        load = self.load
        group = SimulatedGroup(prompt=load.prompt_tokens)
        sampler = self.samplers[position % len(self.samplers)]
        sessions = [
            SimulatedSession(key=f"{position}/{sibling}", group=group, context=load.prompt_tokens)
            for sibling in range(load.siblings)
        ]
        for one in sessions:
            sampler.begin(one)
        yield self.env.all_of(
            [self.env.process(self._episode(sampler, one, position, sibling)) for sibling, one in enumerate(sessions)]
        )
        return min(self.version if one.oldest is None else one.oldest for one in sessions)

    def _episode(self, sampler: SimulatedSampler, session: SimulatedSession, position: int, sibling: int) -> Process:
        load, costs = self.load, self.costs.loop
        yield from self._on_loop(costs.episode)
        yield from self._environment(load.reset_latency.at("reset", position, sibling))
        plan = self.plan_of(position, sibling)
        for turn, tokens in enumerate(plan):
            if turn:
                session.context += load.result_tokens
            yield sampler.ask(session, tokens)
            yield from self._on_loop(costs.turn)
            yield from self._environment(load.latency.at("latency", position, sibling, turn))
        sampler.end(session)

    def _environment(self, seconds: float) -> Process:
        if seconds:
            yield self.env.timeout(seconds)
            self.environment_seconds += seconds

    def _on_loop(self, seconds: float) -> Process:
        if seconds:
            with self.loop.request() as turn:
                yield turn
                self.loop_meter.begin(self.env.now)
                yield self.env.timeout(seconds)
                self.loop_meter.end(self.env.now)

    # -- the report

    def _totals(self) -> _Totals:
        now = self.env.now
        return _Totals(
            time=now,
            trainer=self.trainer_meter.at(now),
            loop=self.loop_meter.at(now),
            log=self.log_meter.at(now),
            sampler=math.fsum(one.busy.steps_taking.at(now) for one in self.samplers),
            environments=self.environment_seconds,
            log_bytes=self.log_bytes,
            sampled=sum(one.busy.sampled for one in self.samplers),
            sampler_steps=sum(one.busy.steps for one in self.samplers),
        )

    def _report(self) -> Simulated:
        before, after = self.marks
        counted = tuple(self.steps[self.first : self.first + self.counted])
        span, number = after.time - before.time, len(counted)
        return Simulated(
            steps=counted,
            seconds=span / number,
            trainer_busy=_share(after.trainer - before.trainer, span),
            sampler_busy=_share(after.sampler - before.sampler, span * len(self.samplers)),
            loop_busy=_share(after.loop - before.loop, span),
            log_busy=_share(after.log - before.log, span),
            environment_seconds=(after.environments - before.environments) / number,
            changes=_share(
                sum(one.busy.changes for one in self.samplers), sum(one.busy.decode_steps for one in self.samplers)
            ),
            rows=_share(after.sampled - before.sampled, after.sampler_steps - before.sampler_steps),
            log_bytes=(after.log_bytes - before.log_bytes) / number,
            tasks={name: self.tasks[name] for name in ("trained", "unfinished", "stale")},
        )


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _pairs(length: float) -> float:
    return length * (length + 1) / 2
