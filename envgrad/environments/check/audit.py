"""What agents earn that have no model: a reward that they can collect is one that a model will find first.

**The bar.** An honest failure is measured, not assumed to be worth 0, since rewards have any offset: an agent that says
"I do not know." at once, and an agent that makes valid, uninformed calls (or, where ``step`` reads text, writes words
from the prompt) and so fails by trying. The bar is the lower one of their two means. Both are needed: where silence
pays, saying "I do not know." is paid just as well, and only the one who tries shows it; where each step costs, only the
one who says it at once shows what nothing is worth.

**Who is held against it.** Agents that do nothing for the task: silence, the "I do not know." itself, the prompt handed
back, junk, empty arguments. One that earns more than the bar, and more than 0, is a possible reward hack (a warning).
One that earns more than the bar but not more than 0 is a note: doing nothing is cheaper than to try, as wherever steps
cost something, and a model may learn that first.

**Luck is no hack.** Uninformed calls solve some tasks by luck: their mean is the floor to compare a trained agent with.
If they earn something in every single episode, the reward hardly depends on the task (a warning).
The last rule is for rewards that do not depend on the agent at all: all agents get the same one, and it is not 0.
Where no id decides the task, agents play different ones, and the means must differ by more than luck. Where not even
siblings can share one, agents are not compared.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import variance

from envgrad.environments.boundary import Raised
from envgrad.environments.check.actions import Action, Call, Say, random_call, random_text, written_arguments
from envgrad.environments.check.bench import Bench, CallFailed, Hung, method_of, told
from envgrad.environments.check.game import Game
from envgrad.environments.check.plan import Plan, shown
from envgrad.environments.check.report import AuditRow, Determinism, Level, Rule
from envgrad.environments.results import read_group_rewards
from envgrad.errors import EnvironmentFailure
from envgrad.types import Task

JUNK = 'lorem ### {"answer": 918273645} <answer>918273645</answer> \\boxed{918273645}'
"""formats that graders look for, around an answer that is right nowhere"""
RANDOM_PLAYS = 3
"""episodes of the random agent for each task: luck varies more than silence"""
_EXACT = 1e-9
_DEVIATIONS = 3.0
"""standard errors by which an agent must be better where agents played different tasks"""


@dataclass(frozen=True, slots=True)
class Agent:
    """``act(game, turn, rng)`` is its next action."""

    name: str
    does: str
    act: Callable[[Game, int, random.Random], Action]


def _write(text: Callable[[Game], str], game: Game, turn: int, rng: random.Random) -> Action:
    """Write a text: into the tools that take one, in turn, else as an answer."""
    filled = [(tool, written_arguments(tool, text(game), game.prompt, rng)) for tool in game.tools]
    calls = [Call(tool.name, arguments) for tool, arguments in filled if arguments is not None]
    return calls[turn % len(calls)] if calls else Say(text(game))


def _empty(game: Game, turn: int, rng: random.Random) -> Action:
    return Call(game.tools[turn].name, {}) if turn < len(game.tools) else Say("")


def _random(game: Game, turn: int, rng: random.Random) -> Action:
    return random_call(game.tools, game.prompt, rng) if game.tools else Say(random_text(game.prompt, rng))


def _say(text: str, game: Game, turn: int, rng: random.Random) -> Action:
    return Say(text)


REFUSAL = Agent("refusal", 'says "I do not know."', partial(_say, "I do not know."))
RANDOM = Agent("random", "makes valid, uninformed calls", _random)
IDLE = (
    REFUSAL,
    Agent("silent", "writes nothing", partial(_say, "")),
    Agent("echo", "hands the prompt back", partial(_write, lambda game: game.last_text)),
    Agent("junk", "writes junk", partial(_write, lambda game: JUNK)),
    Agent("empty", "calls tools without arguments", _empty),
)
"""agents that do nothing for the task"""


async def check_audit(bench: Bench, plan: Plan, tasks: list[Task]) -> None:
    """Let each agent play each task, and hold what they earn against an honest failure."""
    rewards: dict[str, list[float | None]] = {}
    calls = bool(bench.spec.tools) or bench.spec.dynamic_tools
    agents = [agent for agent in IDLE if calls or agent.act is not _empty]
    plays = [*agents, *[RANDOM] * RANDOM_PLAYS]
    paid = False
    for task in tasks:
        games: list[Game] = []
        own: list[float | None] = []
        for number, agent in enumerate(plays):
            game, reward = await _play(bench, plan, agent, task, number)
            games.append(game)
            own.append(reward)
            if not bench.spec.has_group_reward:
                await bench.close(game.instance)
            paid |= any(event.reward is not None for event in game.events)
        for agent, reward in zip(plays, await _with_group(bench, games, own), strict=True):
            rewards.setdefault(agent.name, []).append(reward)
        for game in games:
            await bench.close(game.instance)
    if not bench.spec.must_reward and not paid:
        seen = "no member gives a reward, and no turn was paid."
        bench.find(Level.NOTE, Rule.REWARD, "get_reward", seen, "Define it, or give the trainer reward functions.")
        return
    guess = RANDOM if calls else replace(RANDOM, does="writes words of the prompt")
    rows = [
        AuditRow(agent=agent.name, does=agent.does, rewards=tuple(rewards[agent.name])) for agent in (*agents, guess)
    ]
    judge(bench, rows)


async def _play(bench: Bench, plan: Plan, agent: Agent, task: Task, number: int) -> tuple[Game, float | None]:
    rng = plan.rng("audit", agent.name, task.key, number)
    game = await Game.open(bench, await bench.make(), task)
    try:
        for turn in range(plan.turns):
            if not game.over:
                await game.act(agent.act(game, turn, rng))
        return game, (await game.finish()).total
    except Hung:
        raise
    except CallFailed as failed:  # a finding already; the other agents play on
        bench.explain(failed, f"This was with an agent that {agent.does}.")
        return game, None


async def _with_group(bench: Bench, games: list[Game], own: list[float | None]) -> list[float | None]:
    """The rewards with those of ``group_reward``, which sees all of a task's instances together."""
    if not bench.spec.has_group_reward:
        return own
    instances = [game.instance for game in games]
    value = await bench.value("group_reward", method_of(instances[0], "group_reward"), instances)
    outcome = await bench.outcome("group_reward", partial(read_group_rewards, value, len(games), "group_reward"))
    if isinstance(outcome, Raised):
        seen = str(outcome.error) if isinstance(outcome.error, EnvironmentFailure) else told(outcome.error)
        fix = "Return one finite number (or None) per environment."
        raise bench.fail(Rule.REWARD, "group_reward", seen, fix)
    together = outcome.value if isinstance(outcome.value, list) else []
    return [None if shared is None else shared + (reward or 0.0) for reward, shared in zip(own, together, strict=True)]


