"""Every way out of a run closes every instance once, whatever other closings do; ``kill -9`` leaves no process."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.chaos_scenarios import Book
from helpers.trainers import NAMES
from helpers.zygote import Zygote, alive, gone


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote("helpers.chaos_scenarios")
    yield zygote
    zygote.close()


def book_of(folder: Path) -> Book:
    return Book(folder / "book", seed=0, ways=("ok",))


def check_ended(folder: Path, said: str) -> None:
    lines = book_of(folder).lines()
    opened = {number for member, number, *_ in lines if member == "open"}
    closed = Counter(instance for member, _, instance, *_ in lines if member == "end")
    assert opened and closed == dict.fromkeys(opened, 1), said


@pytest.mark.parametrize("executor", ["thread", "process"])
@pytest.mark.parametrize("end", ["normal", "exception", "evaluation"])
def test_instances_are_closed_once(zygote: Zygote, tmp_path: Path, end: str, executor: str) -> None:
    code, run = zygote.run("living", tmp_path, end, executor)
    assert code == 0, run.stderr
    check_ended(tmp_path, run.stderr)
    programs = json.loads(run.stdout.splitlines()[-1])["children"]
    assert not programs if executor == "process" else len(programs) <= 1, "in a thread the program is the user's affair"
    for pid in programs:
        signal_if_alive(pid)


@pytest.mark.parametrize("executor", ["thread", "process"])
@pytest.mark.parametrize("algorithm", NAMES)
def test_a_construction_that_fails_closes_instances_once(
    zygote: Zygote, tmp_path: Path, algorithm: str, executor: str
) -> None:
    code, run = zygote.run("living", tmp_path, "construction", executor, algorithm)
    assert code == 0, run.stderr
    check_ended(tmp_path, run.stderr)
    assert not json.loads(run.stdout.splitlines()[-1])["children"]


@pytest.mark.parametrize("executor", ["thread", "process"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_close_instances_once(zygote: Zygote, tmp_path: Path, number: signal.Signals, executor: str) -> None:
    run = zygote.start("living", tmp_path, number.name.lower(), executor)
    run.wait_for("waiting")
    run.kill(number)
    assert run.finish() == 0, run.stderr
    check_ended(tmp_path, run.stderr)
    for pid in json.loads(run.stdout.splitlines()[-1])["children"]:
        signal_if_alive(pid)


def test_nothing_outlives_a_trainer_that_is_killed(zygote: Zygote, tmp_path: Path) -> None:
    run = zygote.start("living", tmp_path, "killed", "process")
    run.wait_for("waiting")
    lines = book_of(tmp_path).lines()
    pids = {pid for *_, pid in lines}
    programs = {int(member.partition("-")[2]) for member, *_ in lines if member.startswith("program-")}
    assert len(pids) > 1 and len(programs) == 1 and all(alive(pid) for pid in pids | programs)
    run.kill(signal.SIGKILL)
    assert run.finish() == -9
    assert all(gone(pid, 20.0) for pid in pids | programs)


def signal_if_alive(pid: int) -> None:
    import os

    if alive(pid):
        os.kill(pid, signal.SIGKILL)
