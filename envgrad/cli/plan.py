"""``envgrad plan``: what a run will take on machines that nobody has started yet."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from envgrad.cli.text import figure, printable
from envgrad.errors import ConfigurationError

if TYPE_CHECKING:
    from envgrad.scaling.plan import Plan
    from envgrad.scaling.simulated import Simulated

_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "": 1.0}
_LIMITS = {
    "trainer": "Samplers and environments wait for the trainer",
    "samplers": "The trainer waits for the samplers",
    "environments": "The trainer waits for environments",
    "loop": "All wait for the one thread that plays episodes",
    "log": "All wait for the episode log, from the time on when 8 rounds wait to be written",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What is planned."""

    model: str
    gpus: int = 1
    gpu: str = "h100"
    trainer_gpus: int | None = None
    groups: int = 32
    siblings: int = 8
    turns: float = 4.0
    prompt_tokens: int = 500
    turn_tokens: float = 200.0
    result_tokens: int = 100
    environment_latency: str = "1s"
    spread: float = 0.5
    concurrency: int | None = None
    asynchronous: bool = False
    max_staleness: int = 1
    microbatch_tokens: int = 8192
    save_steps: int = 100
    log_episodes: bool = True
    network: float = 25.0
    disk: float = 2.0
    measured: Path | None = None
    price_per_hour: float | None = None
    steps: int | None = None
    simulate: bool = False
    as_json: bool = False


def run_plan(request: PlanRequest) -> None:
    """Plan, and print tables or JSON.

    Raises:
        ConfigurationError: what does not fit, or cannot be read.
    """
    plan = plan_of(request)
    simulated = plan.simulate() if request.simulate else None
    if request.as_json:
        typer.echo(json.dumps(described(request, plan, simulated), indent=2, allow_nan=False))
    else:
        show_plan(Console(), request, plan, simulated)


def duration(text: str) -> float:
    """Seconds of ``2``, ``2s``, ``500ms``, ``1.5m`` or ``1h``.

    Example:
        >>> duration("500ms"), duration("2"), duration("1.5m")
        (0.5, 2.0, 90.0)

    Raises:
        ConfigurationError: it is none of these.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|min|m|h|)\s*", text)
    if found is None:
        raise ConfigurationError(f"--environment-latency {text!r} is no duration: write 2s, 500ms, 1.5m or 1h")
    return float(found[1]) * _UNITS[found[2]]


def plan_of(request: PlanRequest) -> Plan:
    """The plan, of the best split where none is given.

    Raises:
        ConfigurationError: what does not fit, or cannot be read.
    """
    from envgrad.scaling.hardware import Reached, accelerator
    from envgrad.scaling.measured import read_measured
    from envgrad.scaling.plan import best_plan, make_plan
    from envgrad.scaling.roofline import Machines
    from envgrad.scaling.shapes import shape_of
    from envgrad.scaling.workload import Draw, Workload

    load = Workload(
        groups=request.groups,
        siblings=request.siblings,
        turns=Draw(mean=request.turns),
        prompt_tokens=request.prompt_tokens,
        turn_tokens=Draw(mean=request.turn_tokens, cv=request.spread),
        result_tokens=request.result_tokens,
        latency=Draw(mean=duration(request.environment_latency), cv=request.spread),
        concurrency=request.concurrency,
        asynchronous=request.asynchronous,
        max_staleness=request.max_staleness,
    )
    shape, gpu = shape_of(request.model), accelerator(request.gpu)
    measured = None if request.measured is None else read_measured(request.measured)
    reached = Reached(network=request.network * 1e9, disk=request.disk * 1e9)

    def make(trainers: int) -> Plan:
        machines = Machines(
            gpu=gpu, gpus=request.gpus, trainers=trainers, reached=reached, microbatch=request.microbatch_tokens,
            checkpoint_every=request.save_steps, log_episodes=request.log_episodes,
        )  # fmt: skip
        return make_plan(shape, load, machines, measured)

    return best_plan(make, request.gpus) if request.trainer_gpus is None else make(request.trainer_gpus)


def described(request: PlanRequest, plan: Plan, simulated: Simulated | None) -> dict[str, Any]:
    """The plan as JSON has it."""
    found: dict[str, Any] = _finite(plan.as_dict())
    found["split_chosen"] = request.trainer_gpus is None
    if request.price_per_hour is not None:
        found["price_per_step"] = plan.price(request.price_per_hour)
        if request.steps is not None:
            found["price"] = request.steps * plan.price(request.price_per_hour)
    if simulated is not None:
        found["simulated"] = _finite(simulated.as_dict())
    return found


def _finite(data: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(data, dict):
        return {name: _finite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


# -- as tables


def show_plan(console: Console, request: PlanRequest, plan: Plan, simulated: Simulated | None) -> None:
    """Who does what, the step's time, memory, what is nearest to its end, and where figures come from."""
    load, machines = plan.load, plan.machines
    console.print(Text(_headline(request, plan), style="bold"))
    how = f"asynchronous, max_staleness={load.max_staleness}" if load.asynchronous else "synchronous"
    console.print(
        Text(
            f"{load.groups} groups of {load.siblings}: {load.episodes:,} episodes a step, {load.in_flight:,} in "
            f"flight, {load.row_tokens:,.0f} tokens a row; {how}"
        )
    )
    _show_times(console, plan, simulated)
    console.print(Padding(Text(f"{_LIMITS[plan.step.limit]}. {_advice(plan)}".strip()), (0, 0, 1, 0)))
    _show_memory(console, plan)
    _show_saturation(console, plan)
    if request.price_per_hour is not None:
        price = plan.price(request.price_per_hour)
        of = "" if request.steps is None else f"; {request.steps * price:,.2f} for {request.steps:,} steps"
        console.print(Text(f"A step costs {price:,.4f} at {request.price_per_hour:g} a device and hour{of}."))
    console.print(Text("Where these figures come from", style="bold"))
    for name, source in plan.costs.sources.items():
        console.print(Padding(Text(f"{name}: {printable(source)}", style="dim"), (0, 0, 0, 2)))
    if machines.gpus > 8 and request.measured is None:
        warning = "Nothing of this was measured on such machines. Give --measured for figures of your own."
        console.print(Text(warning, style="yellow"))


