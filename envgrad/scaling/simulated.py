"""What a simulated run tells."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One optimizer step, seconds each."""

    seconds: float
    waiting: float
    """of the trainer, for a round's groups"""
    training: float
    publish: float
    checkpoint: float
    """that the trainer waited for"""
    log: float
    """that the trainer waited for the log's thread"""
    staleness: float
    """most publishes between a token and its training"""
    buffered: int
    """finished groups that waited when the round was taken"""
    playing: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A simulated run. Shares are of the time between the first counted step and the last."""

    steps: tuple[SimulatedStep, ...]
    """those that count: neither the first few, nor the last, which have no rollouts beside them"""
    seconds: float
    """a step, in the mean"""
    trainer_busy: float
    sampler_busy: float
    loop_busy: float
    log_busy: float
    environment_seconds: float
    """of environments' work in a step, summed over episodes"""
    changes: float
    """share of decoding steps that had other rows than the step before"""
    rows: float
    """decoded at once by a sampler that decodes, in the mean"""
    log_bytes: float
    """a step"""
    tasks: dict[str, int]
    """of all that were drawn: trained, playing or waiting at the end, stale"""

    def mean(self, name: str) -> float:
        """Of a field of ``SimulatedStep``."""
        return fmean(getattr(one, name) for one in self.steps)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, steps averaged."""
        found = asdict(self)
        found["steps"] = {
            name: self.mean(name) for name in asdict(self.steps[0]) if name != "seconds"
        } | {"count": len(self.steps)}  # fmt: skip
        return found
