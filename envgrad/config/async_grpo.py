"""``AsyncGRPOConfig``: GRPO with ``asynchronous`` on, and the names that trl's has for it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from envgrad.config.checks import at_least
from envgrad.config.grpo import GRPOConfig
from envgrad.config.rloo import RLOOConfig
from envgrad.config.rollout import RolloutConfig
from envgrad.config.sdpo import SDPOConfig
from envgrad.errors import ConfigurationError

ASYNC_REFUSED: dict[str, tuple[object, str]] = {
    "fork_threshold_tokens": (
        1024,
        "sampled ids are never encoded again, so that no row is forked; remove it",
    ),
    "queue_maxsize": (1024, "the buffer holds max_staleness + 1 rounds and no more; set max_staleness"),
    "heartbeat_stale_after_s": (
        300.0,
        "the trainer looks every half second whether its rollouts live, and each of their waits has a limit of its "
        "own (tool_timeout, reset_timeout, reward_timeout, episode_timeout); set those",
    ),
}
"""trl's fields that cannot act here: the value that asks for nothing, and what to do instead."""

ASYNC_RENAMED = {
    "token_budget": "max_tokens_per_microbatch",
    "max_inflight_tasks": "max_concurrent_episodes",
    "weight_sync_steps": "steps_per_generation",
    "request_timeout": "vllm_request_timeout",
    "dtype": "model_init_kwargs",
}
"""trl's fields that set another one of ours"""

_KEPT = ("asynchronous", "max_staleness", "logging_steps", "lr_scheduler_type")
"""defaults of ``AsyncGRPOConfig`` that hold for another algorithm too"""


@dataclass
class AsyncGRPOConfig(GRPOConfig):
    """GRPO whose rollouts never wait for training. Names and defaults are those of trl's ``AsyncGRPOConfig``.

    Raises:
        ConfigurationError: a value that cannot work, named with the rule and the fix.

    Example:
        >>> config = AsyncGRPOConfig(output_dir="runs/doc", max_steps=5, token_budget=4096, max_inflight_tasks=32)
        >>> config.asynchronous, config.max_staleness, config.max_tokens_per_microbatch, config.max_concurrent_episodes
        (True, 4, 4096, 32)
    """

    asynchronous: bool = field(
        default=True, metadata={"help": "Play rounds in the background, with weights of a few updates ago."}
    )
    max_staleness: int | None = field(
        default=4, metadata={"help": "Most weight updates between a sampled token and its first pass. 0: none."}
    )
    max_completion_length: int = field(
        default=2048, metadata={"help": "Tokens of the whole episode after its prompt, tool results included."}
    )
    logging_steps: float = 1
    lr_scheduler_type: str = "constant"
    ignore_data_skip: bool = True
    # -- trl's
    dtype: str = field(default="float32", metadata={"help": "Name that trl has for dtype in model_init_kwargs."})
    token_budget: int | None = field(
        default=None, metadata={"help": "Name that trl has for max_tokens_per_microbatch; 0 or less is no budget."}
    )
    max_inflight_tasks: int = field(
        default=-1, metadata={"help": "Name that trl has for max_concurrent_episodes; -1 is its default."}
    )
    weight_sync_steps: int = field(
        default=1, metadata={"help": "Optimizer steps between two publishes: steps_per_generation counts the same."}
    )
    request_timeout: float = field(default=600, metadata={"help": "Name that trl has for vllm_request_timeout."})
    fork_threshold_tokens: int = field(default=1024, metadata={"help": "Not supported: rows are never forked."})
    queue_maxsize: int = field(default=1024, metadata={"help": "Not supported: set max_staleness."})
    heartbeat_stale_after_s: float = field(default=300.0, metadata={"help": "Not supported: life is always looked at."})

    def __post_init__(self) -> None:
        for name, (nothing, instead) in ASYNC_REFUSED.items():
            if getattr(self, name) != nothing:
                raise ConfigurationError(f"{name}={getattr(self, name)!r} cannot act in envgrad: {instead}")
        at_least("weight_sync_steps", self.weight_sync_steps, 1)
        if self.max_inflight_tasks != -1:
            at_least("max_inflight_tasks", self.max_inflight_tasks, 1, why="or -1 for the default")
            self._set("max_inflight_tasks", self.max_inflight_tasks)
        if self.token_budget is not None:
            self._set("token_budget", self.token_budget if self.token_budget > 0 else None)
        if self.request_timeout != 600:
            self._set("request_timeout", self.request_timeout)
        if self.weight_sync_steps != 1:
            self._set("weight_sync_steps", self.weight_sync_steps * self.gradient_accumulation_steps)
        super().__post_init__()
        if self.dtype != "float32":
            self.model_init_kwargs = {"dtype": self.dtype} | (self.mapping("model_init_kwargs") or {})

    def _set(self, name: str, value: object) -> None:
        """Set the field that trl's ``name`` stands for."""
        ours = ASYNC_RENAMED[name]
        if getattr(self, ours) not in (_default(type(self), ours), value):
            raise ConfigurationError(
                f"{name}={getattr(self, name)!r} is {ours}={value!r} here, and {ours}={getattr(self, ours)!r} is set "
                "too; set one"
            )
        setattr(self, ours, value)


def configuration_of(config: AsyncGRPOConfig, algorithm: str) -> RolloutConfig:
    """``config`` for ``grpo``, ``rloo`` or ``sdpo``; what is not set has the algorithm's own default.

    Raises:
        ConfigurationError: an unknown name, or an option that only GRPO has.

    Example:
        >>> config = AsyncGRPOConfig(output_dir="runs/doc", max_steps=5, temperature=0.7, max_staleness=2)
        >>> rloo = configuration_of(config, "rloo")
        >>> type(rloo).__name__, rloo.asynchronous, rloo.max_staleness, rloo.temperature, rloo.beta
        ('RLOOConfig', True, 2, 0.7, 0.05)
    """
    if algorithm == "grpo":
        return config
    classes: dict[str, type[RolloutConfig]] = {"rloo": RLOOConfig, "sdpo": SDPOConfig}
    if algorithm not in classes:
        raise ConfigurationError(f"algorithm={algorithm!r} is not known; choose one of grpo, rloo, sdpo")
    target = classes[algorithm]
    known = {f.name: f.default for f in fields(target)}
    values: dict[str, Any] = {}
    for own in (f for f in fields(config) if f.init):
        value = getattr(config, own.name)
        if own.name not in known:
            if value != own.default and own.name not in ASYNC_RENAMED:
                raise ConfigurationError(
                    f"{own.name}={value!r} is an option of GRPO, and algorithm={algorithm!r}; remove it, or pass "
                    f"args={target.__name__}(asynchronous=True, ...)"
                )
        elif own.name in _KEPT or value != own.default or known[own.name] == own.default:
            values[own.name] = value
    return target(**values)


def _default(config: type, name: str) -> object:
    return next(f.default for f in fields(config) if f.name == name)
