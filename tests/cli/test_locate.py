from __future__ import annotations

import sys
from pathlib import Path

import pytest

from envgrad.cli.locate import locate, locate_environments
from envgrad.errors import ConfigurationError
from envgrad.starter.compass import Compass

SOURCE = """
from neighbour_of_an_environment import REWARD

class Easy:
    def reset(self): return "go"
    def get_reward(self): return REWARD

class Holder:
    class Inner(Easy): pass

number = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "neighbour_of_an_environment.py").write_text("REWARD = 1.0\n")
    (tmp_path / "own_environment.py").write_text(SOURCE)
    (tmp_path / "broken_environment.py").write_text("import there_is_no_such_package\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("neighbour_of_an_environment", "own_environment", "broken_environment"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_a_module_of_the_current_folder_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert locate("own_environment:Easy")().get_reward() == 1.0  # type: ignore[attr-defined]


def test_a_file_is_found_with_its_neighbours(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert locate(f"{folder / 'own_environment.py'}:Easy")().get_reward() == 1.0  # type: ignore[attr-defined]
    inner = locate(f"{folder / 'own_environment.py'}:Holder.Inner")
    assert isinstance(inner(), locate(f"{folder / 'own_environment.py'}:Easy"))  # type: ignore[arg-type]  # loaded once


def test_an_import_error_inside_the_environment_is_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(ModuleNotFoundError, match="there_is_no_such_package"):
        locate("broken_environment:Easy")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("own_environment.Easy", "names no class; write module:Class"),
        ("own_environment:", "names no class"),
        ("nowhere_at_all:Easy", "there is no module 'nowhere_at_all'; it is neither installed nor a file below"),
        ("envgrad.nowhere:Easy", "there is no module 'envgrad.nowhere'"),
        ("some/folder/own_environment:Easy", "a path ends in .py"),
        ("nowhere.py:Easy", "there is no file"),
        (".own_environment:Easy", "does not begin with a dot"),
        ("own_environment:Esy", "has no 'Esy'; did you mean Easy?"),
        ("own_environment:Zzzzzz", "has no 'Zzzzzz'; its environments: Easy"),
        ("own_environment:number", "is a int, not a class; its environments: Easy"),
    ],
)
def test_what_cannot_be_found_is_named_with_the_fix(
    folder: Path, monkeypatch: pytest.MonkeyPatch, spec: str, message: str
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigurationError) as caught:
        locate(spec)
    assert message in str(caught.value)
    assert spec in str(caught.value)


def test_one_or_several_environments() -> None:
    spec = "envgrad.starter.compass:Compass"
    assert locate_environments([spec]) is Compass
    assert locate_environments([f"grid={spec}"]) == {"grid": Compass}
    assert locate_environments([spec, f"grid={spec}"]) == {"Compass": Compass, "grid": Compass}
    for specs, message in (
        ([], "nothing to learn from: give --environment"),
        ([spec, spec], "two environments are named 'Compass'"),
        ([f"two words={spec}"], "cannot be a name"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            locate_environments(specs)
