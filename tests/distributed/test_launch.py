"""``accelerate launch -m envgrad.cli train`` on two processes, and the page that shows it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from envgrad.cli.main import main
from envgrad.distributed.configs import config_path
from helpers.pages import blocks

LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config_path("ddp_cpu"))]
SMALL = [
    "--max-steps", "2", "--per-device-train-batch-size", "4", "--num-generations", "4", "--max-completion-length", "24",
    "--report-to", "none", "--use-cpu",
]  # fmt: skip


def launch(folder: Path, *words: str, seconds: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run in a process group of its own, which is ended if it does not end."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        process = subprocess.Popen(
            [*LAUNCH, *words], cwd=folder, env=env, stdout=out, stderr=err, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)
    return subprocess.CompletedProcess(words, code, (folder / "out").read_text(), (folder / "err").read_text())


def test_the_command_trains_on_two_processes_and_one_speaks(tmp_path: Path) -> None:
    done = launch(
        tmp_path, "-m", "envgrad.cli", "train", "--model", "starter", "--environment",
        "envgrad.starter.compass:Compass", "--output-dir", "runs/two", *SMALL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("training starter on Compass: 2 steps") == 1
    assert len(re.findall(r"^\s*model\s", done.stdout, re.MULTILINE)) == 1
    run = tmp_path / "runs/two"
    assert (run / "model" / "model.safetensors").exists() and not (tmp_path / "runs/two-2").exists()
    state = json.loads((run / "trainer_state.json").read_text())
    assert state["global_step"] == 2


def test_without_a_folder_nothing_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = ["train", "--model", "starter", "--environment", "envgrad.starter.compass:Compass", *SMALL]
    monkeypatch.setattr(sys, "argv", ["envgrad", *words])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2 and "2 processes were started, and all need one folder" in capsys.readouterr().err


def test_the_page_runs(tmp_path: Path) -> None:
    script = next(block for block in blocks("distributed") if block.language == "python")
    assert script.file is not None
    (tmp_path / script.file).write_text(script.text)
    done = launch(tmp_path, script.file)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("rank 0 of 2") == 1 and done.stdout.count("rank 1 of 2") == 1
