"""With instances on a local Ray cluster: a signal closes every one once; nothing outlives a trainer that is killed."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.chaos_scenarios import Book
from helpers.zygote import Zygote, gone

pytest.importorskip("ray")


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote("helpers.chaos_scenarios")
    yield zygote
    zygote.close()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_all(zygote: Zygote, tmp_path: Path, number: signal.Signals) -> None:
    run = zygote.start("living", tmp_path, "sigterm" if number == signal.SIGTERM else "killed", "ray")
    run.wait_for("waiting", 120)
    run.kill(number)
    assert run.finish(90) == (0 if number == signal.SIGTERM else -9), run.stderr
    lines = Book(tmp_path / "book", seed=0, ways=("ok",)).lines()
    opened = {number for member, number, *_ in lines if member == "open"}
    closed = Counter(instance for member, _, instance, *_ in lines if member == "end")
    programs = {int(member.partition("-")[2]) for member, *_ in lines if member.startswith("program-")}
    assert opened and len(programs) == 1
    if number == signal.SIGTERM:
        assert closed == dict.fromkeys(opened, 1)
    assert all(gone(pid, 20) for pid in programs | {pid for *_, pid in lines})
