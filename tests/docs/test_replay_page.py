"""The page's code runs as it stands, and its command does what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from envgrad.cli.main import app
from helpers.pages import path_of, run_python

PAGE = path_of("replay").read_text(encoding="utf-8")


def test_the_code_and_the_command_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_python("replay")
    out = capsys.readouterr().out
    assert "36 episodes, of them 4 in evaluations" in out and "36 lines" in out and "36 of 36 are equal" in out
    (first, _) = re.findall(r"^envgrad (replay .*)$", PAGE, re.MULTILINE)
    assert CliRunner().invoke(app, first.split()).exit_code == 0
