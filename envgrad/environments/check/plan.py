"""Which tasks are played and what is done in them: decided by the seed alone."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envgrad.environments.check.actions import Action, Say, random_call, random_text
from envgrad.environments.check.bench import Bench
from envgrad.environments.check.game import Game, Trajectory
from envgrad.environments.spec import EnvironmentSpec
from envgrad.environments.start import StartFingerprint
from envgrad.environments.state_walk import Node, Opaque, Snapshot
from envgrad.environments.tasks import build_task_stream, hash63
from envgrad.types import Task

Row = Mapping[str, Any]

GENERATORS = frozenset({"Random", "SystemRandom", "Generator", "RandomState", "PCG64", "MT19937", "Philox", "SFC64"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is played."""

    rows: tuple[Row, ...]
    groups: int
    turns: int
    seed: int

    def tasks(self, spec: EnvironmentSpec, count: int, split: str = "train") -> list[Task]:
        """The first tasks of a run, in their own order."""
        stream = build_task_stream(
            {spec.name: spec}, seed=self.seed, split=split, dataset=list(self.rows) or None, shuffle=False
        )
        return stream.take(count)

    def rng(self, *parts: int | str) -> random.Random:
        return random.Random(hash63("check", self.seed, *parts))

    def script(self, game: Game) -> list[Action]:
        """Valid, uninformed actions: the same ones for every task that opens with the same prompt and tools."""
        rng = self.rng("script")
        if game.tools:
            return [random_call(game.tools, game.prompt, rng) for _ in range(self.turns)]
        turns = self.turns if game.bench.spec.step_protocol else 1
        return [Say(random_text(game.prompt, rng)) for _ in range(turns)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A start and the whole episode behind it."""

    start: StartFingerprint
    trajectory: Trajectory


async def play_on(bench: Bench, plan: Plan, instance: object, task: Task) -> Played:
    """Reset ``instance`` to ``task`` and play the script."""
    game = await Game.open(bench, instance, task)
    start = await game.picture()
    return Played(start=start, trajectory=await game.play(plan.script(game)))


async def play_fresh(bench: Bench, plan: Plan, task: Task) -> Played:
    """The same on a new instance, closed behind it."""
    instance = await bench.make()
    played = await play_on(bench, plan, instance, task)
    await bench.close(instance)
    return played


def task_of(start: StartFingerprint, task: Task) -> tuple[Snapshot, Snapshot, Snapshot]:
    """A start without what tells ids and not tasks: the ids themselves, the split's name, and generators' states.

    Two tasks that open alike are told apart by the rest of the state.
    """
    ids: frozenset[object] = frozenset({task.seed, task.group_id, task.split})
    return start.messages, start.tools, _without(start.state, ids)


def _without(value: Snapshot, ids: frozenset[object]) -> Snapshot:
    if isinstance(value, Node):
        items = value.items
        if isinstance(items, dict):
            return Node(value.kind, {key: _without(item, ids) for key, item in items.items()}, value.by_name)
        if isinstance(items, tuple):
            return Node(value.kind, tuple([_without(item, ids) for item in items]), value.by_name)
        return value
    if isinstance(value, Opaque):
        return Opaque(value.kind, None) if value.kind in GENERATORS else value
    if isinstance(value, int | str) and value in ids:
        return None
    if isinstance(value, float) and value != value:
        return "NaN"  # equal to itself, here
    return value


def shown(names: Sequence[str]) -> str:
    """Names for a sentence.

    Example:
        >>> shown(["a"]), shown(["a", "b", "c"])
        ('a', 'a, b and c')
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""
