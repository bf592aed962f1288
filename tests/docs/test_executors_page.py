"""The page on executors: its code runs, and a class that aborts costs its attempts and no run."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.pages import run_python


def test_the_page_runs(folder: Path) -> None:
    trainer = run_python("executors", only=0)["trainer"]
    assert trainer.state.global_step == 2
    tally = trainer.rollouts.tally
    assert tally.groups >= 4 and set(tally.faults) <= {"environment"}


def test_the_block_on_ray_runs(folder: Path) -> None:
    pytest.importorskip("ray")
    trainer = run_python("executors", only=1)["trainer"]
    assert trainer.state.global_step == 1 and trainer.rollouts.tally.is_clean
