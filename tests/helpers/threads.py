"""Which threads a sampler has left: tests share a process, and threads of earlier ones end when they like."""

from __future__ import annotations

import threading


def sampler_threads() -> set[threading.Thread]:
    """Threads of samplers that are alive now.

    Example:
        >>> before = sampler_threads()
        >>> sampler_threads() - before
        set()
    """
    return {thread for thread in threading.enumerate() if thread.name.startswith("envgrad-sampler")}
