"""Group starts: how siblings get one, and whether copies of an instance are equal, independent and complete."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from functools import partial

from envgrad.environments.boundary import Raised
from envgrad.environments.check.bench import Bench, contract_parts, method_of, told
from envgrad.environments.check.game import Game, first_change
from envgrad.environments.check.plan import Plan, shown
from envgrad.environments.check.report import Level, Rule
from envgrad.environments.copy_safety import attributes_of, copy_hazard
from envgrad.environments.start import StartMode, compare_starts, decide_start, fork_instance
from envgrad.environments.state_walk import Walker, first_difference
from envgrad.errors import EnvironmentContractError
from envgrad.types import Task

_CONTAINERS = (list, dict, set, bytearray)
_MAX_SHARED = 5


async def check_start(bench: Bench, game: Game) -> None:
    """Which start the library would use for the group of this task."""
    mode = await bench.value("its state", decide_start, bench.spec, game.task, game.instance)
    bench.start = mode if isinstance(mode, StartMode) else None
    if mode is StartMode.INDEPENDENT:
        hazard = await bench.value("its state", copy_hazard, game.instance)
        bench.find(
            Level.NOTE,
            Rule.START,
            "a group's start",
            f"siblings are reset one by one, since reset names no id and copying is not safe: {hazard}.",
            "Name 'seed' in reset, or define fork().",
        )
    not_compared = (await game.picture()).not_compared
    if not_compared:
        bench.find(
            Level.NOTE,
            Rule.START,
            "start_state",
            f"this part of the state cannot be compared: {shown(not_compared[:_MAX_SHARED])}.",
            "Define start_state() and return what makes the task, as plain data.",
        )


async def check_fork(bench: Bench, plan: Plan, task: Task) -> None:
    """Fork a started instance, play the fork, and look at both."""
    if not bench.spec.has_fork and bench.start is not StartMode.COPY:
        return
    member = "fork" if bench.spec.has_fork else "copy.deepcopy"
    game = await Game.open(bench, await bench.make(), task)
    start = await game.picture()
    outcome = await bench.outcome(member, fork_instance, game.instance)
    if isinstance(outcome, Raised):
        error = outcome.error
        why = contract_parts(error)[0] if isinstance(error, EnvironmentContractError) else f"{told(error)}."
        seen = f"it cannot make a sibling: {why}"
        bench.find(Level.BREACH, Rule.FORK, member, seen, "Return a new, independent instance in the same state.")
        return
    bench.adopt(outcome.value)
    fork = await game.forked(outcome.value)
    difference = compare_starts(start, await fork.picture())
    if difference is not None:
        fix = "Copy all state that makes the task."
        bench.find(Level.BREACH, Rule.FORK, member, f"a fork's state is not the original's: {difference}.", fix)
    shared = _shared_containers(game.instance, fork.instance) if bench.spec.has_fork else []
    played = await fork.play(plan.script(fork))
    difference = compare_starts(start, await game.picture())
    if difference is not None:
        seen = f"playing a fork changed the original's {difference}."
        bench.find(Level.BREACH, Rule.FORK, member, seen, "Copy lists, dicts and sets: copy.deepcopy(value).")
    elif shared:
        seen = f"original and fork hold the same {shown(shared[:_MAX_SHARED])}."
        bench.find(Level.NOTE, Rule.FORK, member, seen, "Copy what an episode changes; what none changes may stay.")
    change = first_change(played, await game.play(plan.script(game)))
    explained = bench.found(Rule.FORK) or bench.found(Rule.DETERMINISM) or bench.found(Rule.SHARED, Level.BREACH)
    bench.noisy |= change is not None and change.startswith("the reward")
    if change is not None and not explained:
        seen = f"original and fork answered the same actions differently: {change}."
        fix = "Copy the generators' states too. If chance is meant, declare determinism = 'none'."
        bench.find(Level.WARNING, Rule.FORK, member, seen, fix)
    await bench.close(fork.instance)
    await bench.close(game.instance)


def _shared_containers(first: object, other: object) -> list[str]:
    """Attributes that hold the same list, dict or set in both instances."""
    theirs = attributes_of(other)
    return [
        name
        for name, value in attributes_of(first).items()
        if isinstance(value, _CONTAINERS) and theirs.get(name) is value
    ]


async def check_pickle(bench: Bench, instance: object) -> None:
    """Whether a started instance can be sent to another process."""
    outcome = await bench.outcome("pickle", partial(pickle.dumps, instance))
    if isinstance(outcome, Raised):
        bench.find(
            Level.NOTE,
            Rule.PICKLE,
            "pickle",
            f"an instance cannot be pickled: {told(outcome.error)}.",
            "Nothing, as long as it runs in threads. To move instances between processes, define __getstate__.",
        )


async def check_state(bench: Bench, plan: Plan, tasks: list[Task]) -> None:
    """``state_dict`` of a played instance, loaded into a new one, gives the same state and the same next task."""
    if not bench.spec.has_state:
        return
    game = await Game.open(bench, await bench.make(), tasks[0])
    await game.play(plan.script(game))
    other = await bench.make()
    state = await bench.value("state_dict", method_of(game.instance, "state_dict"))
    if not isinstance(state, Mapping):
        seen = f"it returned the {type(state).__name__} {state!r:.80}."
        bench.find(Level.BREACH, Rule.STATE, "state_dict", seen, "Return a dict that a checkpoint can keep.")
        return
    packed = await bench.outcome("state_dict", lambda: pickle.loads(pickle.dumps(state)))
    if isinstance(packed, Raised):
        seen = f"what it returned cannot be saved: {told(packed.error)}."
        bench.find(Level.BREACH, Rule.STATE, "state_dict", seen, "Return plain data: numbers, strings, lists, dicts.")
        return
    await bench.value("load_state_dict", method_of(other, "load_state_dict"), packed.value)
    loaded = await bench.value("state_dict", method_of(other, "state_dict"))
    difference = first_difference(Walker().walk(state, "state"), Walker().walk(loaded, "state"), "state")
    if difference is not None:
        seen = (
            f"a state that was loaded comes back changed: {difference.path}: {difference.first} != {difference.other}."
        )
        bench.find(Level.BREACH, Rule.STATE, "load_state_dict", seen, "Take back all that state_dict gives.")
    here = await Game.open(bench, game.instance, tasks[-1])
    there = await Game.open(bench, other, tasks[-1])
    next_task = compare_starts(await here.picture(), await there.picture())
    explained = difference is not None or bench.found(Rule.START) or bench.found(Rule.REUSE)
    if next_task is not None and not explained:
        seen = f"after load_state_dict the next task is another one: {next_task}."
        bench.find(Level.WARNING, Rule.STATE, "state_dict", seen, "Keep what decides the next task in the state.")
    await bench.close(game.instance)
    await bench.close(other)
