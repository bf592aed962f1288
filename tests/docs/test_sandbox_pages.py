"""The pages on sandboxes, Harbor and other Pythons: their code runs and does what they say."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from envgrad.environments.sandbox import unavailable
from helpers.harbor_tasks import write_tasks
from helpers.pages import run_python

OTHER = os.environ.get("ENVGRAD_ECOSYSTEM_PYTHON", "")

needs_sandbox = pytest.mark.skipif(unavailable() is not None, reason=f"no sandbox here: {unavailable()}")


@needs_sandbox
def test_sandbox() -> None:
    names = run_python("sandbox", instead={"SandboxLimits(seconds=1)": "SandboxLimits(seconds=5)"})
    assert names["report"].ok, str(names["report"])
    assert (names["slow"].killed, names["slow"].stdout) == ("seconds", "begun\n")
    assert "refused" in names["offline"].stderr and names["kept"] == "kept\n"
    coder = names["Coder"]()
    coder.reset(seed=7)
    coder.python("open('solution.py', 'w').write('print(3 + 4)')")
    assert coder.get_reward() == 1.0
    coder.close()


def test_other_python() -> None:
    names = run_python("other_python", {"python": sys.executable})
    assert names["trainer"].state.global_step == 2


@needs_sandbox
def test_harbor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("harbor")
    write_tasks(tmp_path / "tasks", 4)
    monkeypatch.chdir(tmp_path)
    names = run_python("harbor", only=0)
    assert names["report"].ok, str(names["report"])


@needs_sandbox
@pytest.mark.skipif(not Path(OTHER).is_file(), reason="ENVGRAD_ECOSYSTEM_PYTHON names no interpreter")
def test_harbor_in_another_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tasks(tmp_path / "tasks", 4)
    monkeypatch.chdir(tmp_path)
    assert run_python("harbor", {"python": OTHER}, only=1)["number"] == 3
