"""The page on resuming: its code runs, and what it says in comments is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "resume.md"


@pytest.mark.filterwarnings("ignore")
def test_the_blocks_run_and_say_what_they_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert len(blocks) == 3
    assert names["again"].state.global_step == 4
    held = {path.name for path in (tmp_path / "runs/resume/checkpoint-4").iterdir()}
    page = PAGE.read_text(encoding="utf-8")
    own = {name for name in held if name.startswith("rollout_")}
    assert own and all(f"`{name}`" in page for name in own), "the page names every file of ours"
    assert "was written with num_generations=4, and this run has 2" in capsys.readouterr().out
