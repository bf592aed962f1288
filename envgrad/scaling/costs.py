"""What each part of the pipeline costs, in seconds: per step, per token, per row, per byte.

Where a figure was measured its source says so; a figure from a data sheet or an assumption says that. Nothing here
reads a clock or loads a model.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from envgrad.errors import ConfigurationError

LOG_BYTES_PER_TOKEN = 15.6
"""of an episode log on the disk, for each token of a row: measured on runs of the starter model, texts included"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerCosts:
    """One sampler (a replica). A step takes ``step + row R + context C + prefill P`` seconds: ``R`` rows get a token,
    ``C`` tokens of keys and values are read, ``P`` tokens of prompts and results are forwarded in it. A step whose rows
    are not those of the step before takes ``change`` more.

    Example: 10 rows of 1,000 tokens each.
        >>> costs = SamplerCosts(step=0.01, row=1e-4, context=1e-6, prefill=1e-5)
        >>> round(costs.seconds(rows=10, context=10_000), 6), round(costs.run(steps=2, rows=10, context=10_000), 6)
        (0.021, 0.04201)
    """

    step: float
    row: float = 0.0
    context: float = 0.0
    prefill: float = 0.0
    prefill_step: float = 0.0
    """more for a step that forwards prompts or results"""
    change: float = 0.0
    """more for a decoding step that has other rows than the step before"""
    shares_prompts: bool = False
    """a group's prompt is read once for all its rows that decode together"""
    max_rows: int = 1_000_000
    """sessions whose keys and values fit"""
    prefill_budget: int = 2048
    """most tokens of prompts and results in one step"""

    def seconds(self, *, rows: float, context: float, prefill: float = 0.0) -> float:
        """Of one step."""
        more = self.prefill_step + self.prefill * prefill if prefill else 0.0
        return self.step + self.row * rows + self.context * context + more

    def run(self, *, steps: int, rows: int, context: float) -> float:
        """Of so many decoding steps, each of which makes every row a token longer."""
        growth = self.context * rows * steps * (steps - 1) / 2
        return steps * self.seconds(rows=rows, context=context) + growth

    def steps_within(self, seconds: float, *, rows: int, context: float) -> int:
        """The first number of decoding steps that takes at least ``seconds``."""
        first, grows = self.seconds(rows=rows, context=context), self.context * rows
        if grows <= 1e-6 * first:
            found = math.ceil(seconds / first)
        else:
            half = first - grows / 2
            found = math.ceil((math.sqrt(half * half + 2 * grows * seconds) - half) / grows)
        while found > 1 and self.run(steps=found - 1, rows=rows, context=context) >= seconds * (1 - 1e-9):
            found -= 1  # rounding
        return max(1, found)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerCosts:
    """An optimizer step takes ``step + episode E + token T + pair Q`` seconds: ``E`` episodes, ``T`` tokens forwarded
    (a group's prompt once), ``Q`` pairs of a token and one that it attends to. All over the whole trainer."""

    step: float = 0.0
    episode: float = 0.0
    token: float = 0.0
    pair: float = 0.0

    def seconds(self, *, episodes: int, tokens: float, pairs: float) -> float:
        """Of one optimizer step."""
        return self.step + self.episode * episodes + self.token * tokens + self.pair * pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopCosts:
    """Work of the one thread that plays episodes: templates, calls, and what each episode begins and ends with."""

    turn: float = 0.0
    episode: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageCosts:
    """Weights on their way to samplers, checkpoints and the episode log."""

    publish: float = 0.0
    """seconds in which the trainer waits and samplers pause"""
    checkpoint: float = 0.0
    """seconds of one checkpoint"""
    checkpoint_every: int = 0
    """steps; 0: none"""
    checkpoint_blocks: bool = True
    """the trainer waits for it; else it is written beside training, one at a time"""
    log_bytes_per_token: float = LOG_BYTES_PER_TOKEN
    log_rate: float = math.inf
    """bytes a second that the log's thread writes"""
    log_rounds: int = 8
    """rounds that may wait to be written, before the trainer waits"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Everything that a plan or a simulation needs to know of model and machines.

    Example:
        >>> costs = Costs(sampler=SamplerCosts(step=0.01), trainer=TrainerCosts(token=1e-3))
        >>> Costs.from_dict(costs.as_dict()) == costs
        True
    """

    sampler: SamplerCosts
    trainer: TrainerCosts
    loop: LoopCosts = field(default_factory=LoopCosts)
    storage: StorageCosts = field(default_factory=StorageCosts)
    replicas: int = 1
    local: bool = False
    """the sampler is the library's own, in the trainer's process: it waits for sessions that are about to return"""
    sampler_beside: float = 1.0
    """how much longer a sampler's step takes while training goes on beside it"""
    trainer_beside: float = 1.0
    """how much longer training takes while a sampler's steps go on beside it"""
    sources: dict[str, str] = field(default_factory=dict)
    """where each figure comes from: measured, or estimated and how"""

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity: what is not bounded is None."""
        found = asdict(self)
        if math.isinf(self.storage.log_rate):
            found["storage"]["log_rate"] = None
        return found

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Costs:
        """What ``as_dict`` gave.

        Raises:
            ConfigurationError: it is not.
        """
        rooms = {"sampler": SamplerCosts, "trainer": TrainerCosts, "loop": LoopCosts, "storage": StorageCosts}
        try:
            given = {name: kind(**_finite(data[name])) for name, kind in rooms.items() if name in data}
            rest = {one.name: data[one.name] for one in fields(cls) if one.name in data and one.name not in rooms}
            return cls(**given, **rest)
        except TypeError as error:
            raise ConfigurationError(
                f"these are no costs of a plan ({error}): give a file that `python -m benchmarks.scaling --costs` wrote"
            ) from error


def _finite(data: dict[str, Any]) -> dict[str, Any]:
    return {name: math.inf if value is None else value for name, value in data.items()}
