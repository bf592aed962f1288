"""Rollouts and training do go on at the same time: with waits in place of work, so that no other load decides."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from transformers import TrainerCallback

from helpers.trainers import Kind, logged, script
from helpers.world import turn

TRAINING = LATENCY = 0.3
"""seconds a step"""
STEPS, FIRST, LAST = 9, 2, 2
"""of a run; those at its beginning and its end have less beside them"""


class Slow:
    rewards = 0

    def reset(self, seed: int) -> str:
        return "Take your time."

    async def step(self, message: str) -> tuple[str, bool]:
        await asyncio.sleep(LATENCY)
        return "heard", True

    def get_reward(self) -> float:
        Slow.rewards += 1
        return float(Slow.rewards % 3)


class Times(TrainerCallback):  # type: ignore[misc, unused-ignore]
    def __init__(self) -> None:
        self.at: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.at.append(time.monotonic())

    @property
    def step(self) -> float:
        """Seconds a step, at its steadiest; the median, for the machine may stand still in one."""
        return median(now - before for before, now in pairwise(self.at[FIRST - 1 : STEPS - LAST]))


def run(folder: Path, **options: Any) -> tuple[float, Any]:
    trainer = Kind("GRPO").make(folder, environment_factory=Slow, options={"max_steps": STEPS, **options})
    forward, times = trainer._forward_loss, Times()

    def slow(*args: Any) -> Any:
        time.sleep(TRAINING)
        return forward(*args)

    trainer._forward_loss = slow
    trainer.add_callback(times)
    trainer.train()
    return times.step, trainer


@pytest.mark.slow
def test_latency_of_environments_is_hidden_behind_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, [turn("hello")])
    one_by_one, _ = run(tmp_path / "a")
    assert one_by_one > TRAINING + LATENCY
    beside, trainer = run(tmp_path / "b", asynchronous=True, max_staleness=2)
    waits = logged(trainer, "async/wait_seconds")[FIRST : STEPS - LAST]
    # Idle, it is twice as fast and the trainer busy all the time; a loaded machine takes from that.
    assert one_by_one / beside > 1.5
    assert 1 - median(waits) / beside > 0.75
    assert max(logged(trainer, "async/staleness_max")) <= 2
