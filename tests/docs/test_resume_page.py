"""The page on resuming: its code runs, and what it says in comments is so."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.pages import path_of, run_python


@pytest.mark.filterwarnings("ignore")
def test_the_blocks_run_and_say_what_they_promise(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = run_python("resume")
    assert names["again"].state.global_step == 4
    held = {path.name for path in (folder / "runs/resume/checkpoint-4").iterdir()}
    page = path_of("resume").read_text(encoding="utf-8")
    own = {name for name in held if name.startswith("rollout_")}
    assert own and all(f"`{name}`" in page for name in own), "the page names every file of ours"
    assert "was written with num_generations=4, and this run has 2" in capsys.readouterr().out
