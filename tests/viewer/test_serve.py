from __future__ import annotations

import importlib.util
import socket
from pathlib import Path

import pytest

from envgrad.errors import ConfigurationError
from envgrad.viewer import serve as module
from envgrad.viewer.serve import ViewAddress, check_installed, run_places, serve


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else real(name))
    with pytest.raises(ConfigurationError, match=r"needs uvicorn: pip install 'envgrad\[viewer\]'"):
        check_installed()


def test_a_folder_without_a_log_is_an_error_before_anything_listens(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="episode"):
        serve([tmp_path], ViewAddress(port=0), lambda url: pytest.fail(url))


def test_runs_are_told_apart_by_as_much_of_their_path_as_needed(tmp_path: Path) -> None:
    one = run_places([tmp_path / "a" / "run" / "episodes"])[0]
    assert (one.id, one.name, one.folder) == ("a", "run", tmp_path / "a" / "run")
    assert [place.name for place in run_places([Path("x/a/run"), Path("y/a/run")])] == [
        str(Path("x/a/run").absolute()),
        str(Path("y/a/run").absolute()),
    ]
    with pytest.raises(ConfigurationError, match="given twice"):
        run_places([tmp_path / "a", tmp_path / "a" / "episodes"])
    with pytest.raises(ConfigurationError, match="3 runs were given"):
        run_places([Path("a"), Path("b"), Path("c")])


def test_the_usual_port_is_taken_if_it_is_free_and_another_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    with ViewAddress(port=0).listen() as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(module, "DEFAULT_PORT", port)
        with ViewAddress().listen() as other:
            assert other.getsockname()[1] != port
        with pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1, port {port}"):
            ViewAddress(port=port).listen()
    with ViewAddress().listen() as own:
        assert own.getsockname()[1] == port


def test_it_listens_on_this_machine_alone_by_default() -> None:
    with ViewAddress(port=0).listen() as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    assert ViewAddress().local and not ViewAddress(host="0.0.0.0").local
    assert "evil.example" not in ViewAddress().names()
    assert socket.gethostname().lower() in ViewAddress(host="0.0.0.0").names()


def test_the_secret_is_new_each_time_unless_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(module.TOKEN_VARIABLE, raising=False)
    first, second = ViewAddress().secret(), ViewAddress().secret()
    assert first != second and len(first) >= 16
    monkeypatch.setenv(module.TOKEN_VARIABLE, "a-secret_of_my-own")
    assert ViewAddress().secret() == "a-secret_of_my-own"
    for bad in ("short", "sixteen/characters/and/more", "with spaces in it all", "ä" * 20):
        monkeypatch.setenv(module.TOKEN_VARIABLE, bad)
        with pytest.raises(ConfigurationError, match="at least 16 letters"):
            ViewAddress().secret()
