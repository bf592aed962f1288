"""Costs from measured runs: least squares over what was counted, and two searches in simulated time.

A run is a dictionary as ``benchmarks/scaling.py`` writes it: its workload, seconds a step, phases, counts of tokens,
and the sampler's steps summed by kind. Costs of the sampler's steps and of training follow from sums alone. What the
thread of episodes takes, and how much sampling and training slow each other down, shows in no sum: it is what makes
simulated runs take as long as the measured ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

from envgrad.errors import ConfigurationError
from envgrad.scaling.costs import Costs, LoopCosts, SamplerCosts, TrainerCosts
from envgrad.scaling.simulated import Simulated
from envgrad.scaling.simulation import simulate
from envgrad.scaling.workload import Workload

WARM_UP = 4
"""steps of a measured run that were not counted"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """One configuration, its figures averaged over all times that it was measured."""

    name: str
    use: str
    """``fit`` or ``check``"""
    load: Workload
    """with the tokens that prompts and results had"""
    steps: int
    seconds: float
    """a step"""
    repeats: tuple[float, ...]
    """the same of each time that it was measured"""
    phases: Mapping[str, float]
    counts: Mapping[str, float]
    sampler: Sequence[Mapping[str, float | bool]]

    @property
    def rollout(self) -> float:
        """Seconds of a synchronous round."""
        return self.phases["rollout"]

    @property
    def training(self) -> float:
        """Seconds of a step in which the trainer neither waited for a round nor played one."""
        waited = self.phases.get("async/wait_seconds", 0.0) if self.load.asynchronous else self.rollout
        return self.seconds - waited


def read_runs(data: Mapping[str, Any]) -> list[MeasuredRun]:
    """The runs of a file that ``benchmarks/scaling.py`` wrote.

    Raises:
        ConfigurationError: it is another file.
    """
    try:
        return [_read_run(run) for run in data["runs"]]
    except (KeyError, TypeError) as error:
        raise ConfigurationError(
            f"these are no measured runs ({type(error).__name__}: {error}): write them with "
            "`python -m benchmarks.scaling --measure FILE`"
        ) from error


def _read_run(run: Mapping[str, Any]) -> MeasuredRun:
    passes = run["passes"]
    counts = _means([one["counts"] for one in passes])
    load = Workload.from_dict(run["load"])
    return MeasuredRun(
        name=run["name"],
        use=run["use"],
        load=replace(load, prompt_tokens=round(counts["prompt"]), result_tokens=round(counts["result"])),
        steps=len(passes[0]["steps"]),
        seconds=fmean(fmean(one["steps"]) for one in passes),
        repeats=tuple(fmean(one["steps"]) for one in passes),
        phases=_means([one["phases"] for one in passes]),
        counts=counts,
        sampler=[row for one in passes for row in one["sampler"]],
    )


def _means(many: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: fmean(one[name] for one in many) for name in many[0]}


def fit(runs: Sequence[MeasuredRun]) -> Costs:
    """Costs of the model and the machine on which ``runs`` were measured; only those whose use is ``fit`` are read.

    Raises:
        ConfigurationError: no synchronous run among them.
    """
    used = [run for run in runs if run.use == "fit"]
    inline = [run for run in used if not run.load.asynchronous]
    beside = [run for run in used if run.load.asynchronous]
    if not inline:
        raise ConfigurationError("a fit needs synchronous runs: none is among those given")
    sampler = fit_sampler(inline)
    for _ in range(2):  # how often rows change shows in no sum either
        trial = Costs(sampler=sampler, trainer=TrainerCosts(step=1.0), local=True)
        sampler = fit_sampler(inline, [_shortly(run, trial).changes for run in inline])
    measured = "measured: fitted on " + ", ".join(run.name for run in used)
    costs = Costs(
        sampler=sampler,
        trainer=fit_trainer(inline),
        local=True,
        sources=dict.fromkeys(("sampler", "trainer", "loop", "publish"), measured),
    )
    costs = _fit_loop(inline, costs)
    return _fit_competition(beside, costs) if beside else costs


def fit_sampler(runs: Sequence[MeasuredRun], changes: Sequence[float] | None = None) -> SamplerCosts:
    """From the sums of steps beside which nothing was trained.

    Args:
        runs: Synchronous ones.
        changes: Of each, the share of decoding steps that had other rows than the step before; None: unknown.
    """
    table, values = [], []
    for run, share in zip(runs, changes or [0.0] * len(runs), strict=True):
        for row in run.sampler:
            if not row["beside_training"]:
                steps = float(row["steps"])
                kinds = (steps, 0.0) if row["prefilling"] else (0.0, share * steps)
                table.append([steps, float(row["rows"]), read_once(run.load, row), float(row["prefill"]), *kinds])
                values.append(float(row["seconds"]))
    step, row_cost, context, prefill, prefill_step, change = least_squares(table, values)
    return SamplerCosts(
        step=step, row=row_cost, context=context, prefill=prefill, prefill_step=prefill_step, change=change,
        shares_prompts=True,
    )  # fmt: skip


def read_once(load: Workload, row: Mapping[str, float | bool]) -> float:
    """Tokens of keys and values that steps read, a group's prompt once for those of its rows that are expected there.

    Example: 10 steps of 4 rows of 100 tokens behind prompts of 60, all of one group.
        >>> from envgrad.scaling.workload import Draw
        >>> load = Workload(groups=1, siblings=4, turns=Draw(mean=1), prompt_tokens=60, turn_tokens=Draw(mean=40))
        >>> read_once(load, {"steps": 10, "rows": 40, "context": 4000})
        2200.0
    """
    each = float(row["rows"]) / float(row["steps"])
    groups = load.in_flight // load.siblings
    share = min(1.0, each / load.in_flight)
    present = min(each, groups * (1 - (1 - share) ** load.siblings))
    return float(row["context"]) - (float(row["rows"]) - present * float(row["steps"])) * load.prompt_tokens


def fit_trainer(runs: Sequence[MeasuredRun]) -> TrainerCosts:
    """Passes by tokens and pairs; all else by steps and episodes."""
    passes = [run.phases["forward_backward"] for run in runs]
    token, pair, fixed = least_squares([[run.counts["forwarded"], run.counts["pairs"], 1.0] for run in runs], passes)
    rest = [run.training - one for run, one in zip(runs, passes, strict=True)]
    step, episode = least_squares([[1.0, run.counts["episodes"]] for run in runs], rest)
    return TrainerCosts(step=step + fixed, episode=episode, token=token, pair=pair)


def least_squares(table: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Coefficients, none below 0, with the least squares of relative differences, each weighted by its value.

    Example:
        >>> [round(one, 6) for one in least_squares([[1.0, 1.0], [1.0, 2.0], [1.0, 4.0]], [3.0, 5.0, 9.0])]
        [1.0, 2.0]
        >>> [round(one, 6) for one in least_squares([[1.0, 1.0], [1.0, 2.0]], [2.0, 1.0])]  # not 3 and -1
        [1.333333, 0.0]
    """
    import numpy

    weights = numpy.array([1.0 / math.sqrt(value) if value > 0 else 0.0 for value in values])
    matrix = numpy.array(table) * weights[:, None]
    scale = numpy.abs(matrix).max(axis=0)
    scale[scale == 0] = 1.0
    wanted = numpy.array(values) * weights
    kept = list(range(matrix.shape[1]))
    found = numpy.zeros(matrix.shape[1])
    while kept:
        solved = numpy.linalg.lstsq((matrix / scale)[:, kept], wanted, rcond=None)[0]
        if (solved >= 0).all():
            found[kept] = solved
            break
        kept.pop(int(solved.argmin()))
    return [float(one) for one in found / scale]


