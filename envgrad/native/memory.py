"""Memory that has been freed, given back to the system."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any


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
