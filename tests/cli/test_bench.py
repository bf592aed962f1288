from __future__ import annotations

import io
import json
import sys

import pytest
from rich.console import Console

from envgrad.cli.bench import BenchRequest, described, show_speed
from envgrad.cli.main import main
from envgrad.training.speed import Machine, ModelSpeed, Speed

FOUND = ModelSpeed(
    machine=Machine(device="cpu", threads=2, dtype="float32", matmul=50e9, reads=12.5e9),
    parameters=1234,
    decoding=Speed(tokens=2048, seconds=2.0, floor=0.5),
    training=Speed(tokens=2048, seconds=0.5, floor=None),
)


@pytest.mark.parametrize("width", [80, 120])
def test_the_table(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    show_speed(console, BenchRequest(), FOUND)
    out = console.file.getvalue()  # type: ignore[attr-defined]
    assert "cpu, 2 threads: 50 Gflop/s in float32 matrix products, 12.5 GB/s read" in out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.startswith(("decoding", "training"))}
    assert rows["decoding"] == ["1,024", "2.00", "0.500", "25%"]
    assert rows["training"] == ["4,096", "0.500", "unknown", "unknown"]


def test_json() -> None:
    data = described(BenchRequest(rows=4), FOUND)
    assert data["rows"] == 4 and data["machine"]["threads"] == 2
    assert data["decoding"]["tokens_per_second"] == 1024.0 and data["training"]["floor_share"] is None


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--rows", "2", "--prompt", "4", "--answer", "2", "--repeats", "1", "--use-cpu", "--json"]
    monkeypatch.setattr(sys, "argv", ["envgrad", "bench", *words])
    with pytest.raises(SystemExit) as left:
        main()
    assert not left.value.code
    data = json.loads(capsys.readouterr().out)
    assert data["model"] == "starter" and data["decoding"]["tokens"] == 4


def test_a_model_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["envgrad", "bench", "--model", "./nowhere"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert "./nowhere" in capsys.readouterr().err
