"""``envgrad plan`` behind its command line: a split of the devices, or the best one, and where such a run saturates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from envgrad.errors import ConfigurationError
from envgrad.scaling.analytic import StepEstimate, estimate
from envgrad.scaling.costs import Costs
from envgrad.scaling.measured import measured_costs, measured_machines
from envgrad.scaling.memory import SamplerMemory, TrainerMemory
from envgrad.scaling.roofline import Machines, size_up
from envgrad.scaling.shapes import ModelShape
from envgrad.scaling.simulated import Simulated
from envgrad.scaling.simulation import simulate
from envgrad.scaling.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturation:
    """How near one part of the pipeline is to its end."""

    part: str
    share: float
    """of a step's time, or of a capacity, that is used; 1 is all of it"""
    figure: str
    """the same in its own unit"""
    full_at: str
    """what would use all of it, if all else stayed as it is"""
    then: str
    """what happens there, and what can be done"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run will take.

    Example:
        >>> from envgrad.scaling.hardware import Reached, accelerator
        >>> from envgrad.scaling.shapes import SHAPES
        >>> from envgrad.scaling.workload import Draw
        >>> load = Workload(groups=16, siblings=8, turns=Draw(mean=4), prompt_tokens=500, turn_tokens=Draw(mean=200),
        ...     latency=Draw(mean=2.0))
        >>> machines = Machines(gpu=accelerator("h100"), gpus=16, trainers=8, reached=Reached())
        >>> plan = make_plan(SHAPES["8B"], load, machines)
        >>> plan.step.limit, plan.sampler.devices, plan.costs.replicas
        ('samplers', 1, 8)
    """

    shape: ModelShape
    load: Workload
    machines: Machines
    trainer: TrainerMemory
    sampler: SamplerMemory
    checkpointing: bool
    """activation checkpointing"""
    costs: Costs
    step: StepEstimate

    @property
    def saturation(self) -> list[Saturation]:
        """Every part that can be full, the fullest first."""
        return sorted(_saturation(self), key=lambda one: -one.share)

    def price(self, per_hour: float) -> float:
        """Of one step, at this price of a device for an hour.

        Raises:
            ConfigurationError: a negative price.
        """
        if per_hour < 0:
            raise ConfigurationError(f"--price-per-hour {per_hour} must be at least 0: the price of one device")
        return per_hour * self.machines.gpus * self.step.seconds / 3600

    def simulate(self, steps: int | None = None) -> Simulated:
        """The same in simulated time; by default as many steps as rounds are in flight, and at least two.

        Raises:
            ConfigurationError: simpy is not installed.
        """
        return simulate(self.load, self.costs, steps=steps or max(2, self.load.rounds_in_flight))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        machines = asdict(self.machines)
        del machines["reached"]
        return {
            "model": {"name": self.shape.name, "parameters": self.shape.parameters},
            "machines": machines,
            "workload": self.load.as_dict(),
            "step": asdict(self.step),
            "memory": {
                "trainer": asdict(self.trainer)
                | {"total": self.trainer.total(checkpointing=self.checkpointing), "checkpointing": self.checkpointing},
                "sampler": asdict(self.sampler),
            },
            "replicas": self.costs.replicas,
            "saturation": [asdict(one) for one in self.saturation],
            "costs": self.costs.as_dict(),
        }


def make_plan(shape: ModelShape, load: Workload, machines: Machines, measured: Mapping[str, Any] | None = None) -> Plan:
    """The plan of one split.

    Args:
        shape: The model.
        load: A step.
        machines: Devices, and how many of them train.
        measured: A file's content (``measured.read_measured``).

    Raises:
        ConfigurationError: the model does not fit.
    """
    if measured is not None:
        machines = measured_machines(machines, measured)
    sized = size_up(shape, load, machines)
    costs = sized.costs if measured is None else measured_costs(sized.costs, measured)
    return Plan(
        shape=shape,
        load=load,
        machines=machines,
        trainer=sized.trainer,
        sampler=sized.sampler,
        checkpointing=sized.checkpointing,
        costs=costs,
        step=estimate(load, costs),
    )


