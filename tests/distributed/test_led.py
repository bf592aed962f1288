"""Runs in which one process plays for all: asynchronous ones, and those that sample from a vLLM server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from envgrad.errors import RankFailed
from envgrad.rollout.runner import Round
from envgrad.training.led import LedRounds
from envgrad.training.phases import Laps
from helpers.rank_runs import run_ranks, trained
from helpers.thread_ranks import ThreadRanks, on_threads
from helpers.world import Counter, play, turn
from helpers.zygote import Zygote


def test_an_asynchronous_run_trains_on_all_and_goes_on_alone(zygote: Zygote, tmp_path: Path) -> None:
    ended = trained(zygote, tmp_path / "two", "asynchronous", 2, "local")
    assert torch.equal(ended.change(0), ended.change(1)) and ended.change().norm() > 0
    steps = [entry for entry in ended.log() if "loss" in entry]
    assert [entry["step"] for entry in steps] == [1, 2, 3, 4, 5, 6]
    assert all(entry["async/staleness_max"] <= 2 for entry in steps)
    for one, two in zip(steps, (entry for entry in ended.log(1) if "loss" in entry), strict=True):
        assert [one[name] for name in ("loss", "reward", "epoch")] == [
            two[name] for name in ("loss", "reward", "epoch")
        ]
    assert len([entry for entry in ended.log() if "eval_reward" in entry]) == 2
    checkpoint = str(tmp_path / "two/run/checkpoint-3")
    again = trained(zygote, tmp_path / "again", "asynchronous", 1, "local", "2", checkpoint)
    assert again.log()[-1]["step"] == 6


def test_samplers_in_processes_belong_to_the_rank_that_plays(zygote: Zygote, tmp_path: Path) -> None:
    ended = trained(zygote, tmp_path, "asynchronous", 2, "process", "1")
    assert torch.equal(ended.change(0), ended.change(1))


@pytest.mark.parametrize(
    ("how", "last"), [("environment", ("TooManyFailures", "RankStopped")), ("signal", (None, None))]
)
def test_an_asynchronous_run_ends_on_all(
    zygote: Zygote, tmp_path: Path, how: str, last: tuple[str | None, str | None]
) -> None:
    ended = run_ranks(zygote, tmp_path, "asynchronous_ends", 2, how)
    assert ended.codes == ([1, 1] if how == "environment" else [143, 143])
    for rank, error in enumerate(last):
        assert error is None or error in ended.output(rank).splitlines()[-1], ended.output(rank)[-2000:]
    assert len(list((tmp_path / "run").glob("checkpoint-*"))) == 1


def test_a_server_gets_weights_from_one_rank(zygote: Zygote, tmp_path: Path) -> None:
    ended = trained(zygote, tmp_path, "served", 2)
    assert torch.equal(ended.change(0), ended.change(1)) and ended.change().norm() > 0
    # DDP writes the first rank's weights to all before the first step, so that they are sent once more.
    assert "updates [0, 0, 1, 2]" in ended.output(0)


def test_a_round_that_cannot_be_sent_ends_all() -> None:
    def run(ranks: ThreadRanks) -> str:
        (group,) = play(Counter, [turn("x")]).groups
        task = replace(group.task, row={"judge": lambda answer: answer})
        played = Round(groups=(replace(group, task=task),))
        source = SimpleNamespace(next=lambda laps: played, metrics={}, unused=0)
        plan = SimpleNamespace(publish=lambda: None, runner=SimpleNamespace(loop=SimpleNamespace(watch=None)))
        rounds: Any = LedRounds(ranks, cast(Any, plan), None if ranks.rank else cast(Any, source), lambda: None)
        with pytest.raises(RankFailed) as found:
            rounds.next(Laps())
        return str(found.value)

    first, other = on_threads(2, run)
    assert first.startswith("an episode cannot be given to the other ranks")
    assert other == f"rank 0 failed: RankFailed: {first}"
