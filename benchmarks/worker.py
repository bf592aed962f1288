"""The child process: one trainer that makes a step whenever it is told to, and answers with what the step cost.

    python -m benchmarks.worker (ours | trl) WORKLOAD_JSON MODEL_FOLDER OUTPUT_FOLDER [SPLITS]

Commands come as lines on the standard input: ``step``, ``rate`` (measure the matmul rate), ``stop``. Answers are lines
of JSON on the standard output; whatever the libraries print goes to the standard error.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch
from transformers import TrainerCallback

from .machine import matmul_rate
from .models import shape_of
from .side import Side
from .workloads import Workload


class Memory:
    """Resident memory above the level that model, gradients and optimizer need.

    The level is what the process holds with its model before the first step, and three times the trained weights more,
    for gradients and Adam's two moments. A sampler's keys and values, and whatever else stays between steps, are above;
    of child processes all is, but the pages of files that they share with others.
    """

    def __init__(self) -> None:
        self.level = 0

    def settle(self, model: torch.nn.Module) -> None:
        """Take the level."""
        library = ctypes.util.find_library("c")
        if library is not None and hasattr(ctypes.CDLL(library), "malloc_trim"):
            ctypes.CDLL(library).malloc_trim(0)  # what loading has freed goes back to the system
        trained = sum(one.numel() * one.element_size() for one in model.parameters() if one.requires_grad)
        self.level = _status("VmRSS") + 3 * trained

    def forget(self) -> None:
        """Start the high-water mark anew."""
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    @property
    def above(self) -> int:
        """Bytes, at the most since ``forget``."""
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split()
        beside = sum(_status("VmHWM", one) - _status("RssFile", one) for one in children)
        return _status("VmHWM") - self.level + beside


def _status(name: str, process: str = "self") -> int:
    for line in Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{process}/status has no {name}: memory is measured on Linux only")


class Steps(TrainerCallback):  # type: ignore[misc]
    """Holds the trainer behind each step until the next command."""

    def __init__(self, side: Side, wire: TextIO) -> None:
        self._side = side
        self._wire = wire
        self._memory = Memory()
        self._began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._memory.settle(self._side.trainer.model)
        self._side.rollout_seconds = 0.0
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        seconds = time.perf_counter() - self._began
        side = self._side
        self.answer(
            {
                "seconds": seconds,
                "rollout": side.rollout_seconds,
                "train": seconds - side.rollout_seconds,
                "memory": self._memory.above,
                "counts": None if side.counts is None else asdict(side.counts),
                "forwarded": side.forwarded,
            }
        )
        command = self.await_step()
        if command == "stop":
            control.should_training_stop = True
        if state.global_step == 1:
            self._memory.forget()  # the first step warms up
        side.rollout_seconds = 0.0
        self._began = time.perf_counter()

    def await_step(self) -> str:
        """Serve commands up to the next ``step`` or ``stop``; a closed input is a ``stop``."""
        for line in sys.stdin:
            command = line.strip()
            if command in ("step", "stop"):
                return command
            if command == "rate":
                self.answer({"rate": matmul_rate()})
        return "stop"

    def answer(self, values: dict[str, Any]) -> None:
        print(json.dumps(values), file=self._wire, flush=True)


def main(kind: str, workload_json: str, folder: str, output: str, splits: str = "1") -> None:
    wire = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    workload = Workload.from_json(workload_json)
    if kind == "ours":
        from .ours import build

        side = build(workload, Path(folder), Path(output))
    else:
        from .trl_side import build as build_trl

        side = build_trl(workload, Path(folder), Path(output), int(splits))
    steps = Steps(side, wire)
    side.trainer.add_callback(steps)
    options = {name: value for name, value in side.options.items() if name != "output_dir"}
    steps.answer(
        {
            "version": side.version,
            "options": {name: getattr(value, "__name__", value) for name, value in options.items()},
            "shape": asdict(shape_of(side.trainer.model)),
        }
    )
    if steps.await_step() == "step":
        side.trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:7])
