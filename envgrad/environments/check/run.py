"""``check_environment``: every check in its order, on a thread of its own, so that nothing can hang whoever asks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

from envgrad.environments.boundary import Raised, guard_in_thread
from envgrad.environments.check.agent_play import AgentStage
from envgrad.environments.check.audit import check_audit
from envgrad.environments.check.bench import Bench, CallFailed, Hung, method_of, told
from envgrad.environments.check.determinism import check_declared, check_determinism
from envgrad.environments.check.forks import check_fork, check_pickle, check_start, check_state
from envgrad.environments.check.game import Game
from envgrad.environments.check.plan import Plan
from envgrad.environments.check.report import CheckReport, Level, Rule
from envgrad.environments.check.schemas import check_schemas
from envgrad.environments.check.sharing import check_global_draws, check_sharing
from envgrad.environments.check.splits import check_last_task, check_num_tasks, check_splits
from envgrad.environments.check.stand_in import with_stand_in
from envgrad.environments.spec import Factory, member_of
from envgrad.environments.tools import build_tool
from envgrad.errors import ConfigurationError

GRACE = 2.0
"""seconds past its deadline after which a call counts as one that blocks the loop"""
_POLL = 0.05


def check_environment(
    environment: Factory,
    *,
    dataset_row: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    groups: int = 4,
    turns: int = 8,
    seed: int = 0,
    timeout: float = 30.0,
    name: str | None = None,
    agents: AgentStage | None = None,
) -> CheckReport:
    """What ``envgrad.check_environment`` does, whose arguments and errors these are, with ``agents`` of one's choice.

    Args:
        agents: who answers an agent that owns its loop; None: such episodes are started and scored unplayed.
    """
    rows = _read_rows(dataset_row)
    for option, value in (("groups", groups), ("turns", turns)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigurationError(f"{option}={value!r} must be a whole number of at least 1")
    if not timeout > 0:
        raise ConfigurationError(f"timeout={timeout!r} must be more than 0 seconds")
    plan = Plan(rows=rows, groups=groups, turns=turns, seed=seed)
    bench = Bench(name=name or str(getattr(environment, "__name__", "environment")), timeout=timeout)
    bench.agents, bench.agent_answers = agents, turns
    _run_watched(bench, lambda: asyncio.run(with_stand_in(_check(bench, plan, environment))))
    return bench.report()


def _run_watched(bench: Bench, check: Callable[[], None]) -> None:
    """Run the check in a thread, and leave the thread behind if a call in it never lets go."""
    ended = threading.Event()
    failures: list[Exception] = []

    def work() -> None:
        outcome = guard_in_thread(check)
        if isinstance(outcome, Raised):
            failures.append(outcome.error)
        ended.set()

    threading.Thread(target=work, name="envgrad-check", daemon=True).start()
    while not ended.wait(_POLL):
        if (member := _blocking(bench)) is not None:
            bench.hung(member)
            _find_rest(bench)
            break
    bench.end()
    if failures:
        raise failures[0]


def _blocking(bench: Bench) -> str | None:
    """The call that is past its deadline though the loop should have ended it: it never lets go of the thread."""
    current = bench.current
    if current is not None and time.monotonic() - current[1] > bench.timeout + GRACE:
        return current[0]
    return None


def _read_rows(given: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None) -> tuple[Mapping[str, Any], ...]:
    if given is None:
        return ()
    rows = (given,) if isinstance(given, Mapping) else tuple(given)
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise ConfigurationError(f"dataset_row={given!r:.100} must be a row (a dict by column), or a list of rows")
    return rows


def _load_schema_code() -> None:
    """Seconds at its first use, which must not count as time of the environment's."""
    build_tool("load", _load_schema_code)


