"""The page on executors: its code runs, and a class that aborts costs its attempts and no run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "executors.md"


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    trainer = names["trainer"]
    assert trainer.state.global_step == 2
    tally = trainer.rollouts.tally
    assert tally.groups >= 4 and set(tally.faults) <= {"environment"}
