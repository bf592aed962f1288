"""Runs in which the environment's members fail at random, seeded, and what is left of them; ``zygote`` runs these."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from envgrad.errors import ConfigurationError
from envgrad.sampling.scripted import ScriptedSampler
from envgrad.training import rollouts
from envgrad.training.signals import Terminated
from helpers.trainers import Kind, by_sibling, sober_llama
from helpers.world import call, turn

FAILING = 0.05
"""share of the calls of each member that fail"""
TIMEOUT = 5.0
SIBLINGS = 4


class Book:
    """What environments did, in one file for all processes; and what the n-th call of a member is to do.

    The decisions are drawn beforehand, so the shares of a run do not depend on who calls when.
    """

    def __init__(self, path: Path, seed: int, ways: tuple[str, ...]) -> None:
        self.path = path
        path.touch()
        self.decisions: dict[str, list[str]] = {}
        for member in ("reset", "tool", "reward", "close"):
            drawn = random.Random(f"{seed}/{member}")
            share = 4 * FAILING if member == "close" else FAILING  # most instances are used again, few are closed
            self.decisions[member] = [drawn.choice(ways) if drawn.random() < share else "ok" for _ in range(20_000)]

    def note(self, member: str, instance: int) -> tuple[int, str]:
        """Write down a call; its number among the calls of this member, and what it is to do."""
        with self.path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            number = sum(line.startswith(f"{member} ") for line in file)
            decision = self.decisions[member][number] if member in self.decisions else "ok"
            file.write(f"{member} {number} {instance} {decision} {os.getpid()}\n")
        return number, decision

    def lines(self) -> list[tuple[str, int, int, str, int]]:
        found = []
        for line in self.path.read_text().splitlines():
            member, number, instance, decision, pid = line.split()
            found.append((member, int(number), int(instance), decision, int(pid)))
        return found

    def counts(self) -> Counter[tuple[str, str]]:
        return Counter((member, decision) for member, _, _, decision, _ in self.lines())


def chaotic(book: Book) -> type:
    """An environment that does what the book says."""

    class Chaotic:
        def __init__(self) -> None:
            self.number, _ = book.note("open", -1)

        def _act(self, member: str) -> int:
            number, decision = book.note(member, self.number)
            if decision == "raise":
                raise OSError(f"{member} {number} failed")
            if decision == "hang":
                time.sleep(3600)
            if decision == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            return number

        def reset(self, seed: int) -> str:
            self._act("reset")
            return "Poke it."

        def poke(self) -> str:
            """Poke it."""
            self._act("tool")
            return "poked"

        def get_reward(self) -> float:
            return self._act("reward") / 1000

        def close(self) -> None:
            self._act("close")

    return Chaotic


def _trainer(folder: Path, algorithm: str, environment: type, groups: int, rounds: int, **options: Any) -> Any:
    answers = by_sibling([turn(call("poke")), turn("done")])

    def make(*args: object, **kwargs: object) -> ScriptedSampler:
        return ScriptedSampler(answers, max_context=4096)

    rollouts.make_local_sampler = make  # type: ignore[attr-defined]
    settings = {
        "max_steps": rounds, "per_device_train_batch_size": groups // rounds * SIBLINGS, "num_generations": SIBLINGS,
        "max_concurrent_episodes": 32, "max_episode_retries": 1, "max_turns": 4, "tool_timeout": TIMEOUT,
        "reset_timeout": TIMEOUT, "reward_timeout": TIMEOUT, "close_timeout": 2.0, "logging_steps": 1,
    }  # fmt: skip
    return Kind(algorithm).make(
        folder / "run", model=sober_llama(), environment_factory=environment, options=settings | options
    )


def _watch(trainer: Any) -> dict[str, list[Any]]:
    """Look into the batches: what is trained, and what was played for it."""
    seen: dict[str, list[Any]] = {"trained": [], "failed": [], "dropped": [], "rewards": []}
    original = trainer.training_step

    def training_step(model: Any, inputs: Any, *args: Any) -> Any:
        if inputs.played is not None:
            played = inputs.played
            for group in (*played.scored, *played.dropped, *played.stale):
                seen["failed"] += [(one.task.key, one.sibling) for one in group.failures]
            seen["dropped"] += [group.task.key for group in played.dropped]
        for sample in inputs.batch.samples:
            if any(sample.advantages):
                seen["trained"].append((sample.episode.task.key, sample.episode.sibling))
                seen["rewards"].append(round(sample.episode.reward * 1000))
        return original(model, inputs, *args)

    trainer.training_step = training_step
    return seen


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found += [int(word) for word in (task / "children").read_text().split()]
        except OSError:
            continue
    return [one for child in found for one in (child, *_children(child))]


def _left(hung: int = 0) -> dict[str, Any]:
    """Idle threads have been told to end, and end soon. ``hung``: those that environments hold."""
    end, names = time.monotonic() + 20, {"envgrad-environment", "envgrad-close"}
    while time.monotonic() < end and sum(one.name in names for one in threading.enumerate()) > hung:
        time.sleep(0.01)
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "children": _children(os.getpid()),
    }


def chaos(folder: Path, algorithm: str, executor: str, groups: str, rounds: str, ways: str) -> None:
    """Train through it, and tell what was seen."""
    calm = Book(folder / "calm", seed=0, ways=("ok",))
    _trainer(folder / "calm_run", algorithm, chaotic(calm), 2, 1, environment_executor=executor).train()
    before = _left()
    book = Book(folder / "book", seed=1, ways=tuple(ways.split(",")))
    trainer = _trainer(
        folder, algorithm, chaotic(book), int(groups), int(rounds), environment_executor=executor
    )  # fmt: skip
    seen = _watch(trainer)
    began = time.process_time()
    trainer.train()
    seconds = time.process_time() - began
    tally = trainer.rollouts.tally
    steps = trainer.state.global_step
    trainer.close()
    logged = [entry for entry in trainer.state.log_history if "failures/total" in entry]
    last = trainer.state.log_history[-1]
    del trainer
    after = _left(tally.hung + book.counts()["close", "hang"])
    print(json.dumps({
        "steps": steps, "seen": seen, "before": before, "after": after, "cpu": seconds,
        "tally": {"faults": tally.faults, "failures": tally.failures, "dropped": tally.dropped,
                  "groups": tally.groups, "episodes": tally.episodes, "closes": tally.closes, "hung": tally.hung},
        "lines": tally.lines(), "logged": logged, "last": last,
    }))  # fmt: skip


# -- ways out


class _Stop(Exception):
    """What a callback raises."""


def _living(book: Book, end: str) -> type:
    """Instances write down their opening and closing; the first close raises, the second hangs."""
    waits = 10 if end in ("sigint", "sigterm", "killed") else 10**9

    class Living:
        def __init__(self) -> None:
            self.number, _ = book.note("open", -1)

        def reset(self, seed: int) -> str:
            number, _ = book.note("begin", self.number)
            if number == waits:
                print("waiting", flush=True)
                time.sleep(3600)
            if number == 0:
                self.program = subprocess.Popen(["sleep", "600"])
                book.note(f"program-{self.program.pid}", self.number)
            return "Poke it."

        def poke(self) -> str:
            """Poke it."""
            return "poked"

        def get_reward(self) -> float:
            return self.number / 10

        def close(self) -> None:
            number, _ = book.note("end", self.number)
            if number == 0:
                raise OSError("the door is stuck")
            if number == 1:
                time.sleep(3600)

    return Living


def living(folder: Path, end: str, executor: str, algorithm: str = "GRPO") -> None:
    """Come to an end in one of the ways, with instances that close badly."""
    book = Book(folder / "book", seed=0, ways=("ok",))

    class Ends(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if end == "exception":
                raise _Stop

    environment = _living(book, end)
    options: dict[str, Any] = {"environment_executor": executor, "reset_timeout": 60.0, "close_timeout": 4.0}
    if end == "construction":
        with contextlib.suppress(ConfigurationError):
            _trainer(folder, algorithm, environment, 4, 2, tool_parser="none of them", **options)
    else:
        trainer = _trainer(folder, algorithm, environment, 4, 2, **options)
        trainer.add_callback(Ends())
        with contextlib.suppress(_Stop, KeyboardInterrupt, Terminated):
            trainer.train() if end != "evaluation" else trainer.evaluate()
        trainer.close()
    print(json.dumps({"children": _children(os.getpid())}), flush=True)
