"""The page on failures: its code runs, and what it says in comments is so."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.pages import run_python


@pytest.mark.filterwarnings("ignore")
def test_the_blocks_run_and_say_what_they_promise(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    names = run_python("failures")
    printed, warned = capfd.readouterr()
    assert "2 groups in a row were dropped" in printed and "the simulator burnt down" in printed
    assert names["trainer"].state.global_step == 2 and (folder / "runs/failures/checkpoint-2").is_dir()
    assert "\n143\n" in printed and "SIGTERM: saving and closing" in warned
    assert names["stopped"].state.global_step == 2 and names["resumed"].state.global_step == 5
