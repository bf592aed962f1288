"""The machine: what it is, how fast it multiplies, and whether anything else runs on it."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

QUIET = 0.10
"""share of the cores that others may use before a measurement counts as disturbed"""


def machine_line() -> str:
    """Processor, cores, memory, system and the versions that matter."""
    from importlib.metadata import version

    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return (
        f"{_cpu_name()}, {os.cpu_count()} cores, {_memory_gib():.0f} GiB, {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}, {versions}, float32"
    )


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def load_average() -> float:
    """Of the last minute; our own work is in it."""
    return os.getloadavg()[0]


def busy_share(seconds: float = 0.5) -> float | None:
    """Share of all cores that is in use while this process sleeps; None where the system does not tell."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    before = _ticks(stat)
    time.sleep(seconds)
    after = _ticks(stat)
    total = sum(after) - sum(before)
    idle = after[3] + after[4] - before[3] - before[4]
    return 1.0 - idle / total if total else 0.0


def _ticks(stat: Path) -> list[int]:
    return [int(one) for one in stat.read_text(encoding="utf-8").splitlines()[0].split()[1:9]]


def matmul_rate(size: int = 1536, repeats: int = 5) -> float:
    """float32 operations per second of a square matmul, on the threads that torch has now; the best of a few."""
    import torch

    left, right = torch.rand(size, size), torch.rand(size, size)
    out = torch.empty(size, size)
    torch.mm(left, right, out=out)
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        torch.mm(left, right, out=out)
        best = min(best, time.perf_counter() - began)
    return 2.0 * size**3 / best
