"""The page on checking: its code runs, its output is the command's, and it names what there is."""

from __future__ import annotations

import inspect
import io
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from envgrad.cli.check import show_report
from envgrad.environments.check import CheckReport, Determinism, check_environment
from envgrad.environments.start import StartMode

PAGE = Path(__file__).parents[3] / "docs" / "checking.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def rendered(report: CheckReport) -> str:
    stream = io.StringIO()
    show_report(Console(file=stream, width=80), report)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def counted(text: str) -> str:
    """How often the check called before is no part of the page's promise."""
    return re.sub(r"for answer \d+", "for answer N", " ".join(text.split()))


def test_the_code_runs_and_prints_what_the_page_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = blocks("python")
    riddle = ModuleType("riddle")
    monkeypatch.setitem(sys.modules, "riddle", riddle)
    exec(compile(code, "riddle.py", "exec"), vars(riddle))  # the page's own assertion is in it
    (output,) = blocks("text")
    assert counted(rendered(riddle.report)) == counted(output)


def test_the_page_names_every_word_and_option() -> None:
    text = PAGE.read_text()
    for word in (*Determinism, *StartMode):
        assert f"`{word}`" in text
    for key in CheckReport(environment="").as_dict():
        assert f"`{key}`" in text
    options = set(inspect.signature(check_environment).parameters) - {"environment", "name"}
    assert all(f"`{option}`" in text for option in options)
