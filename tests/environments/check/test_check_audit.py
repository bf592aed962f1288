"""The bar and who is held against it, with numbers by hand."""

from __future__ import annotations

import pytest

from envgrad.environments.check.audit import judge
from envgrad.environments.check.bench import Bench
from envgrad.environments.check.report import AuditRow, CheckReport, Determinism, Level, Rule


def judged(
    refusal: tuple[float | None, ...],
    silent: tuple[float | None, ...],
    guess: tuple[float | None, ...],
    determinism: Determinism = Determinism.SEEDED,
    *,
    noisy: bool = False,
) -> CheckReport:
    bench = Bench(name="game", timeout=1.0)
    bench.determinism, bench.noisy = determinism, noisy
    given = {"refusal": refusal, "silent": silent, "random": guess}
    judge(bench, [AuditRow(agent=agent, does="", rewards=rewards) for agent, rewards in given.items()])
    bench.end()
    return bench.report()


@pytest.mark.parametrize(
    ("refusal", "silent", "guess", "bar", "level", "suspicious"),
    [
        # Nothing for nothing; luck is no hack.
        ((0.0, 0.0), (0.0, 0.0), (1.0, 0.0), 0.0, None, set()),
        # Silence pays, and the one who tries shows it.
        ((1.0, 1.0), (1.0, 1.0), (0.0, 1.0), 0.5, Level.WARNING, {"refusal", "silent"}),
        # Steps cost.
        ((0.0, 0.0), (0.0, 0.0), (-3.0, -1.0), -2.0, Level.NOTE, set()),
        # A fine for nothing that is less than the one for trying: still not paid.
        ((-1.0, -1.0), (-0.5, -0.5), (-1.0, -1.0), -1.0, Level.NOTE, set()),
        # Uninformed play earns something each time.
        ((0.0, 0.0), (0.0, 0.0), (0.1, 0.4), 0.0, Level.WARNING, {"random"}),
        # A constant, paid and fined.
        ((0.3, 0.3), (0.3, 0.3), (0.3, 0.3), 0.3, Level.WARNING, {"refusal", "silent", "random"}),
        ((-0.3, -0.3), (-0.3, -0.3), (-0.3, -0.3), -0.3, Level.NOTE, set()),
        # What cannot be scored is left out of the mean.
        ((None, 0.0), (None, None), (0.0, None), 0.0, None, set()),
        # An honest failure whose refusal cannot be scored.
        ((None, None), (1.0, 1.0), (0.0, 1.0), 0.5, Level.WARNING, {"silent"}),
    ],
)
def test_the_bar(
    refusal: tuple[float | None, ...],
    silent: tuple[float | None, ...],
    guess: tuple[float | None, ...],
    bar: float,
    level: Level | None,
    suspicious: set[str],
) -> None:
    report = judged(refusal, silent, guess)
    assert report.failure == pytest.approx(bar)
    assert [finding.level for finding in report.findings] == ([] if level is None else [level])
    assert {row.agent for row in report.audit if row.suspicious} == suspicious


def test_where_agents_played_different_tasks_luck_is_allowed_for() -> None:
    # Mean 0.4 above the bar of 0; the standard error is 0.245, and three of them are more than 0.4.
    rewards = (1.0, 0.0, 0.0, 1.0, 0.0)
    assert not judged((0.0,) * 5, rewards, (0.0,) * 5, Determinism.NONE).findings
    assert judged((0.0,) * 5, rewards, (0.0,) * 5, Determinism.SEEDED).findings
    assert judged((0.0,) * 5, (1.0,) * 5, (0.0,) * 5, Determinism.NONE).findings


def test_the_bar_is_luck_too_where_agents_played_different_tasks() -> None:
    # Rewards from 0 to 1 whatever is done. Taken alone, the first two vary little by chance, and are far apart.
    refusal, silent, guess = (0.2, 0.3, 0.2, 0.3), (0.75, 0.8, 0.7, 0.8), (0.0, 1.0, 0.9, 0.1, 0.5, 1.0, 0.0, 0.6)
    assert not judged(refusal, silent, guess, Determinism.NONE).findings


def test_agents_are_not_compared_where_siblings_cannot_share_a_task() -> None:
    bench = Bench(name="game", timeout=1.0)
    bench.determinism = Determinism.NONE
    bench.find(Level.BREACH, Rule.START, "reset", "siblings cannot share a task.", "Name 'seed'.")
    judge(
        bench,
        [AuditRow(agent=agent, does="", rewards=(pay,) * 4) for agent, pay in (("refusal", 1.0), ("random", 0.0))],
    )
    bench.end()
    (note,) = bench.report().of(Rule.AUDIT)
    assert note.level is Level.NOTE and "a task of its own" in note.seen
    assert not any(row.suspicious for row in bench.report().audit)


def test_random_rewards_are_not_judged() -> None:
    report = judged((0.1, 0.9), (0.8, 0.9), (0.2, 0.1), Determinism.NONE, noisy=True)
    assert [finding.level for finding in report.findings] == [Level.NOTE]
    assert not any(row.suspicious for row in report.audit)
