"""Memory that kernels read and write, and what has been freed given back to the system."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from envgrad.native.compiler import library

_PLAIN = (Tensor, nn.Parameter)


def floats(*shape: int) -> Tensor:
    """Numbers in single precision, on the CPU, which mean nothing yet.

    Kernels trust the size, so it must not depend on torch's default type: that is one for all threads, and is another
    one for as long as some thread loads a model in half precision.

    Example:
        >>> floats(2, 3).dtype, floats(2, 3).shape
        (torch.float32, torch.Size([2, 3]))
    """
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def can_compute(*tensors: Tensor) -> bool:
    """Whether kernels compute with ``tensors``: they are there, and these are plain ones in float32 on the CPU.

    Where something looks at torch's operations (``torch.compile``, ``torch.func``, counters of operations), these are
    left for it to see.

    Example:
        >>> can_compute(floats(3).double())
        False
    """
    return (
        all(type(one) in _PLAIN and one.dtype == torch.float32 and one.device.type == "cpu" for one in tensors)
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and _get_current_dispatch_mode() is None
        and library() is not None
    )


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
