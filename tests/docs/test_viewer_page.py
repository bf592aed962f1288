"""The page's commands run as they stand; its keys and pages are the viewer's."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from helpers.episode_runs import make_run
from helpers.pages import ROOT, path_of

pytest.importorskip("uvicorn")

PAGE = path_of("viewer").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^envgrad (view .*)$", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    for seed, name in enumerate(("first", "second")):
        make_run(folder / "runs" / name, 16, seed=seed)
    return folder


def test_the_page_shows_these_commands() -> None:
    assert COMMANDS == [
        "view runs/first",
        "view runs/first runs/second",
        "view runs/first --port 8421 --no-browser",
    ]


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_serves_until_it_is_interrupted(runs: Path, command: str) -> None:
    words = shlex.split(command.replace("8421", "0").replace(" --port 0", ""))
    environment = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY")}
    environment |= {"ENVGRAD_VIEW_TOKEN": "a-secret-of-the-page"}
    process = subprocess.Popen(
        [sys.executable, "-m", "envgrad", *words], cwd=runs, env=environment, text=True, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        address = said.removeprefix("The viewer is at ").strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/a-secret-of-the-page/", address)
        with urllib.request.urlopen(f"{address}api/run", timeout=20) as answer:
            body = answer.read().decode()
        assert body.count('"id":') == command.count("runs/")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
    assert process.stdout.read().strip().endswith("Ctrl-C ends it.")


def test_keys_of_the_page_are_the_viewer_s() -> None:
    keys = (ROOT / "envgrad" / "viewer" / "static" / "js" / "keys.js").read_text(encoding="utf-8")
    told = re.search(r"`\?` lists the keys: (.*?)\n\n", PAGE, re.DOTALL)
    assert told is not None
    for key in re.findall(r"`(\S)`", told[1]):
        assert f'"{key}"' in keys, key


def test_every_page_of_the_viewer_is_told() -> None:
    for name in ("Overview", "Steps", "Group", "Episode", "Tokens", "Episodes", "Compare"):
        assert f"| {name} |" in PAGE
