"""Runs that are killed by SIGKILL again and again end in the weights of the run that never was, bit for bit.

Where a life ends is drawn by a seed: at a counted event of each kind (``helpers.kill_scenarios``), or after a time that
is counted from the moment that training begins. ``ENVGRAD_LONG=1`` (``make test-long``) plays all of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from helpers.kill_scenarios import EVENTS, VARIANTS
from helpers.zygote import Zygote

LONG = os.environ.get("ENVGRAD_LONG") == "1"
long_run = pytest.mark.skipif(not LONG, reason="part of make test-long")

MOST = {"rollout": 32, "publish": 2, "micro": 4, "optimizer": 4, "save": 40, "load": 3}
"""events that a life may see before it is killed: those of about two steps, or of a round"""


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote("helpers.kill_scenarios")
    yield zygote
    zygote.close()


@dataclass(slots=True)
class Lives:
    """One run and its lives."""

    zygote: Zygote
    folder: Path
    algorithm: str
    variant: str
    steps: int
    scenario: str = "life"
    tasks: int = 0
    """those of an epoch"""
    by: signal.Signals = signal.SIGKILL
    deaths: list[str] = field(default_factory=list)
    """what each life ended by: an event with its count, or a time"""

    def spec(self, **more: object) -> str:
        names = ("algorithm", "variant", "steps", "tasks")
        return json.dumps({name: getattr(self, name) for name in names} | more)

    def live(self, event: str, count: int) -> bool:
        """One life that is to end at an event; whether it was killed."""
        code, life = self.zygote.run(
            self.scenario, self.folder, self.spec(event=event, count=count, signal=self.by.name), seconds=200.0
        )
        return self._killed(code, f"{event} {count}", life.stderr)

    def live_for(self, seconds: float) -> bool:
        """One life that is to end at a time; whether it was killed."""
        life = self.zygote.start(self.scenario, self.folder, self.spec())
        life.wait_for("begins")
        time.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            life.kill(self.by)
        return self._killed(life.finish(), f"{seconds:.3f} s", life.stderr)

    def _killed(self, code: int, how: str, stderr: str) -> bool:
        shutil.move(self.folder / "stdout", self.folder / f"stdout-{len(self.deaths)}")
        if code == 0:
            return False
        expected = -signal.SIGKILL if self.by is signal.SIGKILL else 128 + self.by
        assert code == expected, f"{self.deaths}, {how}:\n{stderr}"
        self.deaths.append(how)
        return True

    def finish(self) -> torch.Tensor:
        """Live to the end; the final weights."""
        assert not (self.folder / "weights.pt").exists(), "it has ended before"
        assert not self.live("never", 1)
        return self.weights()

    def weights(self) -> torch.Tensor:
        found: torch.Tensor = torch.load(self.folder / "weights.pt", weights_only=True)
        return found

    def die(self, times: int, seed: int) -> None:
        """Lives that are killed: each kind of event in turn, and every seventh at a time of the clock."""
        draw = random.Random(seed)
        for number in range(times):
            kind = (*EVENTS, "time")[(number + seed) % 7]
            if kind == "load" and not list((self.folder / "run").glob("checkpoint-*")):
                kind = "optimizer"  # there is nothing to load yet
            most = MOST.get(kind, 0)
            killed = self.live(kind, draw.randint(1, most)) if most else self.live_for(draw.uniform(0.0, 0.3))
            assert killed, f"the run ended early: {self.deaths}"
            assert whole(self.folder / "run"), f"a torn checkpoint after {self.deaths}"


def whole(run: Path) -> bool:
    """Whether every folder that could be resumed from holds all that a checkpoint has."""
    needed = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "rollout_state.json"}
    return all(needed <= {path.name for path in folder.iterdir()} for folder in run.glob("checkpoint-*"))


def make(zygote: Zygote, folder: Path, algorithm: str, variant: str, steps: int) -> tuple[Lives, Lives]:
    """A run that is never killed, and one that will be."""
    for name in ("whole", "killed"):
        (folder / name).mkdir()
    unbroken = Lives(zygote, folder / "whole", algorithm, variant, steps)
    return unbroken, Lives(zygote, folder / "killed", algorithm, variant, steps)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_run_ends_in_the_weights_of_the_whole_one(zygote: Zygote, tmp_path: Path) -> None:
    """Twenty kills: in a rollout, behind a publish, in a micro-batch, around an update, in a save, in a load."""
    unbroken, killed = make(zygote, tmp_path, "GRPO", "all", steps=60)
    expected = unbroken.finish()
    killed.die(20, seed=0)
    assert torch.equal(killed.finish(), expected), killed.deaths


@long_run
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("algorithm", ["GRPO", "RLOO", "SDPO"])
def test_kills_change_no_bit(zygote: Zygote, tmp_path: Path, algorithm: str, variant: str) -> None:
    long_rounds = variant in ("rounds", "all", "short rounds")
    unbroken, killed = make(zygote, tmp_path, algorithm, variant, steps=20 * (3 if long_rounds else 2))
    expected = unbroken.finish()
    killed.die(20, seed=sorted(VARIANTS).index(variant) + 100 * len(algorithm))
    assert torch.equal(killed.finish(), expected), killed.deaths


@long_run
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("algorithm", ["GRPO", "RLOO", "SDPO"])
def test_terminations_change_no_bit_either(zygote: Zygote, tmp_path: Path, algorithm: str) -> None:
    unbroken, stopped = make(zygote, tmp_path, algorithm, "all", steps=60)
    stopped.by = signal.SIGTERM
    expected = unbroken.finish()
    stopped.die(8, seed=len(algorithm))
    assert torch.equal(stopped.finish(), expected), stopped.deaths


def lineage(folder: Path, lives: int) -> list[dict[str, list[int]]]:
    """The steps that led to the final weights, in order: what a life made behind the checkpoint of the next is lost."""
    steps: dict[int, dict[str, list[int]]] = {}
    for number in range(lives):
        for line in (folder / f"stdout-{number}").read_text().splitlines():
            told = json.loads(line) if line.startswith("{") else {}
            if "from" in told:
                steps = {step: kept for step, kept in steps.items() if step <= told["from"]}
            elif "step" in told:
                steps[told.pop("step")] = told
    return [steps[step] for step in sorted(steps)]


def account(zygote: Zygote, folder: Path, variant: str, tasks: int, deaths: int, seed: int) -> None:
    """Kill an epoch again and again; in its lineage each task is trained once, or counted as dropped with a reason."""
    run = Lives(zygote, folder, "AsyncGRPO", variant, -1, scenario="epoch", tasks=tasks)
    run.die(deaths, seed)
    run.finish()
    steps = lineage(folder, deaths + 1)
    ends = {
        name: [task for step in steps for task in step[name]] for name in ("groups", "dropped", "filtered", "stale")
    }
    assert sorted(task for tasks in ends.values() for task in tasks) == list(range(tasks)), (run.deaths, ends)
    broken = len([task for task in range(tasks) if task % 7 == 3])
    assert ends["groups"] and len(ends["dropped"]) == broken
    newest = max(int(path.name.partition("-")[2]) for path in (folder / "run").glob("checkpoint-*"))
    history = json.loads((folder / "run" / f"checkpoint-{newest}" / "trainer_state.json").read_text())["log_history"]
    counted = sum(entry.get("groups/dropped", 0.0) for entry in history if "loss" in entry)
    # a last step may be behind the last checkpoint
    assert counted == sum(len(step["dropped"]) for step in steps[:newest]), "counted in the logs"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_asynchronous_run_trains_each_task_once_or_counts_it(zygote: Zygote, tmp_path: Path) -> None:
    account(zygote, tmp_path, "plain", tasks=40, deaths=3, seed=1)


@long_run
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("variant", ["plain", "lora", "passes", "short rounds"])
def test_twenty_kills_lose_no_task_of_an_asynchronous_run(zygote: Zygote, tmp_path: Path, variant: str) -> None:
    account(zygote, tmp_path, variant, tasks=160, deaths=20, seed=sorted(VARIANTS).index(variant))
