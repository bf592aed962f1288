"""What is installed: a wheel with the starter's weights, and a light import."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="not a checkout")
def test_the_wheel_carries_the_starter_and_no_tests(tmp_path):
    # From a copy, so that no build folder is left in the checkout.
    tracked = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in tracked.stdout.split("\n"):
        if name.startswith(("envgrad/", "pyproject", "README", "LICENSE")) and (ROOT / name).is_file():
            target = tmp_path / "source" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", tmp_path]
    subprocess.run([*command, tmp_path / "source"], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("envgrad-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "envgrad/starter/weights/model.safetensors" in names and "envgrad/py.typed" in names
    assert "envgrad/starter/weights/chat_template.jinja" in names
    assert all(name.startswith("envgrad") for name in names), names
    assert wheel.stat().st_size < 10_000_000