# -- what only a simulation shows


def _fit_loop(runs: Sequence[MeasuredRun], costs: Costs) -> Costs:
    """Seconds of the thread of episodes, for each turn and each episode, with which rounds last as long as measured."""

    def error(turn: float, episode: float) -> float:
        trial = replace(costs, loop=LoopCosts(turn=turn, episode=episode))
        return sum(math.log(_shortly(run, trial).mean("waiting") / run.rollout) ** 2 for run in runs)

    turn = episode = 1e-3
    for _ in range(2):
        turn = _lowest(partial(error, episode=episode), 0.0, 6e-3)
        episode = _lowest(partial(error, turn), 0.0, 2e-2)
    return replace(costs, loop=LoopCosts(turn=turn, episode=episode))


def _fit_competition(runs: Sequence[MeasuredRun], costs: Costs) -> Costs:
    """How much longer steps and training take beside each other."""
    rows = [row for run in runs for row in run.sampler if row["beside_training"]]
    took = sum(float(row["seconds"]) for row in rows)
    alone = 0.0
    for run in runs:
        changes = _simulated(run, costs).changes
        alone += sum(_alone(run.load, row, costs.sampler, changes) for row in run.sampler if row["beside_training"])
    costs = replace(costs, sampler_beside=max(1.0, took / alone))

    def error(value: float) -> float:
        trial = replace(costs, trainer_beside=value)
        return sum(math.log(_training(run, trial) / run.training) ** 2 for run in runs)

    return replace(costs, trainer_beside=_lowest(error, 1.0, 4.0))


def _alone(load: Workload, row: Mapping[str, float | bool], costs: SamplerCosts, changes: float) -> float:
    """Seconds of these steps if nothing went on beside them."""
    steps = float(row["steps"])
    more = costs.prefill_step * steps + costs.prefill * row["prefill"] if row["prefilling"] else 0.0
    more += 0.0 if row["prefilling"] else costs.change * changes * steps
    return costs.step * steps + costs.row * row["rows"] + costs.context * read_once(load, row) + more


def _training(run: MeasuredRun, costs: Costs) -> float:
    found = _simulated(run, costs)
    return found.seconds - found.mean("waiting")


def _simulated(run: MeasuredRun, costs: Costs) -> Simulated:
    return simulate(run.load, costs, steps=run.steps, warm_up=WARM_UP)


def _shortly(run: MeasuredRun, costs: Costs) -> Simulated:
    """The same as a mean over its steps; of a synchronous run in which nothing varies, any step will do."""
    if run.load.varies or run.load.asynchronous:
        return _simulated(run, costs)
    return simulate(run.load, costs, steps=1, warm_up=2)


def simulated_seconds(run: MeasuredRun, costs: Costs) -> float:
    """A step of ``run`` in simulated time: the same steps, with the same answers, as were measured."""
    return _simulated(run, costs).seconds


def _lowest(error: Callable[[float], float], low: float, high: float) -> float:
    """Where ``error`` is least, by golden section."""
    ratio = (math.sqrt(5) - 1) / 2
    inner = [high - ratio * (high - low), low + ratio * (high - low)]
    errors = [error(one) for one in inner]
    for _ in range(9):
        if errors[0] < errors[1]:
            high, inner, errors = inner[1], [0.0, inner[0]], [0.0, errors[0]]
            inner[0] = high - ratio * (high - low)
            errors[0] = error(inner[0])
        else:
            low, inner, errors = inner[0], [inner[1], 0.0], [errors[1], 0.0]
            inner[1] = low + ratio * (high - low)
            errors[1] = error(inner[1])
    return inner[errors.index(min(errors))]
