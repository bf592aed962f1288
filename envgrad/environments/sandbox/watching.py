"""A run's output and its use of memory and disk, watched from outside while it goes on."""

from __future__ import annotations

import os
import subprocess
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import IO

from envgrad.environments.sandbox.limits import SandboxLimits

LOOK_SECONDS = 0.03
DISK_LOOK_SECONDS = 0.05
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class Stream:
    """Reads one stream to its end; keeps its beginning."""

    source: IO[bytes]
    limit: int
    kept: bytearray = field(default_factory=bytearray)
    truncated: bool = False
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._read, name="envgrad-sandbox-output", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with suppress(ValueError, OSError):  # closed under it
            while part := os.read(self.source.fileno(), 65536):
                room = self.limit - len(self.kept)
                self.truncated |= len(part) > room
                self.kept += part[: max(0, room)]

    def text(self) -> str:
        self._thread.join(5.0)
        return self.kept.decode("utf-8", "replace")


def wait_within(process: subprocess.Popen[bytes], limits: SandboxLimits, workspace: str) -> str | None:
    """Wait for the end of ``process``; kill it, and name the limit, where it goes beyond one."""
    end, next_disk = monotonic() + limits.seconds, 0.0
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_SECONDS)
            return None if _fits(workspace, limits) else "disk_mb"
        now, over = monotonic(), None
        if now > end:
            over = "seconds"
        elif resident_bytes(process.pid) > limits.memory_mb * 2**20:
            over = "memory_mb"
        elif now > next_disk:
            next_disk = now + DISK_LOOK_SECONDS
            over = None if _fits(workspace, limits) else "disk_mb"
        if over is not None:
            process.kill()  # bwrap and its namespace's first process die with it, and so all the others
            process.wait()
            return over


def resident_bytes(root: int) -> int:
    """Resident memory of process ``root`` and all below it."""
    total, waiting = 0, [root]
    while waiting:
        pid = waiting.pop()
        with suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{pid}/statm") as file:
                total += int(file.read().split()[1]) * _PAGE
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children") as file:
                    waiting += [int(word) for word in file.read().split()]
    return total


def _fits(workspace: str, limits: SandboxLimits) -> bool:
    used, count = 0, 0
    for folder, folders, files in os.walk(workspace):  # links are not followed
        count += len(folders) + len(files)
        if count > limits.files:
            return False
        for name in files:
            with suppress(OSError):
                used += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return used <= limits.disk_mb * 2**20
