"""Run the scripts of ``benchmarks/trl_scripts`` under trl and under envgrad, with nothing but the import line changed.

    python -m benchmarks.run_trl_scripts [--steps 30] [--libraries trl envgrad] [--model NAME_OR_PATH]

trl is not among envgrad's requirements: install it beside them (``pip install --no-deps trl==1.16.0``), or give its
folder with ``--trl-path``. Prints each script's reward curve and wall-clock time under each library.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from envgrad.starter import STARTER_PATH

SCRIPTS = Path(__file__).parent / "trl_scripts"
NAMES = ("math_reward", "tool_agent", "number_game")
LIBRARIES = ("trl", "envgrad")
IMPORT = re.compile(r"^from trl import ", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What one run logged."""

    rewards: tuple[float, ...]
    seconds: float


def rewritten(name: str, library: str) -> str:
    """The script's text with its one import line for ``library``."""
    text, count = IMPORT.subn(f"from {library} import ", (SCRIPTS / f"{name}.py").read_text(encoding="utf-8"))
    if count != 1:
        raise AssertionError(f"{name}.py must import trl in one line, found {count}")
    return text


def run_script(
    name: str, library: str, *, model: str, steps: int, folder: Path, search_path: tuple[str, ...] = ()
) -> Curve:
    """Run one script in a process of its own. A script that fails raises ``CalledProcessError`` with its output."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / f"{name}.py"
    script.write_text(rewritten(name, library), encoding="utf-8")
    paths = [str(SCRIPTS), str(SCRIPTS.parents[1]), *search_path, os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    environment |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, str(script), "--model", model, "--max-steps", str(steps), "--output-dir", str(folder)]
    began = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name} under {library} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    rewards = json.loads((folder / "rewards.json").read_text(encoding="utf-8"))
    return Curve(rewards=tuple(rewards), seconds=time.perf_counter() - began)


def summary(curve: Curve, parts: int = 6) -> str:
    """Mean rewards of ``parts`` equal stretches of the run."""
    size = max(1, len(curve.rewards) // parts)
    means = [
        sum(part) / len(part) for start in range(0, len(curve.rewards), size) if (part := curve.rewards[start:][:size])
    ]
    return " ".join(f"{mean:5.2f}" for mean in means) + f"   {curve.seconds:6.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(STARTER_PATH))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--scripts", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=LIBRARIES)
    parser.add_argument("--trl-path", default=None, help="folder that holds trl, if it is not installed")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.scripts:
            for library in arguments.libraries:
                curve = run_script(
                    name,
                    library,
                    model=arguments.model,
                    steps=arguments.steps,
                    folder=Path(folder) / library / name,
                    search_path=(arguments.trl_path,) if arguments.trl_path and library == "trl" else (),
                )
                print(f"{name:12s} {library:8s} {summary(curve)}", flush=True)


if __name__ == "__main__":
    main()
