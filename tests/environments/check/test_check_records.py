"""The parts of a check by hand: which finding stays, how errors are told, where two episodes part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from envgrad.environments.boundary import guard
from envgrad.environments.check.bench import Bench, contract_parts, told
from envgrad.environments.check.game import Event, Trajectory, first_change
from envgrad.environments.check.report import Level, Rule
from envgrad.errors import EnvironmentContractError


def test_of_several_findings_the_first_of_the_worst_stays() -> None:
    bench = Bench(name="game", timeout=1.0)
    for level, seen in ((Level.NOTE, "a"), (Level.BREACH, "b"), (Level.WARNING, "c"), (Level.BREACH, "d")):
        bench.find(level, Rule.SHARED, "log", seen, "fix")
    bench.find(Level.NOTE, Rule.SHARED, "cache", "e", "fix")
    bench.find(Level.WARNING, Rule.CLOSE, "close", "f", "fix")
    assert [finding.seen for finding in bench.report().findings] == ["b", "f", "e"]
    assert bench.found(Rule.CLOSE) and not bench.found(Rule.CLOSE, Level.BREACH)
    assert bench.found(Rule.SHARED, Level.BREACH) and not bench.found(Rule.FORK)
    bench.end()


def test_a_failed_call_is_explained_once() -> None:
    bench = Bench(name="game", timeout=1.0)
    failed = bench.fail(Rule.RAISED, "step", "it raised.", "fix")
    bench.explain(failed, "Here.")
    bench.explain(bench.fail(Rule.RAISED, "step", "it raised.", "fix"), "There.")
    assert [finding.seen for finding in bench.report().findings] == ["it raised. Here."]
    bench.end()


@pytest.mark.parametrize(
    ("message", "seen", "fix"),
    [
        ("environment 'g' (G): it has no reset method: define 'def reset(self)'.", "it has no reset method.", "Define"),
        ("tool 'a': 'x' has no type: write e.g. 'x: str'. (If 'a: b' is none, hide it.)", "'x' has no type.", "Write"),
        ("it must return a new instance", "it must return a new instance", "Do as"),
        ("fork() returned None; it must return a new one", "fork() returned None.", "It must"),
    ],
)
def test_a_contract_error_as_seen_and_fix(message: str, seen: str, fix: str) -> None:
    parts = contract_parts(EnvironmentContractError(message))
    assert parts[0].endswith(seen)
    assert parts[1].startswith(fix)


def test_an_error_is_told_with_the_users_line_and_not_the_librarys() -> None:
    def user() -> None:
        import random

        random.Random(0).choice([])

    raised: Any = guard(user)
    assert "IndexError: " in told(raised.error)
    assert "test_check_records.py:" in told(raised.error)
    assert "in user: random.Random(0).choice([])" in told(raised.error)
    assert told(ValueError("never raised")) == "ValueError: never raised"


MOVE = Event(action="move('n')", observation="ok", reward=None, done=False)
BASE = Trajectory(
    messages=({"role": "user", "content": "Go."},),
    tools=("move(to: string)",),
    events=(MOVE, MOVE),
    reward=0.0,
    total=0.0,
)


@pytest.mark.parametrize(
    ("other", "told_as"),
    [
        (replace(BASE), None),
        (replace(BASE, messages=({"role": "user", "content": "Run."},)), "the opening is 'Go.' once and 'Run.' once"),
        (replace(BASE, tools=()), "the tools are ['move(to: string)'] once and [] once"),
        (
            replace(BASE, events=(MOVE, replace(MOVE, observation="wall"))),
            "turn 2, move('n'): the answer is 'ok' once and 'wall' once",
        ),
        (replace(BASE, events=(replace(MOVE, reward=1.0), MOVE)), "turn 1, move('n'): it pays None once and 1.0 once"),
        (
            replace(BASE, events=(MOVE, replace(MOVE, done=True))),
            "turn 2, move('n'): done is False once and True once",
        ),
        (replace(BASE, events=(MOVE,)), "the episode has 2 turns once and 1 once"),
        (replace(BASE, reward={"win": 0.0}), "the reward is 0.0 once and {'win': 0.0} once"),
    ],
)
def test_where_two_episodes_part(other: Trajectory, told_as: str | None) -> None:
    assert first_change(BASE, other) == told_as


def test_long_texts_are_shown_where_they_part() -> None:
    one = replace(BASE, messages=({"role": "user", "content": "x" * 500 + "left" + "y" * 500},))
    two = replace(BASE, messages=({"role": "user", "content": "x" * 500 + "right" + "y" * 500},))
    change = first_change(one, two)
    assert change is not None
    assert "xleft" in change and "xright" in change
    assert len(change) < 250
