"""One rank's failure is everybody's: all end within seconds, with a code that says so, and nothing is left waiting."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from helpers.rank_runs import Ended, run_ranks
from helpers.zygote import Zygote, alive

SECONDS = 20.0
"""that the others may take, on a busy machine; a time limit of theirs would be 60"""


def checkpoints(ended: Ended) -> list[str]:
    return sorted(path.name for path in (ended.folder / "run").glob("*checkpoint*"))


def test_failures_beyond_the_bound_end_all_with_a_checkpoint(zygote: Zygote, tmp_path: Path) -> None:
    ended = run_ranks(zygote, tmp_path, "ends", 2, "environment")
    assert ended.codes == [1, 1] and max(ended.seconds) < SECONDS
    for rank in range(2):
        assert "TooManyFailures" in ended.output(rank).splitlines()[-1]
        assert "the simulator burnt down" in ended.output(rank)
    assert len(checkpoints(ended)) == 1


@pytest.mark.parametrize("on", ["0", "1"])
def test_an_error_in_a_callback_of_one_rank_ends_all(zygote: Zygote, tmp_path: Path, on: str) -> None:
    ended = run_ranks(zygote, tmp_path, "ends", 2, "callback", on)
    assert ended.codes == [1, 1] and max(ended.seconds) < SECONDS
    assert "ZeroDivisionError: the callback's own fault" in ended.output(int(on)).splitlines()[-1]
    assert "RankFailed" in ended.output(1 - int(on))
    assert "closed" in ended.output(0) and "closed" in ended.output(1)
    assert checkpoints(ended) == []


@pytest.mark.parametrize("on", ["0", "1"])
def test_a_killed_rank_ends_all(zygote: Zygote, tmp_path: Path, on: str) -> None:
    ended = run_ranks(zygote, tmp_path, "ends", 2, "killed", on)
    assert sorted(ended.codes) == [-9, 1] and ended.codes[int(on)] == -9 and max(ended.seconds) < SECONDS
    assert "RankFailed" in ended.output(1 - int(on)) and "closed" in ended.output(1 - int(on))


def test_a_signal_to_one_rank_stops_all_behind_the_same_step(zygote: Zygote, tmp_path: Path) -> None:
    ended = run_ranks(zygote, tmp_path, "ends", 2, "signal")
    assert ended.codes == [143, 143] and max(ended.seconds) < SECONDS
    assert checkpoints(ended) == ["checkpoint-2"]
    steps = json.loads((ended.folder / "run/checkpoint-2/trainer_state.json").read_text())
    assert steps["global_step"] == 2


def test_a_run_that_was_stopped_goes_on_in_the_same_processes(zygote: Zygote, tmp_path: Path) -> None:
    ended = run_ranks(zygote, tmp_path, "again", 2)
    assert ended.codes == [0, 0], ended.output(0) + ended.output(1)
    for rank in range(2):
        (stopped,) = re.findall(r"stopped behind step (\d)", ended.output(rank))
        assert 2 <= int(stopped) < 9 and "ended behind step 9" in ended.output(rank)


@pytest.mark.parametrize("pause", [0.0, 1.5])
def test_a_signal_reaches_ranks_that_wait_for_rollouts(zygote: Zygote, tmp_path: Path, pause: float) -> None:
    """With a pause the first rank has played its own part, and waits for the other's."""
    scenario = zygote.start("ranks", tmp_path, "ends", "2", "waiting")
    deadline = time.monotonic() + 60
    output = tmp_path / "rank1.out"
    while not output.exists() or "waiting" not in output.read_text():
        assert time.monotonic() < deadline and alive(scenario.pid), scenario.stderr
        time.sleep(0.01)
    time.sleep(pause)
    os.kill(json.loads((tmp_path / "pids.json").read_text())[0], signal.SIGTERM)
    scenario.finish(60.0)
    codes = json.loads((tmp_path / "codes.json").read_text())
    assert [code for code, _ in codes] == [143, 143] and max(late for _, late in codes) < SECONDS
