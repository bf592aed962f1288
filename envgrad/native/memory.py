"""Memory that kernels write to, and what has been freed given back to the system."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor


def floats(*shape: int) -> Tensor:
    """Numbers in single precision, on the CPU, which mean nothing yet.

    Kernels trust the size, so it must not depend on torch's default type: that is one for all threads, and is another
    one for as long as some thread loads a model in half precision.

    Example:
        >>> floats(2, 3).dtype, floats(2, 3).shape
        (torch.float32, torch.Size([2, 3]))
    """
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def give_back_freed() -> None:
    """Give back what this process has freed and its allocator still holds, where the C library can (glibc).

    It takes some tenths of a second for a gigabyte, and what is needed again has to be asked for again.

    Example:
        >>> give_back_freed()
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
