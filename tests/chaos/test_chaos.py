"""An environment whose members fail, hang or die at random: the run ends, and all is accounted for.

Each run is a process of its own with a wall-clock limit. Environments write down what they did, and the trainer's own
counts must be those of that book, exactly.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.chaos_scenarios import Book
from helpers.trainers import NAMES
from helpers.zygote import Zygote, gone


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote("helpers.chaos_scenarios")
    yield zygote
    zygote.close()


def play(zygote: Zygote, folder: Path, *words: object) -> tuple[dict[str, Any], Book]:
    code, run = zygote.run("chaos", folder, *map(str, words), seconds=240)
    assert code == 0, run.stderr
    told = next(json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"steps"'))
    return told, Book(folder / "book", seed=1, ways=(str(words[-1]),))


def expected_faults(counts: Counter[tuple[str, str]]) -> dict[str, int]:
    """By kind, from what the environments wrote down."""
    failing = [("reset", "raise"), ("reset", "die"), ("reward", "raise"), ("reward", "die"), ("tool", "die")]
    faults = {
        "environment": sum(counts[one] for one in failing),
        "reset_timeout": counts["reset", "hang"],
        "reward_timeout": counts["reward", "hang"],
        "tool_timeout": counts["tool", "hang"],
    }
    return {kind: count for kind, count in faults.items() if count}


def check_batches(told: dict[str, Any], book: Book) -> None:
    """No failed episode has weight; what has is paid by a call of get_reward that succeeded, each its own."""
    trained = [tuple(one) for one in told["seen"]["trained"]]
    failed = {tuple(one) for one in told["seen"]["failed"]}
    assert trained and failed and not failed.intersection(trained)
    assert not {key for key, _ in trained}.intersection(told["seen"]["dropped"])
    paid = {number for member, number, _, decision, _ in book.lines() if member == "reward" and decision == "ok"}
    rewards = told["seen"]["rewards"]
    assert len(set(rewards)) == len(rewards) and set(rewards) <= paid


def check_closed_once(book: Book) -> None:
    """Every instance, but those whose process was killed before."""
    events: dict[int, list[tuple[str, str]]] = defaultdict(list)
    opened = []
    for member, number, instance, decision, _ in book.lines():
        if member == "open":
            opened.append(number)
        else:
            events[instance].append((member, decision))
    for instance in opened:
        closes = [one for one in events[instance] if one[0] == "close"]
        dead = bool(events[instance]) and events[instance][-1][1] == "die"
        assert len(closes) == 1 or (dead and not closes), (instance, events[instance])


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", NAMES)
def test_failing_hanging_and_dying_members_in_processes(zygote: Zygote, tmp_path: Path, algorithm: str) -> None:
    groups = 200
    told, book = play(zygote, tmp_path, algorithm, "process", groups, 5, "raise,hang,die")
    counts, tally = book.counts(), told["tally"]
    assert told["steps"] == 5 and tally["groups"] - tally["dropped"] == groups
    for member in ("reset", "tool", "reward"):
        assert all(counts[member, way] for way in ("raise", "hang", "die")), "each way has been tried"
    assert tally["faults"] == expected_faults(counts)
    assert tally["episodes"] + sum(tally["failures"].values()) == tally["groups"] * 4
    check_batches(told, book)
    check_closed_once(book)
    assert tally["closes"] == sum(counts["close", way] for way in ("raise", "hang", "die"))
    # What was logged on the way adds up to the same, and so does the last log.
    assert sum(entry["failures/total"] for entry in told["logged"]) == sum(tally["failures"].values())
    for what in ("faults", "failures"):
        for kind, count in tally[what].items():
            assert sum(entry.get(f"{what}/{kind}", 0.0) for entry in told["logged"]) == count
            assert told["last"][f"run/{what}/{kind}"] == count
    assert all(any(f"{count} {kind}" in line for line in told["lines"]) for kind, count in tally["faults"].items())
    assert all(counts["close", way] for way in ("raise", "hang", "die"))
    assert tally["hung"] == 0
    assert told["after"] == told["before"] and not told["after"]["children"]
    assert all(gone(pid) for _, _, _, _, pid in book.lines() if pid != os.getpid())


@pytest.mark.parametrize("algorithm", NAMES)
def test_failing_and_hanging_members_in_threads(zygote: Zygote, tmp_path: Path, algorithm: str) -> None:
    groups = 24
    told, book = play(zygote, tmp_path, algorithm, "thread", groups, 2, "raise,hang")
    counts, tally = book.counts(), told["tally"]
    assert told["steps"] == 2 and tally["groups"] - tally["dropped"] == groups
    assert tally["faults"] == expected_faults(counts)
    check_closed_once(book)
    assert not {tuple(one) for one in told["seen"]["failed"]}.intersection(map(tuple, told["seen"]["trained"]))
    # What hangs cannot be stopped in a thread: it is counted, and nothing else is left.
    hung = sum(counts[member, "hang"] for member in ("reset", "tool", "reward"))
    assert hung and tally["hung"] == hung
    names = Counter(told["after"]["threads"]) - Counter(told["before"]["threads"])
    assert names == {
        name: count for name, count in (("envgrad-environment", hung), ("envgrad-close", counts["close", "hang"]))
        if count
    }  # fmt: skip
    assert told["after"]["files"] == told["before"]["files"] and not told["after"]["children"]
