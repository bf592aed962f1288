from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from envgrad.rewards.unused import UnusedWeights
from envgrad.types import Episode, Group, StopReason, Task


def group(environment: str, **rewards: float | None) -> Group:
    task = Task(position=0, split="train", environment=environment, group_id=1, seed=2)
    episode = Episode(
        task=task, sibling=0, token_ids=(5, 6), mask=(0, 1), logprobs=(0.0, -0.1), versions=(-1, 0), prompt_length=1,
        messages=(), turns=(), stop_reason=StopReason.ANSWER, reward=1.0, rewards=rewards,
    )  # fmt: skip
    return Group(task=task, episodes=(episode, replace(episode, sibling=1)))


def told(names: list[str], rounds: list[list[Group]], caplog: pytest.LogCaptureFixture) -> list[str]:
    unused = UnusedWeights(names, ["a", "b"])
    with caplog.at_level(logging.WARNING, "envgrad.rewards.unused"):
        for groups in rounds:
            unused.observe(groups)
    return [record.getMessage() for record in caplog.records]


def test_it_waits_until_every_environment_was_scored(caplog: pytest.LogCaptureFixture) -> None:
    assert told(["speed"], [[group("a", win=1.0)], [group("b", speed=1.0)]], caplog) == []


def test_a_component_that_did_not_apply_is_there(caplog: pytest.LogCaptureFixture) -> None:
    assert told(["win"], [[group("a", win=None), group("b", style=1.0)]], caplog) == []


def test_a_name_that_nothing_bears_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    rounds = [[group("a", speed=1.0), group("b", win=1.0)]] * 2
    (message,) = told(["sped", "win"], rounds, caplog)
    assert (
        message.startswith("reward_weights has 'sped' (did you mean 'speed'?)") and "rewards are speed, win" in message
    )
