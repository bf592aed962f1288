"""Runs of thousands of steps hold what they held at step 200: memory, file descriptors, threads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from helpers.zygote import Zygote

LONG = os.environ.get("ENVGRAD_LONG") == "1"
long_run = pytest.mark.skipif(not LONG, reason="part of make test-long")

MEGABYTES = 5.0


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote("helpers.soak_scenarios")
    yield zygote
    zygote.close()


def told(zygote: Zygote, folder: Path, scenario: str, *words: str, seconds: float) -> list[dict[str, float]]:
    code, run = zygote.run(scenario, folder, *words, seconds=seconds)
    assert code == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def assert_nothing_grows(held: list[dict[str, float]]) -> None:
    """From step 200 to the end."""
    later = [one for one in held if one["step"] >= 200]
    first, last = later[0], later[-1]
    assert first["step"] == 200 and len(later) > 10
    assert last["rss"] - first["rss"] < MEGABYTES, held
    for name in ("files", "threads"):  # a file that is open for a moment, while a part of the log is written, is none
        assert median(one[name] for one in later[:5]) == median(one[name] for one in later[-5:]), held


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_long_run_holds_no_more_than_a_short_one(zygote: Zygote, tmp_path: Path) -> None:
    held = told(zygote, tmp_path, "soak", "GRPO", "tiny", "2000", seconds=880.0)
    assert_nothing_grows(held)


@long_run
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("algorithm", "model", "options"),
    [
        ("GRPO", "starter", {"max_completion_length": 96}),
        ("RLOO", "tiny", {}),
        ("SDPO", "tiny", {"success_reward_threshold": 0.3}),
        ("AsyncGRPO", "tiny", {}),
        ("AsyncGRPO", "starter", {"max_completion_length": 96}),
        ("GRPO", "tiny", {"sampler": "process"}),
        ("GRPO", "tiny", {"eval_strategy": "steps", "eval_steps": 50}),
    ],
)
def test_two_thousand_steps(
    zygote: Zygote, tmp_path: Path, algorithm: str, model: str, options: dict[str, object]
) -> None:
    held = told(zygote, tmp_path, "soak", algorithm, model, "2000", json.dumps(options), seconds=3500.0)
    assert_nothing_grows(held)


@pytest.mark.parametrize("algorithm", ["GRPO", "AsyncGRPO"])
def test_trainers_that_are_done_leave_nothing(zygote: Zygote, tmp_path: Path, algorithm: str) -> None:
    """One behind another in one process: from the fourth on nothing is added."""
    held = told(zygote, tmp_path, "many", algorithm, "8", "2", seconds=120.0)
    assert held[-1]["rss"] - held[3]["rss"] < MEGABYTES, held
    assert held[-1]["files"] == held[3]["files"], held
    assert max(one["threads"] for one in held) < 8, "an idle daemon takes a moment to end"
