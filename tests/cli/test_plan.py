from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from envgrad.cli.main import main
from envgrad.cli.plan import PlanRequest, duration, plan_of, show_plan
from envgrad.errors import ConfigurationError


def shown(request: PlanRequest, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    plan = plan_of(request)
    show_plan(console, request, plan, plan.simulate(steps=1) if request.simulate else None)
    return console.file.getvalue()  # type: ignore[attr-defined]


def called(monkeypatch: pytest.MonkeyPatch, *words: str) -> object:
    monkeypatch.setattr(sys, "argv", ["envgrad", "plan", *words])
    with pytest.raises(SystemExit) as left:
        main()
    return left.value.code


@pytest.mark.parametrize("width", [80, 120])
def test_the_page(width: int) -> None:
    out = shown(PlanRequest(model="8B", gpus=16, environment_latency="2s", price_per_hour=3.0, steps=100), width)
    assert "8B (8.19 billion parameters) on 16 x h100" in out
    assert "the best split" in out and "--asynchronous" in out
    assert "not measured" in out and "for 100 steps" in out
    assert all(len(line) <= width for line in out.splitlines())
    for part in ("rollouts", "weight publish", "sampling: keys and values", "episode loop", "checkpoint"):
        assert part in out


def test_beside_a_simulation() -> None:
    pytest.importorskip("simpy")
    out = shown(PlanRequest(model="0.6B", gpus=4, trainer_gpus=2, groups=4, simulate=True, asynchronous=True))
    assert "simulated" in out and "as given" in out and "max_staleness=1" in out


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert not called(monkeypatch, "--model", "8B", "--gpus", "16", "--environment-latency", "500ms", "--json")
    data = json.loads(capsys.readouterr().out)
    assert data["workload"]["latency"]["mean"] == 0.5 and data["split_chosen"]
    assert {one["part"] for one in data["saturation"]} >= {"trainer", "weight publish"}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--model", "9B"], "9B"),
        (["--model", "8B"], "--trainer-gpus"),
        (["--model", "8B", "--gpus", "8", "--environment-latency", "soon"], "soon"),
        (["--model", "8B", "--gpus", "8", "--gpu", "z1"], "z1"),
        (["--model", "8B", "--gpus", "8", "--measured", "nowhere.json"], "nowhere.json"),
        (["--model", "8B", "--gpus", "8", "--concurrency", "3"], "concurrency=3"),
        (["--model", "8B", "--gpu", "8", "--gpuz", "3"], "--gpuz"),
    ],
)
def test_what_cannot_be_ends_with_2_and_a_line(
    words: list[str], named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(monkeypatch, *words) == 2
    err = capsys.readouterr().err
    assert named in err and "Traceback" not in err


def test_durations() -> None:
    assert [duration(text) for text in ("2", "2s", "250ms", "1.5m", "1h", ".5s")] == [2.0, 2.0, 0.25, 90.0, 3600.0, 0.5]
    with pytest.raises(ConfigurationError, match="no duration"):
        duration("-1s")


def test_a_plan_loads_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['envgrad', 'plan', '--model', '8B', '--gpus', '16', '--json']\n"
        "from envgrad.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as left: assert not left.code, left.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not done.returncode, done.stderr