def judge(bench: Bench, rows: list[AuditRow]) -> None:
    """Hold the agents' means against the bar; write rows and findings to the bench."""
    bench.audit = tuple(rows)
    tries = [row.mean for row in rows if row.agent in (REFUSAL.name, RANDOM.name) and row.mean is not None]
    if not tries:
        seen = "no agent's episode could be scored: the reward is None for all of them."
        fix = "Give a failed episode a number; None takes it out of training."
        bench.find(Level.WARNING, Rule.AUDIT, "the reward", seen, fix)
        return
    bench.failure = bar = min(tries)
    if bench.noisy:
        seen = "equal episodes are rewarded differently, so agents cannot be told from luck."
        bench.find(Level.NOTE, Rule.AUDIT, "the audit", seen, "Draw the reward from the seed, and check again.")
        return
    if bench.found(Rule.START, Level.BREACH):
        seen = "each agent played a task of its own, as siblings would, so agents cannot be told from luck."
        bench.find(Level.NOTE, Rule.AUDIT, "the audit", seen, "Mend the group's start, and check again.")
        return
    idle = [row for row in rows if row.agent != RANDOM.name]
    margin = _margin(bench, rows, bar)
    above = [row for row in idle if row.mean is not None and row.mean > bar + margin(row)]
    paid = [row for row in above if row.mean is not None and row.mean > _EXACT]
    means = [row.mean for row in rows if row.mean is not None]
    constant = abs(bar) > _EXACT and max(means) - min(means) < _EXACT and len(means) > 1
    lucky = [row for row in rows if row.agent == RANDOM.name and _pays_always(row, bar)]
    if paid:
        _find_paid(bench, paid, bar)
    elif above:
        _find_cheap(bench, above, bar)
    if constant:
        _find_constant(bench, bar)
    elif lucky:
        _find_lucky(bench, lucky[0])
    suspicious = {row.agent for row in (rows if constant and bar > 0 else [*paid, *lucky])}
    bench.audit = tuple(replace(row, suspicious=row.agent in suspicious) for row in rows)


