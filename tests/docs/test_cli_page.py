"""The page on the command line names every command, its commands have options that exist, and its example plays."""

from __future__ import annotations

import io
import re
import shlex
import sys

import pytest
from typer.main import get_command

from envgrad.cli.main import app, main
from helpers.pages import path_of

PAGE = path_of("cli").read_text(encoding="utf-8")
COMMANDS = get_command(app).commands  # type: ignore[attr-defined]


def written() -> list[list[str]]:
    """Every ``envgrad ...`` of the page's blocks and table."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()] + re.findall(r"`(envgrad [^`]+)`", PAGE)
    found = [shlex.split(line[line.index("envgrad ") :]) for line in lines if "envgrad " in line]
    return [words[1:] for words in found]


def test_every_command_is_on_the_page() -> None:
    named = {words[0] for words in written()}
    assert set(COMMANDS) <= named, set(COMMANDS) - named


def test_commands_and_options_exist() -> None:
    own = {option for one in get_command(app).params for option in one.opts}
    own |= {"--help", "--install-completion", "--show-completion"}
    for first, *rest in written():
        if first.startswith("-"):
            assert first in own
            continue
        if first == "COMMAND":
            continue
        options = {option for one in COMMANDS[first].params for option in one.opts} | {"--help"}
        assert {word for word in rest if word.startswith("--")} <= options, (first, rest)


def test_the_played_example_is_an_episode(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    line = next(line for line in PAGE.splitlines() if line.startswith("printf"))
    typed, _, command = line.partition(" | ")
    monkeypatch.setattr(sys, "stdin", io.StringIO(shlex.split(typed)[1].replace("\\n", "\n")))
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    with pytest.raises(SystemExit) as left:
        main()
    assert not left.value.code
    out = capsys.readouterr().out
    assert "Reach the goal in six moves." in out and "ended by  answer" in out
