"""The page on trackers: its code runs, and what it names is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.pages import path_of, run_python


@pytest.mark.filterwarnings("ignore")
def test_the_block_runs_and_leaves_what_the_page_says(folder: Path) -> None:
    pytest.importorskip("tensorboard")
    names = run_python("tracking")
    run = folder / "runs/tracked"
    assert list((run / "runs").glob("*/events.out.*"))
    assert Path(names["trainer"].state.best_model_checkpoint).is_dir() and (run / "README.md").exists()
    page = path_of("tracking").read_text(encoding="utf-8")
    assert f"({names['trainer'].args.num_episodes_to_report + 2})" in page, "the default"
