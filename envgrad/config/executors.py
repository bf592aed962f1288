"""Where environments run: in threads, in processes, or on a Ray cluster, with what is asked of that."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from envgrad.environments.executors import check_executor
from envgrad.environments.executors.ray_options import PLACEMENT_SECONDS, RayOptions, Resources
from envgrad.errors import ConfigurationError

if TYPE_CHECKING:
    from envgrad.config.rollout import RolloutConfig


@dataclass
class ExecutorFields:
    """The fields; ``RolloutConfig`` has them."""

    environment_executor: str = field(
        default="thread",
        metadata={
            "help": "Where sync environment code runs: thread, process (a process for each instance), or ray (such "
            "processes, held by actors on a Ray cluster)."
        },
    )
    ray_address: str | None = field(
        default=None,
        metadata={
            "help": "Ray cluster, host:port or auto; by default the connected one, or RAY_ADDRESS, else a local one is "
            "started."
        },
    )
    environment_resources: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "What one environment reserves on a Ray cluster: {'num_cpus': 1, 'num_gpus': 0.1, 'memory': bytes, "
            "'custom': {'name': 1}}."
        },
    )
    environments_per_actor: int | None = field(
        default=None,
        metadata={"help": "Environments that share a Ray actor; 8, or 1 where environment_resources reserves any."},
    )
    environment_placement: str | None = field(
        default=None, metadata={"help": "Where Ray puts actors: spread over the nodes (the default), or pack."}
    )
    placement_timeout: float | None = field(
        default=None, metadata={"help": "Seconds in which a Ray cluster must have room for an actor; 60 by default."}
    )

    def ray_options(self, concurrency: int) -> RayOptions:
        """How a cluster is used by ``concurrency`` environments at once.

        Raises:
            ConfigurationError: values that cannot work.
        """
        resources = self.environment_resources
        if isinstance(resources, str):
            raise AssertionError("environment_resources are read on construction")
        return RayOptions(
            address=self.ray_address,
            resources=Resources.read(resources),
            per_actor=self.environments_per_actor,
            placement=self.environment_placement or "spread",
            placement_seconds=PLACEMENT_SECONDS if self.placement_timeout is None else self.placement_timeout,
            concurrency=concurrency,
        )


def check_executors(config: RolloutConfig) -> None:
    """
    Raises:
        ConfigurationError: no such executor, values that cannot work, or options of a cluster without one.
    """
    check_executor(config.environment_executor)
    config.ray_options(1)
    if config.environment_executor == "ray":
        return
    for one in fields(ExecutorFields):
        value = getattr(config, one.name)
        if value is not None and one.name != "environment_executor":
            raise ConfigurationError(
                f"{one.name}={value!r} acts only with environment_executor='ray'; set that too, or drop it"
            )
