from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from envgrad.cli import view as module
from envgrad.cli.main import main
from envgrad.cli.view import has_display


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The exit code of ``envgrad view`` with these words."""
    monkeypatch.setattr(sys, "argv", ["envgrad", "view", *words])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would be served; the address is announced at once."""
    calls: list[Any] = []

    def serve(folders: Any, address: Any, ready: Any) -> None:
        calls.append((list(folders), address))
        ready("http://127.0.0.1:8421/secret/")

    monkeypatch.setattr(module, "serve", serve)
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)
    return calls


def test_one_run_or_two_are_served_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, served: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "runs/a") == 0
    folders, address = served[0]
    assert (folders, address.host, address.port) == ([Path("runs/a")], "127.0.0.1", None)
    assert capsys.readouterr().out == "The viewer is at http://127.0.0.1:8421/secret/\nCtrl-C ends it.\n"
    assert run(monkeypatch, "runs/a", "runs/b", "--port", "9000") == 0
    assert served[1][0] == [Path("runs/a"), Path("runs/b")] and served[1][1].port == 9000


def test_over_ssh_it_says_how_to_forward_the_port(
    monkeypatch: pytest.MonkeyPatch, served: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "1 2 3 4")
    run(monkeypatch, "runs/a")
    assert "ssh -L 8421:127.0.0.1:8421" in capsys.readouterr().out
    run(monkeypatch, "runs/a", "--host", "0.0.0.0")
    said = capsys.readouterr().out
    assert "ssh -L" not in said and "Everybody who has this address" in said


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac always has a screen")
def test_a_window_is_opened_only_where_there_is_a_screen(monkeypatch: pytest.MonkeyPatch, served: list[Any]) -> None:
    opened: list[str] = []
    monkeypatch.setattr(module.webbrowser, "open", opened.append)
    run(monkeypatch, "runs/a")
    assert opened == [] and not has_display()
    monkeypatch.setenv("DISPLAY", ":0")
    run(monkeypatch, "runs/a", "--no-browser")
    assert opened == []
    run(monkeypatch, "runs/a")
    assert opened == ["http://127.0.0.1:8421/secret/"]


def test_a_folder_without_a_log_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, str(tmp_path), "--no-browser") == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and said.err.count("\n") == 1