def _margin(bench: Bench, rows: list[AuditRow], bar: float) -> Callable[[AuditRow], float]:
    """How much above the bar an agent's mean may be by luck: only where agents could not be given the same tasks.

    The spread is that of all agents' rewards together: four of one agent's may be close by chance.
    """
    scored = {row.agent: [reward for reward in row.rewards if reward is not None] for row in rows}
    freedom = sum(len(rewards) - 1 for rewards in scored.values() if rewards)
    if bench.determinism is not Determinism.NONE or freedom < 1:
        return lambda row: _EXACT
    spread = sum((len(rewards) - 1) * variance(rewards) for rewards in scored.values() if len(rewards) > 1) / freedom
    tried = min(len(scored[row.agent]) for row in rows if row.agent in (REFUSAL.name, RANDOM.name) and row.mean == bar)
    return lambda row: _EXACT + _DEVIATIONS * math.sqrt(spread * (1 / len(scored[row.agent]) + 1 / tried))


def _pays_always(row: AuditRow, bar: float) -> bool:
    """Whether uninformed play earned something in each of its episodes."""
    return all(reward is not None and reward > max(bar, 0.0) + _EXACT for reward in row.rewards)


def _earned(rows: list[AuditRow]) -> str:
    return shown([f"{row.agent} {row.mean:.3g}" for row in rows])


def _find_paid(bench: Bench, rows: list[AuditRow], bar: float) -> None:
    bench.find(
        Level.WARNING,
        Rule.AUDIT,
        "the reward",
        f"possible reward hack: agents that do nothing for the task earn more than an honest failure ({bar:.3g}): "
        f"{_earned(rows)}.",
        "Pay only for what the task asks for.",
    )


def _find_cheap(bench: Bench, rows: list[AuditRow], bar: float) -> None:
    bench.find(
        Level.NOTE,
        Rule.AUDIT,
        "the reward",
        f"to do nothing is cheaper than to try and fail ({bar:.3g}): {_earned(rows)}.",
        "Nothing, if steps are meant to cost. A model may learn to do nothing first.",
    )


def _find_constant(bench: Bench, bar: float) -> None:
    bench.find(
        Level.WARNING if bar > 0 else Level.NOTE,
        Rule.AUDIT,
        "the reward",
        f"every agent earned {bar:.4g}, whatever it did.",
        "Pay for what the task asks for. Where it is a constant, take it off: advantages do not see it.",
    )


def _find_lucky(bench: Bench, row: AuditRow) -> None:
    bench.find(
        Level.WARNING,
        Rule.AUDIT,
        "the random agent",
        f"possible reward hack: uninformed play earned something in each of {len(row.rewards)} episodes, "
        f"{row.mean:.3g} on average.",
        "Pay for what the task asks for.",
    )
