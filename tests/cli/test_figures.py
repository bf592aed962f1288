from __future__ import annotations

import math

import pytest

from envgrad.cli.figures import RunFigures
from envgrad.errors import EnvironmentFailure
from envgrad.rollout.runner import Round
from envgrad.types import Episode, FailedEpisode, Group, StopReason, Task


def group(environment: str, rewards: list[float | None], *, failures: int = 0) -> Group:
    task = Task(position=0, split="train", environment=environment, group_id=1, seed=2)
    episodes = tuple(
        Episode(
            task=task, sibling=index, token_ids=(1, 2, 3), mask=(0, 1, 1), logprobs=(0.0, -1.0, -1.0),
            versions=(-1, 0, 0), prompt_length=1, messages=(), turns=(), stop_reason=StopReason.DONE, reward=reward,
        )
        for index, reward in enumerate(rewards)
    )  # fmt: skip
    failed = tuple(
        FailedEpisode(task=task, sibling=9, attempts=3, kind="environment", error=EnvironmentFailure("down"))
        for _ in range(failures)
    )
    return Group(task=task, episodes=episodes, failures=failed)


class Hand:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def run_step(figures: RunFigures, hand: Hand, step: int, played: Round | None) -> None:
    for seconds, event in ((4.0, figures.end_fetch), (2.0, figures.end_training)):
        hand.now += seconds
        event()
    hand.now += 0.5
    figures.end_step(step, played)


def test_time_is_told_apart_by_phase() -> None:
    hand = Hand()
    figures = RunFigures(clock=hand)
    assert math.isinf(figures.eta())
    figures.start(step=0, max_steps=10)
    run_step(figures, hand, 1, Round(groups=(group("a", [1.0, 0.0]),), seconds=3.0))
    assert figures.phases() == {"rollout": 3.0, "pack": 1.0, "train": 2.0, "optimizer and other": 0.5}
    assert figures.shares()["rollout"] == pytest.approx(3 / 6.5)
    hand.now += 1.5  # a checkpoint is written
    figures.pause_over()
    run_step(figures, hand, 2, Round(groups=(group("a", [1.0, 1.0]),), seconds=4.0))
    assert figures.phases() == {"rollout": 3.5, "pack": 0.5, "train": 2.0, "optimizer and other": 1.25}
    assert figures.eta() == pytest.approx((6.5 + 8.0) / 2 * 8)
    assert figures.episodes_per_second() == pytest.approx(4 / 14.5)
    assert figures.tokens_per_second() == pytest.approx(8 / 14.5)
    hand.now += 2.0
    assert figures.in_phase() == 2.0
    assert figures.phase == "playing episodes"


def test_a_round_that_feeds_several_steps_counts_once() -> None:
    hand = Hand()
    figures = RunFigures(clock=hand)
    figures.start(step=0, max_steps=2)
    played = Round(groups=(group("a", [1.0, 0.0]),), seconds=3.0)
    run_step(figures, hand, 1, played)
    run_step(figures, hand, 2, played)
    assert figures.rewards == [0.5]
    assert figures.total_episodes == 2
    assert figures.phases()["rollout"] == 1.5


def test_rewards_are_means_over_scored_episodes_and_failures_are_counted() -> None:
    figures = RunFigures(clock=Hand())
    figures.start(step=0, max_steps=3)
    kept = (group("a", [1.0, None]), group("b", [0.0, 0.0, 1.0], failures=1))
    dropped = (group("b", [None], failures=2),)
    figures.end_step(1, Round(groups=kept, dropped=dropped, seconds=0.0))
    assert figures.rewards == [0.5]
    assert figures.by_environment == {"a": [1.0], "b": [pytest.approx(1 / 3)]}
    assert figures.failures == {"environment": 3}
    assert figures.dropped_groups == 1
    assert figures.total_episodes == 6


def test_rates_forget_what_is_long_past() -> None:
    hand = Hand()
    figures = RunFigures(clock=hand)
    figures.start(step=0, max_steps=100)
    hand.now += 1000.0
    figures.pause_over()
    for step in range(1, 13):
        run_step(figures, hand, step, Round(groups=(group("a", [1.0, 0.0]),), seconds=4.0))
    assert figures.eta() == pytest.approx(6.5 * 88)
    assert figures.episodes_per_second() == pytest.approx(2 / 6.5)