def _headline(request: PlanRequest, plan: Plan) -> str:
    machines, sampler = plan.machines, plan.sampler
    name = printable(machines.gpu.name)
    count = plan.shape.parameters
    size = f"{count / 1e9:.2f} billion" if count >= 1e8 else f"{count / 1e6:.1f} million"
    model = f"{printable(plan.shape.name)} ({size} parameters)"
    if machines.shared:
        return f"{model} on one {name}, which trains and samples in turn"
    chosen = "the best split" if request.trainer_gpus is None else "as given"
    replicas = f"{plan.costs.replicas} replica{'s' * (plan.costs.replicas > 1)} of {sampler.devices}"
    return (
        f"{model} on {machines.gpus} x {name}: {machines.trainers} train, {machines.samplers} sample ({replicas}; "
        f"{chosen})"
    )


def _table(*titles: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    for number, title in enumerate(titles):
        right = number and number < len(titles) - 1
        table.add_column(title, justify="right" if right else "left", no_wrap=bool(right), overflow="fold")
    return table


def _show_times(console: Console, plan: Plan, simulated: Simulated | None) -> None:
    step, last = plan.step, "simulated" if simulated is not None else ""
    table = _table("seconds", "planned", last, "")
    beside = " (beside training)" if plan.load.asynchronous else ""

    def row(name: str, value: float, other: float | None, note: str = "") -> None:
        table.add_row(name, figure(value), "" if other is None or simulated is None else figure(other), note)

    found = simulated
    row("rollouts" + beside, step.rollout, None if found is None or beside else found.mean("waiting"))
    row("training", step.training, None if found is None else found.mean("training"))
    row("weight publish", step.publish, None if found is None else found.mean("publish"))
    row("checkpoint, each step's share", step.checkpoint, None if found is None else found.mean("checkpoint"))
    row("a step", step.seconds, None if found is None else found.seconds, f"{3600 / step.seconds:,.1f} steps an hour")
    rows = step.episode
    environment = f"{rows.environment:.1f} s of it in its environment, {rows.rows:,.0f} rows decoded together"
    row("an episode", rows.total, None, environment)
    console.print(Padding(table, (1, 0)))


def _advice(plan: Plan) -> str:
    step, load = plan.step, plan.load
    if not load.asynchronous and step.trainer_busy < 0.8 and step.rollout > 0.2 * step.seconds:
        idle = 1 - step.trainer_busy
        return f"The trainer is idle for {idle:.0%} of the step: --asynchronous lets rollouts go on beside it."
    if load.asynchronous and step.limit == "environments":
        return "More staleness (--max-staleness) or more episodes in flight hide more of their latency."
    return ""


def _show_memory(console: Console, plan: Plan) -> None:
    trainer, sampler, gpu = plan.trainer, plan.sampler, plan.machines.gpu
    table = _table("memory of a device", "GB", "")

    def row(name: str, size: float, note: str = "") -> None:
        table.add_row(name, f"{size / 1e9:,.1f}", note)

    sharded = f"sharded over {plan.machines.trainers}" if plan.machines.trainers > 1 else "whole"
    row("training: weights, gradients", trainer.weights + trainer.gradients, sharded)
    row("training: optimizer", trainer.optimizer)
    if trainer.gathered:
        row("training: gathered layers", trainer.gathered)
    kept = trainer.activations_checkpointed if plan.checkpointing else trainer.activations
    with_it = "with" if plan.checkpointing else "without"
    other = trainer.activations if plan.checkpointing else trainer.activations_checkpointed
    row(
        "training: activations", kept,
        f"{trainer.microbatch:,} tokens, {with_it} activation checkpointing (else {other / 1e9:,.1f})",
    )  # fmt: skip
    row("training: together", trainer.total(checkpointing=plan.checkpointing), f"of {gpu.memory / 1e9:,.0f}")
    row("sampling: weights", sampler.weights, f"cut over {sampler.devices}" if sampler.devices > 1 else "whole")
    row(
        "sampling: keys and values", sampler.kv_room,
        f"room for {plan.costs.sampler.max_rows:,} rows; {sampler.kv_wanted / 1e9:,.1f} if all in flight keep theirs",
    )  # fmt: skip
    console.print(Padding(table, (0, 0, 1, 0)))


def _show_saturation(console: Console, plan: Plan) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    table.add_column("what is used", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    for title in ("", "all of it at", "and then"):
        table.add_column(title, overflow="fold")
    for one in plan.saturation:
        table.add_row(one.part, f"{one.share:.0%}", one.figure, one.full_at, one.then)
    console.print(Padding(table, (0, 0, 1, 0)))
