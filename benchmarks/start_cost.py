"""What comparing the starts of siblings costs, as a part of a training run's processor time.

    python -m benchmarks.start_cost [--steps 6]

Each example environment is trained with the starter model, the smallest there is, so the shares are the largest that a
run will see: a larger model makes everything else dearer. Counted are the comparison itself and the look whether an
instance may be copied.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from envgrad import GRPOConfig, GRPOTrainer
from envgrad.cli.locate import locate
from envgrad.environments.start import decide_start
from envgrad.rollout.starting import find_mismatch

EXAMPLES = Path(__file__).parents[1] / "examples"
ENVIRONMENTS = ("guess_number.py:GuessNumber", "compass.py:Compass", "wordle.py:Wordle", "chess_puzzles.py:MateInOne",
                "reasoning.py:Sums")  # fmt: skip


@dataclass(slots=True)
class Meter:
    """Seconds of processor time inside the functions that it watches."""

    seconds: float = 0.0
    calls: int = 0

    def sync(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def watched(*args: Any, **options: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **options)
            finally:
                self._add(began)

        return watched

    def waiting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        async def watched(*args: Any, **options: Any) -> Any:
            began = time.thread_time()
            try:
                return await function(*args, **options)
            finally:
                self._add(began)

        return watched

    def _add(self, began: float) -> None:
        self.seconds += time.thread_time() - began
        self.calls += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One environment's."""

    environment: str
    groups: int
    comparing: float
    """seconds of processor time"""
    training: float
    """seconds of processor time, comparing included"""

    @property
    def share(self) -> float:
        return self.comparing / self.training


def measure(environment: str, steps: int) -> Cost:
    """Train ``steps`` steps of 8 groups of 8."""
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), max_steps=steps, per_device_train_batch_size=64, num_generations=8,
        max_completion_length=64, report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = GRPOTrainer("starter", args=config, environment_factory=locate(f"{EXAMPLES}/{environment}"))
    meter = Meter()
    with (
        patch("envgrad.rollout.group.find_mismatch", meter.waiting(find_mismatch)),
        patch("envgrad.rollout.group.decide_start", meter.sync(decide_start)),
    ):
        began = time.process_time()
        trainer.train()
        training = time.process_time() - began
    if not meter.calls:
        raise AssertionError("nothing was compared")
    return Cost(environment=environment, groups=8 * steps, comparing=meter.seconds, training=training)


def table(costs: Sequence[Cost]) -> str:
    """Markdown."""
    lines = ["| environment | comparing, per group | part of the run's processor time |", "|---|---|---|"]
    for cost in costs:
        each = 1000 * cost.comparing / cost.groups
        lines.append(f"| {cost.environment.partition(':')[2]} | {each:.2f} ms | {100 * cost.share:.2f}% |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(table([measure(environment, options.steps) for environment in ENVIRONMENTS]))


if __name__ == "__main__":
    main()
