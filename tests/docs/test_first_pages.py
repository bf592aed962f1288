"""The first pages, followed from top to bottom as a new user does, with fewer steps; and the notebook."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from envgrad.episodes import EpisodeReader
from helpers.pages import ROOT, blocks, lines_of, run_command, run_page, run_python

FEW = {
    "max_steps=60": "max_steps=1",
    "max_steps=40": "max_steps=1, eval_tasks=4, use_cpu=True",
    "per_device_train_batch_size=64": "per_device_train_batch_size=8",
    "num_generations=8": "num_generations=4",
}


@pytest.mark.filterwarnings("ignore")
def test_first_steps(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for block in blocks("first_steps"):
        if block.language == "python":
            monkeypatch.syspath_prepend(str(Path.cwd()))
            names = run_python("first_steps", instead=_few("first_steps"))
            assert names["trainer"].state.global_step == 1
        elif block.language == "sh" and not block.not_run:
            for line in lines_of(block):
                if line != "envgrad demo":  # tests/cli/test_demo.py runs it
                    run_command(line, monkeypatch)
    with EpisodeReader("runs/number_game") as reader:
        assert reader.count() == 8 and reader.environments() == ["NumberGame"]
    assert "ended by  done" in capsys.readouterr().out


def _few(page: str) -> dict[str, str]:
    text = "".join(block.text for block in blocks(page))
    return {part: other for part, other in FEW.items() if part in text}


@pytest.mark.filterwarnings("ignore")
def test_an_environment_in_ten_minutes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = run_page("write_an_environment", monkeypatch, instead=FEW)
    with EpisodeReader("runs/thermostat") as reader:
        assert reader.count() == 12 and reader.splits() == ["eval", "train"]
    assert "ended by  answer" in capsys.readouterr().out
    sums = names["Sums"]()
    assert "4 + 4" in sums.reset(task_index=1) and sums.step("8") == ("right", True) and sums.get_reward() == 1.0
    assert names["room"].get_reward() == {"comfortable": float(names["room"].off == 0), "thrift": 0.30000000000000004}


def test_the_first_environment_and_its_script_have_fewer_than_forty_lines() -> None:
    files = [block.text for block in blocks("write_an_environment") if block.file in ("thermostat.py", "train.py")]
    assert len(files) == 2
    assert sum(bool(line.strip()) for file in files for line in file.splitlines()) < 40


def test_the_notebook_holds_no_output() -> None:
    cells = json.loads((ROOT / "examples" / "first_steps.ipynb").read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    book = nbformat.read(ROOT / "examples" / "first_steps.ipynb", as_version=4)
    for cell in book.cells:
        cell.source = cell.source.replace("max_steps=30", "max_steps=2").replace("_batch_size=64", "_batch_size=16")
    client = nbclient.NotebookClient(book, timeout=240, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    printed = "".join(
        output.get("text", "") + "".join(output.get("data", {}).get("text/plain", ""))
        for cell in book.cells
        for output in cell.get("outputs", ())
    )
    assert "keeps the contract" in printed and "32 episodes" in printed
