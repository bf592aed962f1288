from __future__ import annotations

import shutil
import sys
import threading
import time
from itertools import pairwise

import pytest

from envgrad.errors import EnvgradError
from envgrad.rewards.math_answers import Comparison, MathComparer

ENDLESS = "99999^{99999999}+1"
"""One power of whole numbers, for minutes: it lets no other thread run."""


@pytest.fixture(scope="module")
def comparer():
    made = MathComparer(limit=10.0)
    yield made
    made.close()


def children(comparer):
    return [child.process for child in comparer._idle]


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        ("4", r"\boxed{4}", True),
        ("0.5", r"\boxed{\frac{1}{2}}", True),
        ("$x^2-1$", r"\boxed{(x-1)(x+1)}", True),
        ("12", r"\boxed{12 \text{ cm}}", True),
        (r"\boxed{\{1,2\}}", r"\boxed{\{2,1\}}", True),
        ("4", r"\boxed{5}", False),
        ("4", "", False),
        ("4", r"\boxed{", False),
        ("4", "\ud800 \x00 \\boxed{\n}", False),
    ],
)
def test_comparisons(comparer, gold, answer, equal):
    (compared,) = comparer.compare([(gold, answer)])
    assert compared.gold is not None and compared.equal is equal


def test_a_gold_answer_that_cannot_be_read(comparer):
    assert comparer.compare([("", r"\boxed{1}"), (r"\text{no}", r"\boxed{1}")]) == [Comparison(gold=None)] * 2


def test_a_process_is_kept(comparer):
    comparer.compare([("1", r"\boxed{1}")])
    before = children(comparer)
    comparer.compare([("1", r"\boxed{1}"), ("2", r"\boxed{3}")])
    assert children(comparer) == before and len(before) == 1


def test_a_process_that_died_is_replaced(comparer):
    comparer.compare([("1", r"\boxed{1}")])
    (process,) = children(comparer)
    process.kill()
    process.wait()
    assert comparer.compare([("1", r"\boxed{1}")])[0].equal
    assert children(comparer)[0].pid != process.pid


def test_an_answer_without_end_is_wrong_and_holds_up_nobody(monkeypatch, tmp_path):
    # The power is to be one that no signal interrupts, whatever library computes it.
    (tmp_path / "sitecustomize.py").write_text("import signal\nsignal.alarm = lambda seconds: 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    comparer = MathComparer(limit=6.0)
    ticks = []
    stop = threading.Event()

    def tick():
        while not stop.wait(0.05):
            ticks.append(time.monotonic())

    ticker = threading.Thread(target=tick)
    ticker.start()
    try:
        comparer.compare([("2", r"\boxed{2}")])
        (process,) = children(comparer)
        endless, next_one = comparer.compare([("3", rf"\boxed{{{ENDLESS}}}"), ("2", r"\boxed{2}")])
    finally:
        stop.set()
        ticker.join()
        comparer.close()
    assert endless == Comparison(gold="[3, '3']") and next_one.equal
    assert process.poll() is not None  # ended, not left behind
    assert max(b - a for a, b in pairwise(ticks)) < 12.0  # other threads ran all the time


def test_close_ends_the_processes():
    comparer = MathComparer()
    comparer.compare([("1", r"\boxed{1}")])
    (process,) = children(comparer)
    comparer.close()
    assert process.poll() is not None and not children(comparer)


def test_a_process_that_does_not_start_says_what_to_do(monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(EnvgradError, match=r"python -m envgrad\.rewards\.math_worker"):
        MathComparer().compare([("1", "1")])
