"""What is asked of a Ray cluster: resources of an environment, how many share an actor, where actors go."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from envgrad.errors import ConfigurationError

PLACEMENTS = {"spread": "SPREAD", "pack": "DEFAULT"}
"""our word -> Ray's scheduling strategy"""
PER_ACTOR = 8
"""environments of an actor where none of them reserves anything"""
PLACEMENT_SECONDS = 60.0

_AMOUNTS = ("num_cpus", "num_gpus", "memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What one environment reserves of a node.

    Example:
        >>> needed = Resources.read({"num_cpus": 0.5, "custom": {"arm": 1}})
        >>> needed.options(4)
        {'num_cpus': 2.0, 'num_gpus': 0.0, 'resources': {'arm': 4.0}}
        >>> Resources.read({"cpus": 1})
        Traceback (most recent call last):
        envgrad.errors.ConfigurationError: environment_resources has 'cpus': only num_cpus, num_gpus, memory, custom
    """

    num_cpus: float = 0.0
    num_gpus: float = 0.0
    memory: float = 0.0
    """bytes"""
    custom: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, given: Mapping[str, Any] | None) -> Resources:
        """
        Raises:
            ConfigurationError: a name that is not known, or an amount that is no number of at least 0.
        """
        given = given or {}
        for name in given:
            if name not in (*_AMOUNTS, "custom"):
                raise ConfigurationError(f"environment_resources has {name!r}: only {', '.join(_AMOUNTS)}, custom")
        custom = given.get("custom", {})
        if not isinstance(custom, Mapping):
            raise ConfigurationError(f"environment_resources: custom={custom!r} must be a mapping of names to amounts")
        amounts = {name: _amount(name, given[name]) for name in _AMOUNTS if name in given}
        return cls(**amounts, custom={str(name): _amount(f"custom {name}", custom[name]) for name in custom})

    def __bool__(self) -> bool:
        return bool(self.num_cpus or self.num_gpus or self.memory or any(self.custom.values()))

    def options(self, environments: int) -> dict[str, Any]:
        """Ray's options of an actor that holds so many."""
        found: dict[str, Any] = {"num_cpus": self.num_cpus * environments, "num_gpus": self.num_gpus * environments}
        if self.memory:
            found["memory"] = int(self.memory * environments)
        if self.custom:
            found["resources"] = {name: amount * environments for name, amount in self.custom.items()}
        return found

    def told(self, environments: int) -> str:
        """For messages."""
        asked = self.options(environments)
        named = {name: amount for name, amount in asked.items() if name != "resources"} | asked.get("resources", {})
        return ", ".join(f"{name} {amount:g}" for name, amount in named.items() if amount) or "nothing but a process"


def _amount(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ConfigurationError(f"environment_resources: {name}={value!r} must be a number of at least 0")
    return float(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """How a cluster is used.

    Args:
        address: of a running cluster; None: the one that this process is connected to, or that ``RAY_ADDRESS`` names,
            else a local one is started, and stopped with the last of its users.
        resources: what one environment reserves.
        per_actor: environments that share an actor's process; None: 1 where they reserve something, else ``PER_ACTOR``.
        placement: ``spread`` over nodes, or ``pack`` them.
        placement_seconds: how long the cluster may take to find a place for an actor.
        concurrency: environments at once; so many, divided by ``per_actor``, is the most actors.

    Raises:
        ConfigurationError: a value that cannot work.

    Example:
        >>> RayOptions(concurrency=64).actors, RayOptions(concurrency=6, resources=Resources(num_cpus=1)).actors
        (8, 6)
    """

    address: str | None = None
    resources: Resources = field(default_factory=Resources)
    per_actor: int | None = None
    placement: str = "spread"
    placement_seconds: float = PLACEMENT_SECONDS
    concurrency: int = 1

    def __post_init__(self) -> None:
        if self.per_actor is not None and self.per_actor < 1:
            raise ConfigurationError(f"environments_per_actor={self.per_actor} must be at least 1")
        if self.placement not in PLACEMENTS:
            raise ConfigurationError(
                f"environment_placement={self.placement!r} is not known; choose one of {', '.join(PLACEMENTS)}"
            )
        if not self.placement_seconds > 0:
            raise ConfigurationError(f"placement_timeout={self.placement_seconds} must be above 0 seconds")
        if self.address is not None and (not self.address or self.address.startswith("ray://")):
            raise ConfigurationError(
                f"ray_address={self.address!r} must be host:port of a cluster, or auto for the one of this machine; a "
                "Ray client (ray://) is not used: start the trainer on a node of the cluster"
            )
        gpus = self.resources.num_gpus * self.seats
        if gpus > 1 and gpus != int(gpus):
            raise ConfigurationError(
                f"environments_per_actor={self.seats} of num_gpus={self.resources.num_gpus:g} are {gpus:g} GPUs, and "
                "an actor gets a part of one GPU or whole ones: change either"
            )

    @property
    def seats(self) -> int:
        """Environments of an actor."""
        return self.per_actor or (1 if self.resources else PER_ACTOR)

    @property
    def actors(self) -> int:
        """The most actors at once."""
        return max(1, math.ceil(self.concurrency / self.seats))
