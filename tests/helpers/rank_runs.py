"""Runs of several ranks, started and looked at."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from helpers.zygote import Zygote


@dataclass(frozen=True, slots=True)
class Ended:
    """What a run has left behind."""

    folder: Path
    codes: list[int]
    seconds: list[float]
    """after the first rank had ended"""

    def output(self, rank: int) -> str:
        return (self.folder / f"rank{rank}.out").read_text()

    def change(self, rank: int = 0) -> torch.Tensor:
        return torch.load(self.folder / f"change{rank}.pt", weights_only=True)

    def log(self, rank: int = 0) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads((self.folder / f"log{rank}.json").read_text())
        return found


def run_ranks(zygote: Zygote, folder: Path, case: str, size: int, *words: str, seconds: float = 110.0) -> Ended:
    """Run ``case`` on ``size`` processes, to the end of all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    zygote.run("ranks", folder, case, str(size), *words, seconds=seconds)
    ends = json.loads((folder / "codes.json").read_text())
    return Ended(folder, [code for code, _ in ends], [late for _, late in ends])


def trained(zygote: Zygote, folder: Path, case: str, size: int, *words: str) -> Ended:
    """``run_ranks``, of a run that must end well; without a process group where ``size`` is 1."""
    if size == 1:
        folder.mkdir(parents=True, exist_ok=True)
        code, scenario = zygote.run(case, folder, *words, seconds=110.0)
        assert code == 0, scenario.stderr[-3000:]
        return Ended(folder, [0], [0.0])
    ended = run_ranks(zygote, folder, case, size, *words)
    assert ended.codes == [0] * size, "\n".join(ended.output(rank)[-3000:] for rank in range(size))
    return ended


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())