async def _check(bench: Bench, plan: Plan, environment: Factory) -> None:
    _load_schema_code()
    try:
        await bench.inspect(environment, frozenset(column for row in plan.rows for column in row))
        await _check_all(bench, plan)
        await bench.close_all()
    except Hung:
        _find_rest(bench)  # no instance is closed: one of them is in use, and so may be what they share
    except CallFailed:
        _find_rest(bench)
        await bench.close_all()


def _find_rest(bench: Bench) -> None:
    why = "hangs" if bench.found(Rule.HANG) else "fails, and no episode can be played without it"
    fix = "Mend it, and check again."
    bench.find(Level.NOTE, Rule.NOT_CHECKED, "the rest", f"the check ended where a call {why}.", fix)


async def _check_all(bench: Bench, plan: Plan) -> None:
    await check_num_tasks(bench)
    tasks = plan.tasks(bench.spec, plan.groups)
    first = await _first_episode(bench, plan)
    await check_start(bench, first)
    await check_pickle(bench, first.instance)
    await first.play(plan.script(first))
    changed: list[str] = []

    async def sharing() -> None:
        changed.extend(await check_sharing(bench, plan, tasks))

    await bench.try_section("isolation", sharing)
    await bench.try_section("global generators", lambda: check_global_draws(bench, plan, tasks[0]))
    await bench.try_section("determinism", lambda: check_determinism(bench, plan, tasks, changed))
    check_declared(bench)
    await bench.try_section("forking", lambda: check_fork(bench, plan, tasks[0]))
    await bench.try_section("state_dict", lambda: check_state(bench, plan, tasks))
    await bench.try_section("the last task", lambda: check_last_task(bench, plan))
    await bench.try_section("train and eval", lambda: check_splits(bench, plan))
    if not bench.spec.runs_agent:
        await bench.try_section("the audit", lambda: check_audit(bench, plan, tasks))
    await bench.try_section("closing", lambda: check_close(bench, plan))


async def _first_episode(bench: Bench, plan: Plan) -> Game:
    """The first start: also fills caches that the environment fills once."""
    game = await Game.open(bench, await bench.make(), plan.tasks(bench.spec, 1)[0])
    bench.tools = game.signatures
    check_schemas(bench, game.tools)
    if bench.spec.runs_agent and bench.agents is None:
        seen = "an agent owns the loop, and nobody answers it here: episodes are started and scored unplayed."
        fix = "Install envgrad[agents], and use envgrad.check_environment: then somebody answers."
        bench.find(Level.NOTE, Rule.NOT_CHECKED, "run_agent", seen, fix)
    if isinstance(member_of(game.instance, "done"), FunctionType):
        seen = "it is a method: read without a call, as properties are, it is always true."
        bench.find(Level.NOTE, Rule.DONE, "done", seen, "Make it a property: put @property above it.")
    if await game.done():
        seen = "it is true right after reset: the episode is over before the agent does anything."
        bench.find(Level.WARNING, Rule.DONE, "done", seen, "Set it to False in reset.")
    return game


async def check_close(bench: Bench, plan: Plan) -> None:
    """``close`` works on an instance that was never reset, on one in the middle of an episode, and a second time."""
    if not bench.spec.has_close:
        return
    for started in (False, True):
        instance = await bench.make()
        if started:
            await Game.open(bench, instance, plan.tasks(bench.spec, 1)[0])
        bench.forget(instance)
        when = "in the middle of an episode" if started else "of an instance that was never reset"
        outcome = await bench.outcome("close", method_of(instance, "close"))
        if isinstance(outcome, Raised):
            fix = "Close what was opened, and nothing else: it is called on every way out."
            bench.find(Level.BREACH, Rule.CLOSE, "close", f"the close {when} raised {told(outcome.error)}.", fix)
            continue
        outcome = await bench.outcome("close", method_of(instance, "close"))
        if isinstance(outcome, Raised):
            fix = "Do nothing the second time: a user may close what the library closes too."
            bench.find(Level.BREACH, Rule.CLOSE, "close", f"the second close raised {told(outcome.error)}.", fix)
