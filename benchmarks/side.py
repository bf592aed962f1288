"""What both sides of a comparison share: the trainer's options, and what is counted and timed in a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .workloads import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Tokens of a step, episode by episode."""

    prompt: tuple[int, ...]
    sampled: tuple[int, ...]
    given: tuple[int, ...]
    """tool results and what the template writes around them"""
    calls: int


@dataclass(slots=True, kw_only=True)
class Side:
    """A trainer, and what its last step did."""

    trainer: Any
    options: dict[str, Any]
    version: str
    rollout_seconds: float = 0.0
    counts: Counts | None = None
    forwarded: dict[str, int] = field(default_factory=dict)
    """tokens forwarded in rollouts and in training, where the side counts them"""


def trainer_options(workload: Workload, output: Path, splits: int = 1) -> dict[str, Any]:
    """Options that mean the same on both sides: float32 on the CPU, no recomputation, one update of the whole batch.

    ``splits`` is the number of micro-batches into which a side that does not pack cuts the step.
    """
    rows = max(sum(turns) + 64 * (len(turns) - 1) for turns in workload.plan())
    return {
        "output_dir": str(output),
        "use_cpu": True,
        "bf16": False,
        "fp16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": workload.episodes // splits,
        "gradient_accumulation_steps": splits,
        "num_generations": workload.siblings,
        "max_completion_length": rows + 64,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "beta": 0.0,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "shuffle_dataset": False,
        "max_steps": 100_000,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 0,
    }
