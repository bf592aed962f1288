"""Does a task repeat itself? By whole episodes, since openings may read the same and hide different tasks.

Each task is played with one script on several instances::

    a    a new instance                                    the reference
    b    another one                                       equal ids, equal actions: equal to a
    c    another one, with a game of another task          nothing is shared: equal to a
         played between any two of its calls
    d    an instance that played the other tasks before    reset leaves nothing behind: equal to a

Then tasks are compared with each other, to see what decides them.
"""

from __future__ import annotations

from dataclasses import replace

from envgrad.environments.check.bench import Bench
from envgrad.environments.check.game import Game, Trajectory, first_change
from envgrad.environments.check.plan import Plan, Played, play_fresh, play_on, shown, task_of
from envgrad.environments.check.report import Determinism, Level, Rule
from envgrad.environments.sources import hash63
from envgrad.environments.spec import IDENTITY_NAMES
from envgrad.environments.start import StartMode, compare_starts
from envgrad.types import Task

MORE_STARTS = 16
"""ids whose starts are compared before it is said that ids decide nothing"""


async def check_determinism(bench: Bench, plan: Plan, tasks: list[Task], changed: list[str]) -> None:
    """``changed``: what an episode changed on the class and its module.

    An instance that is forked, or that starts on its own, has no ids that its siblings could share: only its level is
    told here, and ``starts`` looks at its forks.
    """
    references = [await play_fresh(bench, plan, task) for task in tasks]
    repeats = [await play_fresh(bench, plan, task) for task in tasks]
    pairs = list(zip(tasks, references, repeats, strict=True))
    if bench.start not in (StartMode.IDENTITY, StartMode.ROW):
        bench.determinism = await _level_without_ids(bench, plan, tasks, pairs)
        if bench.start is StartMode.INDEPENDENT and bench.determinism is Determinism.NONE:
            _find_independent(bench, references[0], repeats[0])
        return
    if any(_find_difference(bench, first, other, changed) for _, first, other in pairs):
        bench.determinism = Determinism.NONE
        return
    await _check_interleaved(bench, plan, tasks, references, changed)
    await _check_reuse(bench, plan, tasks, references)
    bench.determinism = await _level(bench, plan, tasks, references)


async def _level_without_ids(
    bench: Bench, plan: Plan, tasks: list[Task], pairs: list[tuple[Task, Played, Played]]
) -> Determinism:
    """The level where ``reset`` names no id; it may still find one in its ``**kwargs``, or draw from a stream."""
    first, task = pairs[0][1], tasks[0]
    if not all(_equal(played, own, again, own) for own, played, again in pairs):
        return Determinism.NONE
    if all(_equal(first, task, played, own) for own, played, _ in pairs):
        fixed = await _starts_equal(bench, plan, first, task, _more_tasks(bench, plan))
        return Determinism.FIXED if fixed else Determinism.NONE  # each instance begins the same series of tasks
    if bench.spec.reset_takes_all:
        bench.find(
            Level.NOTE,
            Rule.START,
            "reset",
            "it finds the task's id in its **kwargs, where the library cannot see that it does.",
            "Name it: def reset(self, seed, **kwargs). Siblings are then reset with it.",
        )
    return Determinism.SEEDED


def _equal(first: Played, task: Task, other: Played, other_task: Task) -> bool:
    if first_change(first.trajectory, other.trajectory) is not None:
        return False
    return task_of(first.start, task) == task_of(other.start, other_task)


def _find_independent(bench: Bench, first: Played, other: Played) -> None:
    difference = compare_starts(first.start, other.start) or first_change(first.trajectory, other.trajectory)
    bench.find(
        Level.BREACH,
        Rule.START,
        "reset",
        f"siblings cannot share a task: reset names no id, copies are not safe, and two resets differ: {difference}.",
        "Name 'seed' in reset and draw the task from it, or define fork().",
    )


