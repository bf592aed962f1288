"""The page on scaling: what it shows of ``envgrad plan`` is what the command prints.

Its table of measured steps is held to the file in ``test_against_measured``.
"""

from __future__ import annotations

import shlex
import sys
from itertools import pairwise

import pytest

from envgrad.cli.main import main
from helpers.pages import blocks, run_python

SHOWN = [
    (command.text.strip(), printed.text)
    for command, printed in pairwise(blocks("scaling"))
    if command.language == "sh" and printed.language == "text"
]


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


@pytest.mark.parametrize(("command", "printed"), SHOWN, ids=[command for command, _ in SHOWN])
def test_the_tables_are_the_tools_own(
    command: str, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--simulate" in command:
        pytest.importorskip("simpy")
    monkeypatch.setenv("COLUMNS", "118")
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    with pytest.raises(SystemExit) as left:
        main()
    assert not left.value.code
    assert lines(capsys.readouterr().out) == lines(printed)


def test_every_command_is_shown_with_what_it_prints() -> None:
    assert len(SHOWN) == sum(block.language == "sh" for block in blocks("scaling")) >= 3


def test_the_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("simpy")
    run_python("scaling")
    assert "trainer busy" in capsys.readouterr().out
