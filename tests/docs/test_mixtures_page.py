from __future__ import annotations

from collections import Counter
from pathlib import Path

from helpers.pages import run_python


def test_the_page_runs_and_does_what_it_says(folder: Path) -> None:
    names = run_python("mixtures")
    records = list(names["trainer"].episode_log.read())
    # four groups: three of "copy" with four siblings, one of "count" with two
    assert Counter(record["environment"] for record in records) == {"copy": 12, "count": 2}
    assert names["trainer"].state.global_step == 2
