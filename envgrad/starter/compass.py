"""Compass: the environment of ``envgrad demo``, and exact baselines to hold an agent against."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias

Direction: TypeAlias = Literal["north", "east", "south", "west"]
Cell: TypeAlias = tuple[int, int]
"""``(x, y)``; x grows to the east, y to the north"""

SIZE = 4
MAX_MOVES = 6
STEPS: dict[Direction, Cell] = {"north": (0, 1), "east": (1, 0), "south": (0, -1), "west": (-1, 0)}


def walk(cell: Cell, direction: Direction) -> Cell:
    """The cell one step on; a wall leaves the agent where it is.

    Example:
        >>> walk((0, 0), "north"), walk((0, 0), "west")
        ((0, 1), (0, 0))
    """
    x, y = STEPS[direction]
    return min(max(cell[0] + x, 0), SIZE - 1), min(max(cell[1] + y, 0), SIZE - 1)


def bearing(cell: Cell, goal: Cell) -> str:
    """Where ``goal`` lies as seen from ``cell``: at most one of east and west, then at most one of north and south.

    Example:
        >>> bearing((0, 0), (2, 3)), bearing((3, 1), (3, 0))
        ('east north', 'south')
    """
    x, y = goal[0] - cell[0], goal[1] - cell[1]
    words = ("east" if x > 0 else "west" if x < 0 else "", "north" if y > 0 else "south" if y < 0 else "")
    return " ".join(word for word in words if word)


def _all_tasks() -> tuple[tuple[Cell, Cell], ...]:
    cells = [(x, y) for x in range(SIZE) for y in range(SIZE)]
    pairs = [(start, goal) for start in cells for goal in cells]
    # 2 or 3 apart: a blind first move may lead one step away, and the other five moves still reach the goal.
    return tuple((a, b) for a, b in pairs if 2 <= abs(a[0] - b[0]) + abs(a[1] - b[1]) <= 3)


TASKS = _all_tasks()
"""every (start, goal): 2 or 3 steps apart"""

HELD_OUT = tuple(random.Random("held out").sample(TASKS, len(TASKS) // 4))
"""those that only ``split="eval"`` draws"""
_TRAINED = tuple(task for task in TASKS if task not in set(HELD_OUT))


def draw_task(seed: int, split: str = "train") -> tuple[Cell, Cell]:
    """The start and the goal that ``seed`` stands for, uniform over the split's tasks; no task is in both splits."""
    return random.Random(seed).choice(HELD_OUT if split == "eval" else _TRAINED)


class Compass:
    """Reach an unseen goal on a 4x4 grid within six moves.

    The opening says nothing about the goal. Each move's reply says where it lies, so an agent that reads the replies
    can always succeed, and one that does not cannot.

    Example:
        >>> env = Compass()
        >>> env.reset(seed=5), env.cell, env.goal
        ('Reach the goal in six moves.', (3, 0), (3, 2))
        >>> env.move("west"), env.move("east"), env.move("north"), env.move("north")
        ('east north', 'north', 'north', 'goal')
        >>> env.done, env.get_reward()
        (True, 1.0)
    """

    def reset(self, seed: int, split: str = "train") -> str:
        self.cell, self.goal = draw_task(seed, split)
        self.moves = 0
        return "Reach the goal in six moves."

    def move(self, direction: Direction) -> str:
        """
        Move one step on the grid.

        Args:
            direction: Where to go.

        Returns:
            Where the goal lies from there.
        """
        self.moves += 1
        self.cell = walk(self.cell, direction)
        return bearing(self.cell, self.goal) or "goal"

    @property
    def done(self) -> bool:
        return self.cell == self.goal or self.moves >= MAX_MOVES

    def get_reward(self) -> float:
        return float(self.cell == self.goal)


@dataclass(frozen=True, slots=True, kw_only=True)
class Baselines:
    """Success rates on given tasks of policies that read nothing, each exact."""

    constant: float
    """the best policy that always moves the same way"""
    random: float
    """uniformly random moves, in expectation"""
    reply_blind: float
    """the fixed sequence of moves that is best on these very tasks, chosen with hindsight: no policy that does not read
    the replies does better on them"""


def baselines(seeds: Iterable[int], split: str = "train") -> Baselines:
    """The baselines on the tasks that ``seeds`` draw from ``split``.

    Example:
        >>> found = baselines([5])
        >>> found.constant, round(found.random, 4), found.reply_blind
        (1.0, 0.239, 1.0)

    Raises:
        ValueError: ``seeds`` is empty.
    """
    tasks = Counter(draw_task(seed, split) for seed in seeds)
    total = tasks.total()
    if not total:
        raise ValueError("baselines need at least one seed: success over no task has no value")
    return Baselines(
        constant=max(_best_sequence(tasks, (direction,)) for direction in STEPS) / total,
        random=sum(count * _random_success(cell, goal, MAX_MOVES) for (cell, goal), count in tasks.items()) / total,
        reply_blind=_best_sequence(tasks, tuple(STEPS)) / total,
    )


@cache
def _random_success(cell: Cell, goal: Cell, moves: int) -> float:
    if cell == goal:
        return 1.0
    if not moves:
        return 0.0
    return sum(_random_success(walk(cell, direction), goal, moves - 1) for direction in STEPS) / len(STEPS)


def _best_sequence(tasks: Counter[tuple[Cell, Cell]], directions: tuple[Direction, ...], moves: int = MAX_MOVES) -> int:
    """The most tasks that one sequence of ``moves`` moves solves: a search over all sequences."""
    if not moves or not tasks:
        return 0
    best = 0
    for direction in directions:
        solved, open_tasks = 0, Counter[tuple[Cell, Cell]]()
        for (cell, goal), count in tasks.items():
            after = walk(cell, direction)
            if after == goal:
                solved += count
            else:
                open_tasks[after, goal] += count
        best = max(best, solved + _best_sequence(open_tasks, directions, moves - 1))
    return best