def _find_difference(bench: Bench, first: Played, other: Played, changed: list[str]) -> bool:
    """Whether two episodes of one task differ, with the finding."""
    start = compare_starts(first.start, other.start)
    episode = first_change(first.trajectory, other.trajectory)
    if start is None and episode is None:
        return False
    opens_alike = (first.start.messages, first.start.tools) == (other.start.messages, other.start.tools)
    if changed and episode is not None:
        _find_shared(bench, changed, f"equal ids and equal actions gave different episodes: {episode}")
    elif start is not None and (episode is not None or not opens_alike):
        bench.find(
            Level.BREACH,
            Rule.START,
            "reset",
            f"two resets with equal ids differ: {episode or start}"
            + (f"; their state: {start}." if episode is not None and opens_alike else "."),
            "Draw the task from the id alone: random.Random(seed). For other ids, tell them by start_state().",
        )
    elif start is not None:
        bench.find(
            Level.WARNING,
            Rule.START,
            start.partition(":")[0],
            f"equal ids start with different state, though these episodes were equal: {start}.",
            "Draw it from the id. If it is no part of the task (a clock, a name), leave it out of start_state().",
        )
        return False
    else:
        _find_stochastic(bench, str(episode))
    return True


def _find_stochastic(bench: Bench, episode: str) -> None:
    declared = bench.spec.determinism
    promised = declared in (Determinism.FIXED, Determinism.TASK, Determinism.SEEDED)
    level = Level.BREACH if promised else Level.NOTE if declared == Determinism.NONE else Level.WARNING
    bench.noisy = True
    where = "get_reward" if episode.startswith("the reward") else episode.partition(", ")[2].partition("(")[0]
    bench.find(
        level,
        Rule.DETERMINISM,
        where or "the episode",
        f"equal ids, equal starts and equal actions gave different episodes: {episode}"
        + (f", but it declares determinism = {declared!r}." if promised else "."),
        "Draw from a generator that reset makes from the seed. If chance is meant, declare determinism = 'none'.",
    )


def _find_shared(bench: Bench, changed: list[str], what: str) -> None:
    bench.find(
        Level.BREACH,
        Rule.SHARED,
        changed[0] if changed else "its state",
        f"{what}." + (f" Shared by all instances, and changed by playing: {shown(changed)}." if changed else ""),
        "Keep an episode's state on the instance, and make it anew in reset.",
    )


async def _check_interleaved(
    bench: Bench, plan: Plan, tasks: list[Task], references: list[Played], changed: list[str]
) -> None:
    for index, (task, reference) in enumerate(zip(tasks, references, strict=True)):
        other = await bench.make()
        game = await Game.open(bench, await bench.make(), task)
        trajectory = await _play_between(bench, plan, game, other, tasks[(index + 1) % len(tasks)])
        await bench.close(game.instance)
        await bench.close(other)
        change = first_change(reference.trajectory, trajectory)
        if change is not None:
            _find_shared(bench, changed, f"another instance, played between its calls, changed the episode: {change}")
            return


async def _play_between(bench: Bench, plan: Plan, game: Game, other: object, task: Task) -> Trajectory:
    """Play ``game``, and an episode of ``task`` on the instance ``other`` in step with it."""
    beside = await Game.open(bench, other, task)
    moves = plan.script(beside)
    for turn, action in enumerate(plan.script(game)):
        await game.act(action)
        if turn < len(moves):
            await beside.act(moves[turn])
    await beside.finish()
    return await game.finish()


async def _check_reuse(bench: Bench, plan: Plan, tasks: list[Task], references: list[Played]) -> None:
    veteran = await bench.make()
    await play_on(bench, plan, veteran, tasks[-1])
    for task, reference in zip(tasks, references, strict=True):
        again = await play_on(bench, plan, veteran, task)
        change = first_change(reference.trajectory, again.trajectory)
        if change is not None:
            state = compare_starts(reference.start, again.start)
            bench.find(
                Level.BREACH,
                Rule.REUSE,
                "reset" if state is None else state.partition(":")[0].partition("[")[0],
                f"after another episode, the same instance plays differently: {change}"
                + (f"; its state after reset: {state}." if state is not None else "."),
                "Set all of an episode's state in reset: instances are used again.",
            )
            break
    await bench.close(veteran)


