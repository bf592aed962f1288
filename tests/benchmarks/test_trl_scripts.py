"""Scripts in trl's API run with nothing but their import line changed."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from envgrad.starter import STARTER_PATH

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "benchmarks" / "trl_scripts"


@pytest.fixture
def runner(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return runpy.run_path(str(ROOT / "benchmarks" / "run_trl_scripts.py"))


def test_only_the_import_line_differs(runner):
    for name in runner["NAMES"]:
        theirs = (SCRIPTS / f"{name}.py").read_text().splitlines()
        ours = runner["rewritten"](name, "envgrad").splitlines()
        differing = [(a, b) for a, b in zip(theirs, ours, strict=True) if a != b]
        assert differing == [("from trl import GRPOConfig, GRPOTrainer", "from envgrad import GRPOConfig, GRPOTrainer")]


@pytest.mark.parametrize(
    ("name", "component"),
    [("math_reward", "number_reward"), ("tool_agent", "near_reward"), ("number_game", "HigherLower")],
)
def test_scripts_run_here(runner, tmp_path, monkeypatch, capsys, name, component):
    script = tmp_path / f"{name}.py"
    script.write_text(runner["rewritten"](name, "envgrad"))
    monkeypatch.syspath_prepend(str(SCRIPTS))
    words = ["--model", str(STARTER_PATH), "--max-steps", "1", "--output-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [str(script), *words])
    runpy.run_path(str(script), run_name="__main__")
    rewards = json.loads((tmp_path / "rewards.json").read_text())
    assert len(rewards) == 1 and 0 < rewards[0] < 2
    assert f"rewards/{component}/mean" in capsys.readouterr().out


def test_a_script_that_fails_says_so(runner, tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, stdout="half way", stderr="no such model")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(RuntimeError, match=r"math_reward under envgrad failed:\nhalf way\nno such model"):
        runner["run_script"]("math_reward", "envgrad", model=str(tmp_path / "none"), steps=1, folder=tmp_path / "run")


def test_curves_are_summed_up_in_parts(runner):
    curve = runner["Curve"](rewards=(0.0, 1.0, 1.0, 1.0), seconds=2.0)
    assert runner["summary"](curve, parts=2).split() == ["0.50", "1.00", "2.0", "s"]
