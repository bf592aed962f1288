from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from envgrad.cli.init import class_name, scaffold
from envgrad.cli.main import main
from envgrad.errors import ConfigurationError


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["envgrad", *words])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


def test_what_is_made_passes_its_own_test_and_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "dice_game", raising=False)
    assert run(monkeypatch, "init", "dice_game") == 0
    out = capsys.readouterr().out
    for line in ("made dice_game/dice_game.py", "cd dice_game", "envgrad play dice_game.py:DiceGame"):
        assert line in out
    folder = tmp_path / "dice_game"
    names = {path.name for path in folder.iterdir()}
    assert names == {"dice_game.py", "test_dice_game.py", "train.yaml", "README.md"}
    assert all("$" not in path.read_text() for path in folder.iterdir())

    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    tested = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert tested.returncode == 0 and "3 passed" in tested.stdout, tested.stdout

    monkeypatch.chdir(folder)
    small = ("--max-steps", "2", "--per-device-train-batch-size", "8")
    assert run(monkeypatch, "train", "--config", "train.yaml", *small) == 0
    assert (folder / "runs" / "dice_game" / "model" / "config.json").is_file()


def test_the_readme_is_ten_lines_with_commands_that_name_the_files(tmp_path: Path) -> None:
    made = scaffold(tmp_path / "shop")
    readme = (tmp_path / "shop" / "README.md").read_text()
    assert len(readme.splitlines()) <= 10
    for command in ("pytest", "envgrad play shop.py:Shop", "envgrad train --config train.yaml"):
        assert f"    {command}" in readme
    assert len(made) == 4


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my-game", "is no name that Python can import; write for example"),
        ("2048", "is no name that Python can import"),
        ("class", "is no name that Python can import"),
        ("random", "is the name of another module"),
        ("envgrad", "is the name of another module"),
        ("test_game", "begins as a test does"),
        ("Game", "begins with a capital"),
    ],
)
def test_names_that_cannot_work(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        scaffold(tmp_path / name)
    assert message in str(raised.value)
    assert not (tmp_path / name).exists()
    suggested = Path(str(raised.value).rpartition(" ")[2])
    assert len(scaffold(suggested)) == 4  # what it suggests works


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "game").mkdir()
    assert len(scaffold(tmp_path / "game")) == 4  # an empty folder is no loss
    (tmp_path / "game" / "game.py").write_text("mine")
    with pytest.raises(ConfigurationError, match="nothing is overwritten"):
        scaffold(tmp_path / "game")
    assert (tmp_path / "game" / "game.py").read_text() == "mine"
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="nothing is overwritten"):
        scaffold(tmp_path / "file")


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        scaffold(tmp_path / "file" / "game")


def test_class_names() -> None:
    assert class_name("number_game") == "NumberGame"
    assert class_name("x") == "X"
