"""The page's code runs as it stands, and its command does what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from envgrad.cli.main import app

PAGE = (Path(__file__).parents[2] / "docs" / "replay.md").read_text(encoding="utf-8")


def test_the_code_and_the_command_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {"__name__": "page"}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        exec(compile(block, "docs/replay.md", "exec"), scope)
    out = capsys.readouterr().out
    assert "36 episodes, of them 4 in evaluations" in out and "36 lines" in out and "36 of 36 are equal" in out
    (first, _) = re.findall(r"^envgrad (replay .*)$", PAGE, re.MULTILINE)
    assert CliRunner().invoke(app, first.split()).exit_code == 0
