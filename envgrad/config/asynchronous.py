"""Rollouts beside training: who samples, how old samples may be, and what becomes of the difference."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from envgrad.config.checks import at_least, choice
from envgrad.errors import ConfigurationError

if TYPE_CHECKING:
    from envgrad.config.rollout import RolloutConfig

SAMPLERS = ("local", "process", "vllm")

STALENESS = 1
"""``max_staleness`` where it is not set: one round is played while one is trained"""


@dataclass
class AsynchronousFields:
    """The fields; ``RolloutConfig`` has them, so that every algorithm trains either way."""

    asynchronous: bool = field(
        default=False, metadata={"help": "Play rounds in the background, with weights of a few updates ago."}
    )
    max_staleness: int | None = field(
        default=None,
        metadata={"help": "Most weight updates between a sampled token and its first pass; 1 by default. 0: none."},
    )
    inflight_weight_updates: bool = field(
        default=True,
        metadata={"help": "Update weights while episodes run, so that one may span versions; else they end first."},
    )
    recompute_old_logprobs: bool = field(
        default=False,
        metadata={
            "help": "Clip against the weights before the round's first update, and weight by old/sampler "
            "(sampler_ratio_mode); else the ratio is to the weights that sampled."
        },
    )
    sampler: str = field(
        default="local",
        metadata={"help": "Who samples: local (this process), process (a child process), vllm (servers)."},
    )
    sampler_processes: int = field(
        default=1, metadata={"help": "Processes of sampler='process', which share the groups."}
    )
    sampler_threads: int | None = field(
        default=None,
        metadata={
            "help": "CPU threads of each process of sampler='process'; by default they share training's number, and "
            "those of a small model take 1."
        },
    )
    weight_sync_timeout: float = field(
        default=1800, metadata={"help": "Seconds in which a sampler must have taken over new weights."}
    )

    @property
    def staleness(self) -> int:
        """``max_staleness``, and 0 where rounds are played inline."""
        if not self.asynchronous:
            return 0
        return STALENESS if self.max_staleness is None else self.max_staleness


def check_asynchronous(config: RolloutConfig) -> None:
    """
    Raises:
        ConfigurationError: a value out of range, or one that cannot act with the others.
    """
    choice("sampler", config.sampler, SAMPLERS)
    at_least("max_staleness", config.max_staleness, 0)
    at_least("sampler_threads", config.sampler_threads, 1)
    at_least("sampler_processes", config.sampler_processes, 1)
    if config.sampler_processes > 1 and config.sampler != "process":
        raise ConfigurationError(
            f"sampler_processes={config.sampler_processes} acts only with sampler='process'; set that too"
        )
    if config.sampler_threads is not None and config.sampler != "process":
        raise ConfigurationError(
            f"sampler_threads={config.sampler_threads} acts only with sampler='process': in this process sampling "
            "shares torch.set_num_threads with training"
        )
    if config.weight_sync_timeout <= 0:
        raise ConfigurationError(f"weight_sync_timeout={config.weight_sync_timeout} must be above 0 seconds")
    defaults = {f.name: f.default for f in fields(AsynchronousFields)}
    for name in ("max_staleness", "inflight_weight_updates", "recompute_old_logprobs"):
        if getattr(config, name) != defaults[name] and not config.asynchronous:
            raise ConfigurationError(f"{name}={getattr(config, name)!r} acts only with asynchronous=True; set that too")
    if config.deterministic and config.staleness:
        raise ConfigurationError(
            f"deterministic=True promises a run that no clock decides, and with max_staleness={config.staleness} the "
            "clock decides which groups are ready: set max_staleness=0, or deterministic=False"
        )
