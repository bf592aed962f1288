"""The page on failures: its code runs, and what it says in comments is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "failures.md"


@pytest.mark.filterwarnings("ignore")
def test_the_blocks_run_and_say_what_they_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    printed, warned = capfd.readouterr()
    assert len(blocks) == 2
    assert "2 groups in a row were dropped" in printed and "the simulator burnt down" in printed
    assert names["trainer"].state.global_step == 2 and (tmp_path / "runs/failures/checkpoint-2").is_dir()
    assert "\n143\n" in printed and "SIGTERM: saving and closing" in warned
    assert names["stopped"].state.global_step == 2 and names["resumed"].state.global_step == 5
