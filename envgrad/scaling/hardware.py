"""Accelerators by their data sheets, and what of that is reached: assumed, until somebody measures."""

from __future__ import annotations

import math
from dataclasses import dataclass

from envgrad.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One device.

    Example:
        >>> accelerator("h100").memory, accelerator("100,24,900").rate
        (80000000000.0, 100000000000000.0)
    """

    name: str
    rate: float
    """operations per second of dense matrix products, in what models are computed in"""
    memory: float
    """bytes"""
    reads: float
    """bytes per second"""
    number_bytes: int = 2
    """of one number as it is computed"""


ACCELERATORS = {
    one.name: one
    for one in (
        Accelerator(name="a100", rate=312e12, memory=80e9, reads=2.0e12),
        Accelerator(name="h100", rate=989e12, memory=80e9, reads=3.35e12),
        Accelerator(name="h200", rate=989e12, memory=141e9, reads=4.8e12),
        Accelerator(name="cpu", rate=50e9, memory=16e9, reads=12e9, number_bytes=4),
    )
}
"""dense bfloat16 of NVIDIA's data sheets for SXM modules; ``cpu`` is one core with float32, in round numbers"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """Shares of a data sheet's figures that are reached, and the network and disk beside it. All assumed by default.

    Raises:
        ConfigurationError: a share that is not above 0 and at most 1, or a rate of 0.
    """

    training: float = 0.40
    """of the rate, in forward and backward"""
    prefill: float = 0.50
    """of the rate, in reading prompts and in the products of decoding"""
    reading: float = 0.60
    """of the memory's rate, in decoding"""
    sampler_step: float = 0.004
    """seconds of a decoding step beside that: scheduling, launches, sampling"""
    network: float = 25e9
    """bytes per second into one machine"""
    disk: float = 2e9
    """bytes per second of the file system that checkpoints go to"""

    def __post_init__(self) -> None:
        for name in ("training", "prefill", "reading"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigurationError(f"a share reached of {getattr(self, name)} ({name}) must be in (0, 1]")
        for name in ("network", "disk"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigurationError(f"{name}={getattr(self, name)} bytes a second must be above 0")


def accelerator(text: str) -> Accelerator:
    """One by its name, or ``TFLOPS,GB,GB/s``.

    Raises:
        ConfigurationError: it is neither.
    """
    known = ACCELERATORS.get(text.lower())
    if known is not None:
        return known
    try:
        rate, memory, reads = (float(part) for part in text.split(","))
        if min(rate, memory, reads) <= 0:
            raise ValueError
    except ValueError:
        raise ConfigurationError(
            f"--gpu {text!r} is neither one of {', '.join(ACCELERATORS)} nor three numbers above 0, TFLOPS,GB,GB/s: "
            "989,80,3350 is an H100"
        ) from None
    return Accelerator(name=text, rate=rate * 1e12, memory=memory * 1e9, reads=reads * 1e9)
