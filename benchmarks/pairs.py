"""Two trainers, step by step in turn: each in a process of its own that stays alive, so that start-up is paid once."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from .floor import Floor, ModelShape, RowSize
from .machine import QUIET, busy_share, load_average
from .models import build_model
from .ratios import Spread, paired_ratios
from .workloads import Workload

Kind = Literal["ours", "trl"]
TOLERANCE = 0.01
"""share by which token counts of the two sides may differ"""


class WorkerFailed(RuntimeError):
    """A child process ended; the message has the end of what it wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of one side."""

    seconds: float
    rollout: float
    train: float
    memory: int
    """bytes above model, gradients and optimizer, at the most behind the first step"""
    counts: dict[str, Any]
    forwarded: dict[str, int]

    def part(self, name: str) -> float:
        return self.train if name == "train" else self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How one side is run."""

    kind: Kind
    threads: int
    splits: int = 1
    """micro-batches of a step; envgrad packs, and needs none"""

    def __str__(self) -> str:
        splits = f", {self.splits} micro-batches" if self.splits > 1 else ""
        return f"{self.threads} thread{'s' if self.threads > 1 else ''}{splits}"


class Worker:
    """A trainer in a child process."""

    def __init__(self, setting: Setting, workload: Workload, folder: Path, search_path: Sequence[str] = ()) -> None:
        self.kind, self.setting = setting.kind, setting
        self._output = tempfile.TemporaryDirectory(prefix=f"bench-{setting.kind}-")
        self._errors = Path(self._output.name, "stderr.txt")
        self._log = self._errors.open("w", encoding="utf-8")
        root = str(Path(__file__).parents[1])
        paths = [root, *search_path, os.environ.get("PYTHONPATH", "")]
        count = str(setting.threads)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TRL_EXPERIMENTAL_SILENCE": "1",
        }  # fmt: skip
        arguments = [setting.kind, workload.to_json(), str(folder), self._output.name, str(setting.splits)]
        command = [sys.executable, "-m", "benchmarks.worker", *arguments]
        self._process = subprocess.Popen(
            command, env=environment, cwd=root, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._log,
        )  # fmt: skip
        self.about = self._answer()

    def _answer(self) -> dict[str, Any]:
        if self._process.stdout is None:
            raise AssertionError("the child's output is a pipe")
        line = self._process.stdout.readline()
        if not line:
            raise self._failed()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failed(self) -> WorkerFailed:
        return WorkerFailed(f"the {self.kind} side ended:\n{self._errors.read_text(errors='replace')[-4000:]}")

    def _tell(self, command: str) -> None:
        if self._process.stdin is None:
            raise AssertionError("the child's input is a pipe")
        try:
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failed() from error

    def step(self) -> Step:
        self._tell("step")
        return Step(**self._answer())

    def rate(self) -> float:
        """float32 operations per second of a large matmul on this side's threads."""
        self._tell("rate")
        return float(self._answer()["rate"])

    def close(self) -> None:
        """End the child. Safe to call twice."""
        if self._log.closed:
            return
        with contextlib.suppress(WorkerFailed):
            self._tell("stop")
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        self._output.cleanup()


