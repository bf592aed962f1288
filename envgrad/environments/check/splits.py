"""How many tasks there are, and whether training and evaluation share some."""

from __future__ import annotations

from dataclasses import dataclass, replace

from envgrad.environments.boundary import Raised
from envgrad.environments.check.bench import Bench, CallFailed, contract_parts, told
from envgrad.environments.check.game import Game, first_change
from envgrad.environments.check.plan import Plan, play_fresh, shown, task_of
from envgrad.environments.check.report import Determinism, Level, Rule
from envgrad.environments.start import StartMode
from envgrad.environments.state_walk import Snapshot
from envgrad.errors import EnvironmentContractError
from envgrad.types import Task

STARTS_PER_GROUP = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    task: Task
    key: tuple[Snapshot, Snapshot, Snapshot]


async def check_num_tasks(bench: Bench) -> None:
    """``num_tasks`` counts alike each time, gives training at least one task, and is of use to ``reset``.

    Raises:
        CallFailed: training has no task.
    """
    if bench.spec.num_tasks is None:
        return
    counts: dict[str, object] = {}
    for split in ("train", "eval"):
        outcome = await bench.outcome("num_tasks", bench.spec.num_tasks, split)
        again = await bench.outcome("num_tasks", bench.spec.num_tasks, split)
        if isinstance(outcome, Raised) or isinstance(again, Raised):
            error = outcome.error if isinstance(outcome, Raised) else again.error  # type: ignore[union-attr]
            level = Level.BREACH if split == "train" else Level.WARNING
            seen = contract_parts(error)[0] if isinstance(error, EnvironmentContractError) else told(error)
            bench.find(level, Rule.NUM_TASKS, "num_tasks", seen, "Return how many tasks 'train' and 'eval' have.")
            continue
        counts[split] = outcome.value
        if outcome.value != again.value:
            seen = f"num_tasks({split!r}) is {outcome.value} once and {again.value} once."
            bench.find(Level.BREACH, Rule.NUM_TASKS, "num_tasks", seen, "Count what does not change during a run.")
    if counts.get("train", 0) == 0:
        fix = "Return at least 1, or leave num_tasks out."
        raise bench.fail(Rule.NUM_TASKS, "num_tasks", "there is no task for training.", fix)
    if counts.get("eval") == 0:
        seen = "there is no task for evaluation: num_tasks('eval') is 0."
        bench.find(Level.NOTE, Rule.NUM_TASKS, "num_tasks", seen, "Set tasks aside for split='eval'.")
    if "task_index" not in bench.spec.reset_names and not bench.spec.reset_takes_all:
        seen = (
            "the environment counts its tasks, but reset does not name task_index, and so cannot tell which is meant."
        )
        bench.find(Level.WARNING, Rule.NUM_TASKS, "reset", seen, "Name it: def reset(self, task_index).")


async def check_last_task(bench: Bench, plan: Plan) -> None:
    """The last index of each split can be reset to: off-by-one errors show there."""
    if bench.spec.num_tasks is None or plan.rows:
        return
    for split in ("train", "eval"):
        outcome = await bench.outcome("num_tasks", bench.spec.num_tasks, split)
        count = 0 if isinstance(outcome, Raised) or not isinstance(outcome.value, int) else outcome.value
        if count > 0:
            task = replace(plan.tasks(bench.spec, 1, split)[0], task_index=count - 1)
            instance = await bench.make()
            try:
                await Game.open(bench, instance, task)
            except CallFailed as failed:
                bench.explain(failed, f"This was task_index {count - 1}, the last one of split={split!r}.")
                raise
            await bench.close(instance)


async def check_splits(bench: Bench, plan: Plan) -> None:
    """Compare the tasks of both splits, where the environment draws them by id.

    Two tasks are one if their openings, tools and states are equal but for ids and generators, and if the script plays
    equally on both.
    """
    if plan.rows or bench.start is not StartMode.IDENTITY or bench.determinism not in _BY_ID:
        return
    if not await _has_eval(bench):
        return
    trained = await _starts(bench, plan, "train")
    held_out = await _starts(bench, plan, "eval")
    pairs = [(a, b) for b in held_out for a in trained if a.key == b.key]
    if not pairs:
        return
    first, other = pairs[0]
    one, two = [await play_fresh(bench, plan, start.task) for start in (first, other)]
    if first_change(one.trajectory, two.trajectory) is not None:
        return
    shared = len({id(b) for _, b in pairs})
    seen = (
        f"{shared} of {len(held_out)} tasks of split='eval' are also among {len(trained)} of split='train', such as "
        f"{_name(first.task)} and {_name(other.task)}"
    )
    if "split" in bench.spec.reset_names:
        fix = "Draw from disjoint tasks: the library only sees to it that ids differ."
        bench.find(Level.BREACH, Rule.SPLIT, "reset", f"it names split, and {seen}.", fix)
    elif bench.spec.num_tasks is not None:
        fix = "Name split in reset and keep tasks for 'eval' that 'train' has not, or evaluate on data of its own."
        bench.find(Level.WARNING, Rule.SPLIT, "reset", f"it does not name split, and {seen}.", fix)
    else:
        fix = "Nothing, if the tasks are few. To measure generalization, name split in reset and set tasks aside."
        bench.find(Level.NOTE, Rule.SPLIT, "reset", f"it does not name split, and {seen}.", fix)


_BY_ID = (Determinism.TASK, Determinism.SEEDED)


async def _has_eval(bench: Bench) -> bool:
    if bench.spec.num_tasks is None:
        return True
    outcome = await bench.outcome("num_tasks", bench.spec.num_tasks, "eval")
    return not isinstance(outcome, Raised) and outcome.value != 0


async def _starts(bench: Bench, plan: Plan, split: str) -> list[_Start]:
    instance = await bench.make()
    starts: list[_Start] = []
    for task in plan.tasks(bench.spec, STARTS_PER_GROUP * plan.groups, split):
        if starts and task.epoch > 0:
            break  # a second pass over finite tasks
        picture = await (await Game.open(bench, instance, task)).picture()
        starts.append(_Start(task=task, key=task_of(picture, task)))
    await bench.close(instance)
    return starts


def _name(task: Task) -> str:
    ids = [f"{task.split} task {task.task_index}" if task.task_index is not None else f"seed {task.seed}"]
    return shown(ids)