def best_plan(make: Callable[[int], Plan], gpus: int) -> Plan:
    """The quickest step over the numbers of devices that train; of equal ones, that with fewest.

    Args:
        make: The plan with so many that train.
        gpus: All devices.

    Raises:
        ConfigurationError: no split fits; the error is that of an even split.

    Example:
        >>> from types import SimpleNamespace as Fake
        >>> best_plan(lambda trainers: Fake(step=Fake(seconds=abs(trainers - 3))), 8).step.seconds
        0
    """
    if gpus == 1:
        return make(1)
    best: Plan | None = None
    for trainers in _splits(gpus):
        try:
            plan = make(trainers)
        except ConfigurationError:
            continue
        if best is None or plan.step.seconds < best.step.seconds * (1 - 1e-3):
            best = plan
    return make(max(1, gpus // 2)) if best is None else best


def _splits(gpus: int) -> list[int]:
    """All numbers that train, of few devices; of many, sixteenths and whole machines of 8."""
    if gpus <= 16:
        return list(range(1, gpus))
    unit = 8 if gpus <= 256 else gpus // 32
    return [1, 2, 4, *range(unit, gpus, unit)]


def _saturation(plan: Plan) -> list[Saturation]:
    step, load, costs = plan.step, plan.load, plan.costs
    rows = load.in_flight / costs.replicas
    played = load.episodes * (load.turns.mean + 1) / step.seconds
    found = [
        Saturation(
            part="trainer",
            share=step.trainer_busy,
            figure=f"{step.training:,.1f} s of {step.seconds:,.1f} s a step",
            full_at=_environments(load, step.trainer_busy),
            then="the others wait: more devices that train",
        ),
        Saturation(
            part="samplers",
            share=step.sampler_busy,
            figure=f"{costs.replicas:,} replicas, {step.episode.rows:,.0f} rows each",
            full_at=_environments(load, step.sampler_busy),
            then="the others wait: more devices that sample",
        ),
        Saturation(
            part="environments",
            share=min(1.0, step.environments / load.in_flight),
            figure=f"{step.environments:,.0f} of {load.in_flight:,} work at once",
            full_at="never: they wait for answers too",
            then="the others wait: more at once (--concurrency, --max-staleness), or quicker ones",
        ),
        Saturation(
            part="keys and values",
            share=rows / costs.sampler.max_rows,
            figure=f"{rows:,.0f} rows in flight of {costs.sampler.max_rows:,} that fit",
            full_at=_environments(load, rows / costs.sampler.max_rows),
            then="episodes whose environment works lose their rows, and read them again",
        ),
        Saturation(
            part="episode loop",
            share=step.loop_busy,
            figure=f"{played:,.0f} turns and starts a second",
            full_at=_environments(load, step.loop_busy),
            then="one thread plays all episodes of a process: more processes, each with its share of groups",
        ),
        *_stored(plan),
    ]
    if load.asynchronous:
        rounds = load.in_flight / load.episodes
        wanted = (step.episode.total + step.training + step.publish) / (step.training + step.publish)
        found.append(
            Saturation(
                part="buffer",
                share=wanted / rounds,
                figure=f"{rounds:,.1f} rounds in flight; {wanted:,.1f} would hide the rollouts",
                full_at=f"max_staleness={max(1, math.ceil(wanted) - 1):,}",
                then="rollouts run no further ahead than max_staleness: the trainer waits, and no group is lost",
            )
        )
    return found


def _stored(plan: Plan) -> list[Saturation]:
    """Weights, checkpoints and the log."""
    step, storage = plan.step, plan.costs.storage
    every = f"every {storage.checkpoint_every} steps" if storage.checkpoint_every else "never"
    hourly = step.log_bytes / step.seconds * 3600
    return [
        Saturation(
            part="weight publish",
            share=step.publish / step.seconds,
            figure=f"{step.publish:,.1f} s a step",
            full_at=f"steps of {step.publish:,.1f} s",
            then="the trainer waits and samplers pause: larger steps, adapters alone, a faster network",
        ),
        Saturation(
            part="checkpoint",
            share=step.checkpoint / step.seconds,
            figure=f"{storage.checkpoint:,.0f} s, {every}",
            full_at=f"steps of {step.checkpoint:,.1f} s",
            then="the trainer waits for the disk: save less often, or to a faster one",
        ),
        Saturation(
            part="episode log",
            share=step.log_busy,
            figure=f"{step.log_bytes / 1e6:,.0f} MB a step, {hourly / 1e9:,.1f} GB an hour",
            full_at=_environments(plan.load, step.log_busy),
            then="the trainer waits for it from 8 rounds on; beyond episode_log_gb the oldest episodes go",
        ),
    ]


def _environments(load: Workload, share: float) -> str:
    return f"{load.in_flight / share:,.0f} environments" if share > 0 else "never"