async def _level(bench: Bench, plan: Plan, tasks: list[Task], references: list[Played]) -> Determinism:
    """What decides the task, in an environment that repeats itself."""
    first, task = references[0], tasks[0]
    # The same index and row under other ids.
    others = [_renamed(plan, task, number) for number in range(plan.groups - 1 + MORE_STARTS)]
    for other_task in others[: plan.groups - 1]:
        if not _equal(first, task, await play_fresh(bench, plan, other_task), other_task):
            return Determinism.SEEDED
    if not await _starts_equal(bench, plan, first, task, others[plan.groups - 1 :]):
        return Determinism.SEEDED
    if any(not _equal(first, task, *pair) for pair in zip(references[1:], tasks[1:], strict=True)):
        return Determinism.TASK
    if not await _starts_equal(bench, plan, first, task, _more_tasks(bench, plan)):
        return Determinism.TASK
    if bench.start is StartMode.IDENTITY:
        names = shown(sorted(bench.spec.reset_names & IDENTITY_NAMES))
        bench.find(
            Level.WARNING,
            Rule.IDS_IGNORED,
            "reset",
            f"it takes {names}, but {plan.groups + MORE_STARTS} different ids all gave the same task.",
            "Draw the task from it, or take the parameter away, if there is just one task.",
        )
    return Determinism.FIXED


def _renamed(plan: Plan, task: Task, number: int) -> Task:
    group_id = hash63("other ids", plan.seed, number)
    return replace(task, group_id=group_id, seed=hash63("seed", group_id))


def _more_tasks(bench: Bench, plan: Plan) -> list[Task]:
    return plan.tasks(bench.spec, plan.groups + MORE_STARTS)[plan.groups :]


async def _starts_equal(bench: Bench, plan: Plan, first: Played, task: Task, others: list[Task]) -> bool:
    """Whether other tasks start as the first one did: a few episodes may be equal by chance.

    Where ``start_state`` tells what it likes of the state, as an environment behind a server does, the rest of it may
    hide the task: there, whole episodes are compared.
    """
    instance = await bench.make()
    equal = True
    for other_task in others:
        if bench.spec.has_start_state:
            equal = _equal(first, task, await play_on(bench, plan, instance, other_task), other_task)
        else:
            game = await Game.open(bench, instance, other_task)
            equal = task_of(first.start, task) == task_of(await game.picture(), other_task)
        if not equal:
            break
    await bench.close(instance)
    return equal


def check_declared(bench: Bench) -> None:
    """Hold what was seen against the environment's own ``determinism``."""
    declared, seen = bench.spec.determinism, bench.determinism
    explained = bench.found(Rule.DETERMINISM) or bench.found(Rule.START) or bench.found(Rule.SHARED, Level.BREACH)
    if declared is None or seen is None or (seen is Determinism.NONE and explained):
        return
    if declared not in list(Determinism):
        bench.find(
            Level.NOTE,
            Rule.DETERMINISM,
            "determinism",
            f"it says {declared!r}, which no rule can be held against.",
            f"Say one of {', '.join(Determinism)}.",
        )
        return
    order = [Determinism.FIXED, Determinism.TASK, Determinism.SEEDED, Determinism.NONE]
    promised, found = order.index(Determinism(declared)), order.index(seen)
    if promised != found:
        bench.find(
            Level.BREACH if found > promised else Level.WARNING,
            Rule.DETERMINISM,
            "determinism",
            f"it declares {declared!r}, but what was played is {str(seen)!r}.",
            f"Declare determinism = {str(seen)!r}, or mend what decides the task.",
        )
