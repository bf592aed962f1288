from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from envgrad.cli.check import read_row, show_report
from envgrad.cli.main import main
from envgrad.environments.check import (
    AuditRow,
    CheckReport,
    Determinism,
    Finding,
    Level,
    Rule,
)
from envgrad.environments.start import StartMode
from envgrad.errors import ConfigurationError

HELPERS = Path(__file__).parents[1] / "helpers"


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The exit code of ``envgrad check`` with these words, in 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["envgrad", "check", *words])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


SOURCE = """
class Talks:
    def reset(self, question="What?"):
        print("noise")
        return question

    def step(self, message):
        return "ok", True

class Broken(Talks):
    def get_reward(self):
        return "a lot"

class Asks(Talks):
    def reset(self, question):
        return question
"""


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "checked_page", raising=False)
    (tmp_path / "checked_page.py").write_text(SOURCE)
    return str(tmp_path / "checked_page.py")


def test_a_sound_environment_exits_with_0(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "envgrad.starter.compass:Compass", "--groups", "2") == 0
    out = capsys.readouterr().out
    assert "Compass: keeps the contract" in out
    assert "seeded: seed or group_id decides the task" in out
    assert "identity: siblings are reset with the same ids" in out
    assert "An honest failure earns 0." in out
    assert max(len(line) for line in out.splitlines()) <= 80


def test_a_breach_exits_with_1(page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, f"{page}:Broken") == 1
    shown = capsys.readouterr()
    assert "Broken: breaks the contract (1 breach)" in shown.out
    assert "get_reward" in shown.out
    assert "returned 'a lot' (str)" in " ".join(shown.out.split())
    assert "noise" not in shown.out and "noise" in shown.err


def test_json_is_all_that_goes_to_the_standard_output(
    page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, f"{page}:Broken", "--json") == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["version"], data["environment"], data["ok"]) == (1, "Broken", False)
    assert data["findings"][0]["rule"] == "reward"


def test_rows_feed_reset(page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, f"{page}:Asks", "--json") == 1
    assert "nothing supplies" in json.loads(capsys.readouterr().out)["findings"][0]["seen"]
    rows = ["--row", '{"question": "What?"}', "--row", '{"question": "Who?"}']
    assert run(monkeypatch, f"{page}:Asks", "--json", *rows) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["determinism"]["observed"] == "task"
    assert data["start"] == "row"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere_at_all:X"], "there is no module 'nowhere_at_all'"),
        (["envgrad.starter.compass:Compass", "--row", "{"], "--row { is not JSON"),
        (["envgrad.starter.compass:Compass", "--timeout", "0"], "timeout=0.0 must be more than 0"),
    ],
)
def test_what_cannot_work_exits_with_2(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_usage_errors_exit_with_2(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch) == 2
    assert run(monkeypatch, "envgrad.starter.compass:Compass", "--groups", "0") == 2


def test_a_row_must_be_an_object() -> None:
    with pytest.raises(ConfigurationError, match="not a JSON object"):
        read_row("[1]")


REPORT = CheckReport(
    environment="Ga\x1b[31mme",
    findings=(
        Finding(
            level=Level.BREACH,
            rule=Rule.REWARD,
            member="a_member_with_a_very_long_name",
            seen="it returned [bold]inf[/bold].\x07",
            fix="Return a number.",
        ),
        Finding(level=Level.NOTE, rule=Rule.PICKLE, member="pickle", seen="x" * 2000, fix="Nothing."),
    ),
    determinism=Determinism.FIXED,
    start=StartMode.COPY,
    tools=("guess(number: integer)", "look()"),
    failure=-0.5,
    audit=(
        AuditRow(agent="silent", does="writes nothing", rewards=(1.0, None, 0.5), suspicious=True),
        AuditRow(agent="random", does="makes valid, uninformed calls", rewards=(None,)),
    ),
)


def drawn(width: int) -> str:
    stream = io.StringIO()
    show_report(Console(file=stream, width=width), REPORT)
    return stream.getvalue()


@pytest.mark.parametrize("width", [60, 80, 140])
def test_the_tables_fit(width: int) -> None:
    assert max(len(line) for line in drawn(width).splitlines()) <= width


def test_the_tables_show_what_was_found_as_plain_text() -> None:
    text = drawn(80)
    assert "\x1b" not in text and "\x07" not in text
    assert "Game: breaks the contract (1 breach)" in text
    assert "it returned [bold]inf[/bold]." in text  # no markup is read
    assert "fix: Return a number." in text
    assert "(+1400 characters)" in " ".join(text.split())
    assert "fixed: every reset gives the same task" in text
    assert "An honest failure earns -0.5." in text
    (silent,) = [line for line in text.splitlines() if "silent" in line]
    assert silent.split() == ["silent", "writes", "nothing", "3", "0.5", "1", "0.75", "hack?"]
    (unscored,) = [line for line in text.splitlines() if line.strip().startswith("random")]
    assert unscored.split()[-4:] == ["1", "-", "-", "-"]
