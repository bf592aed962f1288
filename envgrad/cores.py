"""Cores of a CPU: which models keep several busy by themselves, and threads that compute on one."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

SMALL_BYTES = 64 << 20
"""of weights, up to which operations are too short to be shared: waiting for other cores takes longer than it saves"""

_changing = threading.Lock()


def is_small(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether these weights are small, and on a CPU.

    Example:
        >>> is_small(nn.Linear(2, 2).parameters())
        True
    """
    found = list(parameters)
    on_cpu = all(one.device.type == "cpu" for one in found)
    return on_cpu and sum(one.numel() * one.element_size() for one in found) <= SMALL_BYTES


def compute_alone() -> None:
    """From here on, what the calling thread computes with torch is not shared with other cores.

    Other threads, and those that are yet to come, keep what ``torch.set_num_threads`` says.

    Example:
        >>> seen = []
        >>> one = threading.Thread(target=lambda: (compute_alone(), seen.append(torch.get_num_threads())))
        >>> before = torch.get_num_threads()
        >>> one.start(), one.join(), seen, torch.get_num_threads() == before
        (None, None, [1], True)
    """
    with _changing:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        torch.get_num_threads()  # a thread's first look makes the setting its own
        # What new threads begin with is the newest setting of any thread: put it back, from a thread that ends.
        restorer = threading.Thread(target=torch.set_num_threads, args=(before,), name="envgrad-cores")
        restorer.start()
        restorer.join()


def allowed_cores() -> int:
    """Cores that this process may use at once: of those it is bound to, and of what a container's quota allows.

    Example:
        >>> allowed_cores() >= 1
        True
    """
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        granted = bound if quota == "max" else -(-int(quota) // int(period))
    except (OSError, ValueError):  # no cgroups, or another version of them
        granted = bound
    return max(1, min(bound, granted))