@dataclass(slots=True, kw_only=True)
class Measured:
    """One workload, measured."""

    workload: Workload
    shape: ModelShape
    options: dict[str, Any] = field(default_factory=dict)
    """the trainer's options, side by side"""
    settings: dict[str, Setting] = field(default_factory=dict)
    steps: dict[str, list[Step]] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    loads: list[tuple[float, float | None]] = field(default_factory=list)
    """before each pair: load average of the minute, share of the cores in use while nothing of ours ran"""

    @property
    def ratio(self) -> Spread | None:
        """trl's seconds over ours, for the part that the workload is about; None without trl."""
        return self.ratio_of(self.workload.part)

    def ratio_of(self, part: str) -> Spread | None:
        if "trl" not in self.steps:
            return None
        ours, theirs = ([step.part(part) for step in self.steps[kind]] for kind in ("ours", "trl"))
        return paired_ratios(ours, theirs)

    def seconds(self, kind: str, part: str | None = None) -> Spread:
        return Spread.of([step.part(part or self.workload.part) for step in self.steps[kind]])

    @property
    def rows(self) -> list[RowSize]:
        counts = self.steps["ours"][-1].counts
        triples = zip(counts["prompt"], counts["sampled"], counts["given"], strict=True)
        return [
            RowSize(group=index // self.workload.siblings, prompt=prompt, sampled=sampled, given=given)
            for index, (prompt, sampled, given) in enumerate(triples)
        ]

    @property
    def floor(self) -> Floor:
        return Floor.of(self.shape, self.rows, max(self.rates))

    def distance(self, kind: str, part: str | None = None) -> Spread:
        """Seconds over the floor's seconds."""
        chosen = part or self.workload.part
        least = self.floor.seconds(chosen)
        return Spread.of([step.part(chosen) / least for step in self.steps[kind]])

    def memory(self, kind: str) -> int:
        """Bytes above model, gradients and optimizer, at the most."""
        return max(step.memory for step in self.steps[kind])

    def forwarded_ratio(self, part: Literal["rollout", "training"]) -> float:
        """Tokens that we forwarded over tokens that must be forwarded."""
        needed = sum(row.length - row.prompt - 1 for row in self.rows)
        needed += sum({row.group: row.prompt for row in self.rows}.values())
        return max(step.forwarded[part] for step in self.steps["ours"]) / needed

    def as_dict(self) -> dict[str, Any]:
        floor = self.floor
        return {
            "workload": asdict(self.workload), "shape": asdict(self.shape), "options": self.options,
            "settings": {kind: asdict(one) for kind, one in self.settings.items()},
            "rates": self.rates, "loads": self.loads,
            "steps": {kind: [asdict(step) for step in steps] for kind, steps in self.steps.items()},
            "ratio": None if self.ratio is None else asdict(self.ratio),
            "floor": asdict(floor) | {"seconds": floor.seconds(self.workload.part)},
        }  # fmt: skip


def check_counts(ours: Step, theirs: Step) -> None:
    """Both sides did the same work, to ``TOLERANCE``.

    Raises:
        AssertionError: they did not; the message has both counts.
    """
    for name in ("prompt", "sampled", "given"):
        left, right = sum(ours.counts[name]), sum(theirs.counts[name])
        if abs(left - right) > TOLERANCE * max(left, right):
            raise AssertionError(f"the sides differ in {name} tokens: ours {left}, trl's {right}; no comparison")
    if ours.counts["calls"] != theirs.counts["calls"]:
        raise AssertionError(f"the sides differ in calls: ours {ours.counts['calls']}, trl's {theirs.counts['calls']}")


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Measures workloads; keeps the best settings that it has found."""

    models: Path
    kinds: tuple[Kind, ...]
    threads: tuple[int, ...]
    """thread counts to try"""
    pairs: int
    splits: tuple[int, ...] = (1, 4)
    """numbers of micro-batches to try with trl"""
    search_path: tuple[str, ...] = ()
    best: dict[tuple[str, Kind], Setting] = field(default_factory=dict)

    def measure(self, workload: Workload) -> Measured:
        """Warm both sides up, then alternate ``pairs`` times; whoever begins changes with every pair.

        Raises:
            WorkerFailed: a side ended.
            AssertionError: the sides counted different tokens.
            MissingModel: the model is not installed.
        """
        folder = build_model(workload.model, self.models)
        with contextlib.ExitStack() as stack:
            workers = {kind: self._start(stack, kind, workload, folder) for kind in self.kinds}
            shape = ModelShape(**next(iter(workers.values())).about["shape"])
            measured = Measured(workload=workload, shape=shape)
            for kind, worker in workers.items():
                measured.options[worker.about["version"]] = worker.about["options"]
                measured.settings[kind] = worker.setting
                measured.steps[kind] = []
            for index in range(workload.pairs or self.pairs):
                measured.loads.append((load_average(), busy_share()))
                measured.rates.append(workers["ours"].rate())
                for kind in self.kinds if index % 2 == 0 else self.kinds[::-1]:
                    measured.steps[kind].append(workers[kind].step())
                if "trl" in measured.steps:
                    check_counts(measured.steps["ours"][-1], measured.steps["trl"][-1])
        return measured

    def _start(self, stack: contextlib.ExitStack, kind: Kind, workload: Workload, folder: Path) -> Worker:
        """A warm worker with the setting that is fastest, which is found once for ``workload.tuned_as``."""
        key = (workload.tuned_as or workload.name, kind)
        every = [
            Setting(kind=kind, threads=threads, splits=splits)
            for threads in self.threads
            for splits in (self.splits if kind == "trl" and not workload.whole else (1,))
            if workload.episodes % splits == 0
        ]
        candidates = [self.best[key]] if key in self.best else every
        kept: tuple[float, Worker] | None = None
        for setting in candidates:
            worker = Worker(setting, workload, folder, self.search_path)
            stack.callback(worker.close)
            worker.step()
            seconds = worker.step().part(workload.part) if len(candidates) > 1 else 0.0
            if kept is None or seconds < kept[0]:
                slower, kept = kept, (seconds, worker)
                if slower is not None:
                    slower[1].close()
            else:
                worker.close()
        if kept is None:
            raise ValueError(f"no setting fits {workload.name}: give a thread count, and 1 among the splits")
        self.best[key] = kept[1].setting
        return kept[1]


def disturbed(loads: Sequence[tuple[float, float | None]]) -> list[int]:
    """Numbers of the pairs before which others used more than ``QUIET`` of the cores.

    Example:
        >>> disturbed([(0.5, 0.01), (3.0, 0.8), (1.0, None)])
        [1]
    """
    return [index for index, (_, busy) in enumerate(loads) if busy is not None and busy > QUIET]


def thread_counts(text: str) -> tuple[int, ...]:
    """Thread counts to try: ``auto`` is 1 and all cores.

    Example:
        >>> thread_counts("2"), thread_counts("1,4")
        ((2,), (1, 4))
    """
    if text == "auto":
        return tuple(sorted({1, os.cpu_count() or 1}))
    return tuple(int(one) for one in text.split(","))


def each_workload(
    comparison: Comparison, workloads: Sequence[Workload]
) -> Iterator[tuple[Workload, Measured | Exception]]:
    """Measure one after the other; a workload that fails does not keep the others from running."""
    for workload in workloads:
        try:
            yield workload, comparison.measure(workload)
        except (RuntimeError, AssertionError) as error:
            yield workload, error
