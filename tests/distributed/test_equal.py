"""Several processes make the same update as one, from the same rollouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.rank_runs import Ended, relative, trained
from helpers.zygote import Zygote

LIMITS = {"sgd": 1e-4, "adamw": 1e-3}


_ALONE: dict[tuple[str, ...], Ended] = {}


@pytest.mark.parametrize(
    ("size", "algorithm", "optimizer", "more"),
    [
        (2, "GRPO", "sgd", ""), (4, "GRPO", "adamw", ""), (2, "RLOO", "sgd", ""), (2, "GRPO", "sgd", "reference"),
        pytest.param(2, "GRPO", "adamw", "", marks=pytest.mark.slow),
        pytest.param(4, "GRPO", "sgd", "", marks=pytest.mark.slow),
        pytest.param(4, "RLOO", "adamw", "", marks=pytest.mark.slow),
        pytest.param(2, "SDPO", "adamw", "", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_recorded_rollouts_change_the_weights_alike(
    zygote: Zygote, rounds: str, tmp_path: Path, size: int, algorithm: str, optimizer: str, more: str
) -> None:
    case = (rounds, algorithm, optimizer, more)
    if case not in _ALONE:
        _ALONE[case] = trained(zygote, tmp_path / "alone", "recorded", 1, *case)
    alone = _ALONE[case]
    ended = trained(zygote, tmp_path / "ranks", "recorded", size, *case)
    change = ended.change()
    print(f"{size} ranks, {algorithm}, {optimizer}: {relative(change, alone.change()):.1e}")
    assert alone.change().norm() > 0
    assert relative(change, alone.change()) <= LIMITS[optimizer]
    for rank in range(size):
        assert torch.equal(ended.change(rank), change), "all ranks have the same weights"


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_by_all(zygote: Zygote, rounds: str, tmp_path: Path) -> None:
    case = (rounds, "GRPO", "sgd", "poisoned")
    alone = trained(zygote, tmp_path / "alone", "recorded", 1, *case)
    ended = trained(zygote, tmp_path / "ranks", "recorded", 2, *case)
    for run in (alone, ended):
        assert [entry["updates/skipped"] for entry in run.log() if "loss" in entry] == [0, 0, 1, *[0] * 7]
    assert relative(ended.change(), alone.change()) <= LIMITS["sgd"]
    assert "the loss of GRPO is nan" in ended.output(0), "the rank that has no fault names the other's"
