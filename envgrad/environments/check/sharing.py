"""Isolation: what one instance does must not reach another, nor the process around it."""

from __future__ import annotations

import asyncio
import os
import sys
import types
from collections import deque
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from envgrad.environments.check.bench import LIBRARIES, Bench
from envgrad.environments.check.game import Game
from envgrad.environments.check.plan import Plan, play_fresh, shown
from envgrad.environments.check.report import Level, Rule
from envgrad.environments.check.stand_in import with_stand_in
from envgrad.environments.isolation import detect_global_draws
from envgrad.environments.start import compare_starts
from envgrad.environments.state_walk import Snapshot, Walker, first_difference
from envgrad.types import Task

_VALUES = (int, float, str, bytes, bytearray, list, dict, set, frozenset, tuple, deque, type(None))
_CONTAINERS = (bytearray, list, dict, set, deque)
_OWN = {
    "random": "self.random = random.Random(seed)",
    "numpy": "self.random = numpy.random.default_rng(seed)",
    "torch": "self.random = torch.Generator().manual_seed(seed)",
}
"""what an environment draws from instead of a library's global generator"""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """A picture of what all instances of a class share: attributes of the class and globals of its module."""

    values: Mapping[str, Snapshot]
    of_class: frozenset[str]
    """those that are containers on the class"""
    folder: str
    variables: Mapping[str, str]

    @classmethod
    def of(cls, kind: type) -> Surroundings:
        values: dict[str, Snapshot] = {}
        of_class: set[str] = set()
        modules: dict[str, types.ModuleType] = {}
        for base in kind.__mro__[:-1]:
            module = sys.modules.get(base.__module__)
            if base is not kind and (module is None or _is_library(module)):
                continue  # a library's caches are its own
            if module is not None:
                modules[base.__module__] = module
            for name, value in list(vars(base).items()):
                if not name.startswith("__") and _is_state(value, base.__module__):
                    path = f"{base.__name__}.{name}"
                    values[path] = Walker().walk(value, path)
                    if not isinstance(value, int | float | str | bytes | type(None)):
                        of_class.add(path)
        for module in modules.values():
            for name, value in list(vars(module).items()):
                if not name.startswith("__") and _is_state(value, module.__name__):
                    path = f"{module.__name__}.{name}"
                    values[path] = Walker().walk(value, path)
        return cls(values, frozenset(of_class), os.getcwd(), dict(os.environ))

    def changed(self, after: Surroundings) -> list[str]:
        """What is different afterwards, class attributes first."""
        names = [name for name, value in self.values.items() if _differs(value, after.values.get(name), name)]
        return [*names, *(name for name in after.values if name not in self.values)]


def _is_library(module: types.ModuleType) -> bool:
    return (module.__file__ or "").startswith(LIBRARIES)


def _is_state(value: object, module: str) -> bool:
    """Whether ``value`` can hold state: plain data, or an instance of a class of the same module."""
    if isinstance(value, type | types.FunctionType | property | staticmethod | classmethod):
        return False
    return type(value) in _VALUES or isinstance(value, _CONTAINERS) or type(value).__module__ == module


def _differs(first: Snapshot, other: Snapshot, path: str) -> bool:
    return first_difference(first, other, path) is not None


async def check_sharing(bench: Bench, plan: Plan, tasks: list[Task]) -> list[str]:
    """Play one instance and look at another, at the class and at the process. Returns what changed on the class and
    its module."""
    instance = await bench.make()
    before = Surroundings.of(type(instance))
    played = await Game.open(bench, instance, tasks[0])
    other = await Game.open(bench, await bench.make(), tasks[-1])
    middle, start = Surroundings.of(type(instance)), await other.picture()
    await played.play(plan.script(played))
    difference = compare_starts(start, await other.picture())
    after = Surroundings.of(type(played.instance))
    if difference is not None:
        bench.find(
            Level.BREACH,
            Rule.SHARED,
            difference.partition(":")[0].partition("[")[0],
            f"playing one instance changed another one's {difference}.",
            "Make it anew in reset: a mutable default argument or a class attribute is one object for all instances.",
        )
    _find_process_changes(bench, before, after)
    await bench.close(played.instance)
    await bench.close(other.instance)
    changed = list(dict.fromkeys([*before.changed(middle), *middle.changed(after)]))
    for name in changed:
        on_class = name in after.of_class
        bench.find(
            Level.WARNING if on_class else Level.NOTE,
            Rule.SHARED,
            name,
            "it changed while an episode was played, and all instances share it.",
            "Keep an episode's state on the instance, and make it anew in reset. A cache or a counter may stay.",
        )
    return changed


def _find_process_changes(bench: Bench, before: Surroundings, after: Surroundings) -> None:
    fix = "Give paths and settings to what needs them instead: all episodes run in one process."
    if before.folder != after.folder:
        seen = f"the working folder changed from {before.folder} to {after.folder}."
        bench.find(Level.WARNING, Rule.PROCESS, "the working folder", seen, fix)
    names = sorted({*before.variables, *after.variables})
    names = [name for name in names if before.variables.get(name) != after.variables.get(name)]
    if names:
        seen = f"playing an episode changed {shown(names)}."
        bench.find(Level.WARNING, Rule.PROCESS, "os.environ", seen, fix)


async def check_global_draws(bench: Bench, plan: Plan, task: Task) -> None:
    """Play an episode and see whether the process's own random generators were drawn from."""
    # In a loop of its own, and so in one sync call: the generators are looked at right before and right behind it.
    at_start = await bench.apart(partial(detect_global_draws, partial(_apart, _start(bench, task))))
    in_all = await bench.apart(partial(detect_global_draws, partial(_apart, play_fresh(bench, plan, task))))
    early = at_start if isinstance(at_start, frozenset) else frozenset()
    names = sorted(early | in_all) if isinstance(in_all, frozenset) else []
    if not names:
        return
    bench.isolated = bool(early)
    bench.find(
        Level.WARNING,
        Rule.GLOBAL_RANDOM,
        shown(names),
        f"an episode draws from the process's own generator of {shown(names)}, which all episodes share. "
        + (
            "Training gives each instance a stream of its own, and runs one call at a time for it."
            if early
            else "It does so behind its start, where training finds it only with isolate_generators='always'."
        ),
        f"Make one of its own in reset(self, seed): {', '.join(_OWN[name] for name in names)}.",
    )


async def _start(bench: Bench, task: Task) -> None:
    instance = await bench.make()
    await Game.open(bench, instance, task)
    await bench.close(instance)


def _apart(play: Coroutine[Any, Any, object]) -> object:
    return asyncio.run(with_stand_in(play))
