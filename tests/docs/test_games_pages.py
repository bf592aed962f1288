"""The pages of the games' ecosystems: their code runs, and their lists are those of the data."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from helpers.pages import DOCS, python_of, run_python

NEEDS = {"reasoning_gym": "reasoning_gym", "gymnasium": "gymnasium", "textarena": "textarena"}


@pytest.mark.parametrize("name", NEEDS)
def test_every_block_of_the_page_runs(name: str) -> None:
    pytest.importorskip(NEEDS[name])
    names: dict[str, Any] = {}
    for number in range(len(python_of(name))):
        names = run_python(name, names, only=number)
        assert names["trainer"].state.global_step == 2
    if name == "gymnasium":
        episode = names["pendulum"]()
        assert episode.reset(seed=1).rpartition("\n")[2].startswith("height ")
        assert episode.push(force=0.5).reward < 0


def test_the_games_that_cannot_be_played_are_listed() -> None:
    games = json.loads((DOCS.parent / "tests" / "ecosystems" / "textarena_games.json").read_text(encoding="utf-8"))
    page = (DOCS / "textarena.md").read_text(encoding="utf-8")
    table = page[page.index("| game | why not |") :]
    listed = set(re.findall(r"`([A-Z][A-Za-z]+)`", table.replace("`gym`", "")))
    assert listed == {game.partition("-")[0] for game, known in games.items() if "fault" in known}
    late = {game.partition("-")[0] for game, known in games.items() if known.get("python") == "3.12"}
    assert late == set(re.findall(r"`([A-Z][A-Za-z]+)`", page[page.index("## What works") : page.index("| game |")]))
    assert f"{sum('fault' not in known for known in games.values())} play" in page
