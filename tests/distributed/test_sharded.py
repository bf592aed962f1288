"""Weights that are cut over ranks (FSDP2, over gloo) change as whole ones do, and are gathered whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from envgrad.distributed.sharded import WholeWeights, is_cut, whole
from helpers.rank_runs import relative, trained
from helpers.zygote import Zygote


@pytest.mark.parametrize(
    ("size", "algorithm", "optimizer", "limit"),
    [
        (2, "GRPO", "sgd", 1e-4), (4, "RLOO", "adamw", 1e-3),
        pytest.param(2, "RLOO", "sgd", 1e-4, marks=pytest.mark.slow),
        pytest.param(4, "GRPO", "adamw", 1e-3, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_cut_weights_change_as_whole_ones(
    zygote: Zygote, rounds: str, tmp_path: Path, size: int, algorithm: str, optimizer: str, limit: float
) -> None:
    alone = trained(zygote, tmp_path / "alone", "by_hand", 1, rounds, algorithm, optimizer, "none")
    ended = trained(zygote, tmp_path / "ranks", "by_hand", size, rounds, algorithm, optimizer, "fsdp2")
    print(f"{size} ranks, {algorithm}, {optimizer}: {relative(ended.change(), alone.change()):.1e}")
    assert alone.change().norm() > 0
    assert relative(ended.change(), alone.change()) <= limit
    assert all(torch.equal(ended.change(rank), ended.change()) for rank in range(size))
    assert "padding" in ended.output(0)


def test_weights_that_are_whole_stay_as_they_are() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    assert whole(weight) is weight and not is_cut({"a": weight})
    assert list(WholeWeights({"a": weight})) == ["a"] and len(WholeWeights({"a": weight})) == 1
