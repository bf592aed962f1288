"""A real Ray cluster on this machine, and light environments for it, whose modules its nodes can import."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import signal
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

STORE = 80 * 2**20
QUICK_HEALTH = {
    "health_check_initial_delay_ms": 0, "health_check_period_ms": 300, "health_check_failure_threshold": 3,
}  # fmt: skip


@contextlib.contextmanager
def ray_cluster(**nodes: dict[str, float]) -> Iterator[Any]:
    """A cluster of a head without CPUs and the named nodes, each with the resources given; this process is connected.

    ``cluster.named`` has the nodes by name.
    """
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    names = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setenv(name, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        options = {"include_dashboard": False, "object_store_memory": STORE}
        cluster = Cluster(
            initialize_head=True, head_node_args=options | {"num_cpus": 0, "_system_config": QUICK_HEALTH}
        )
        try:
            cluster.named = {
                name: cluster.add_node(num_cpus=4, resources=given, **options) for name, given in nodes.items()
            }
            ray.init(address=cluster.address, configure_logging=False)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
            signal.signal(signal.SIGTERM, handler)


@dataclass(frozen=True)
class Notes:
    """What environments did, in one file for all processes of this machine: ``member instance pid``."""

    path: Path

    def write(self, member: str, instance: str = "-") -> int:
        """How many of this member there were before."""
        with self.path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            count = sum(line.startswith(f"{member} ") for line in file)
            file.write(f"{member} {instance} {os.getpid()}\n")
            return count

    def lines(self) -> list[tuple[str, str, int]]:
        if not self.path.exists():
            return []
        found = (line.split() for line in self.path.read_text().splitlines())
        return [(member, instance, int(pid)) for member, instance, pid in found]

    def count(self, member: str) -> int:
        return sum(one == member for one, _, _ in self.lines())

    def wait_for(self, member: str, count: int, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while self.count(member) < count:
            assert time.monotonic() < end, f"no {count} of {member}: {Counter(one for one, _, _ in self.lines())}"
            time.sleep(0.02)

    def closes(self) -> dict[str, int]:
        """By instance."""
        closed = Counter(instance for member, instance, _ in self.lines() if member == "close")
        return {instance: closed[instance] for member, instance, _ in self.lines() if member == "open"}

    def pids(self) -> dict[str, int]:
        return {instance: pid for member, instance, pid in self.lines() if member == "open"}


class Slow:
    """Works ``seconds`` in each call, asleep."""

    def __init__(self, path: Path, seconds: float = 0.2) -> None:
        self.notes, self.seconds = Notes(path), seconds
        self.name = f"{os.getpid()}-{time.monotonic_ns()}"
        self.notes.write("open", self.name)

    def reset(self, seed: int) -> str:
        self.done_work = 0
        self.notes.write("reset", self.name)
        return "Work."

    def work(self) -> str:
        """Work."""
        self.notes.write("work", self.name)
        time.sleep(self.seconds)
        self.done_work += 1
        return f"worked {self.done_work}"

    def get_reward(self) -> float:
        return float(self.done_work)

    def close(self) -> None:
        self.notes.write("close", self.name)


class Asleep:
    """As ``Slow``, without a file that all must write to."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.calls = seconds, 0

    def reset(self, seed: int) -> str:
        self.calls = 0
        return "Work."

    def work(self) -> str:
        """Work."""
        time.sleep(self.seconds)
        self.calls += 1
        return "worked"

    def get_reward(self) -> float:
        return float(self.calls)


class Dying(Slow):
    """Fails in all ways, at calls drawn beforehand: its process dies, its actor dies, it raises, it hangs."""

    WAYS = ("raise", "hang", "die", "actor")

    def __init__(self, path: Path, share: float = 0.12) -> None:
        super().__init__(path, 0.01)
        drawn = random.Random(5)
        self.decisions = [drawn.choice(self.WAYS) if drawn.random() < share else "ok" for _ in range(2000)]

    def work(self) -> str:
        """Work."""
        decision = self.decisions[self.notes.write("try", self.name)]
        self.notes.write(decision, self.name)
        if decision == "raise":
            raise OSError("no tools left")
        if decision == "hang":
            time.sleep(3600)
        if decision == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if decision == "actor":
            os.kill(actor_pid(), signal.SIGKILL)
            time.sleep(60)
        return super().work()


def actor_pid() -> int:
    """The process of this instance's actor: it has made the pair of sockets over which this process is asked."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            pid, _, _ = struct.unpack("3i", one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            found.add(pid)
    (actor,) = found - {0, os.getpid()}
    return actor
