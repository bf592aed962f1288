"""Weights on their way to a server as files in a folder that both see: written whole, checked, removed after.

A file gets its name only when all of it is on the disk (temporary name, ``fsync``, rename), so that nobody reads a torn
one by its name; its SHA-256 travels beside it, so that a worker finds what was torn or changed all the same.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from envgrad.errors import ConfigurationError, WeightTransferError, first_line
from envgrad.sampling.weight_format import head_of, tensor_bytes

if TYPE_CHECKING:
    from torch import Tensor

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "envgrad-weights-"
_LOCK = "lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A file that lies ready."""

    path: Path
    version: int
    size: int
    """bytes"""
    sha256: str
    """in hexadecimal digits"""


class WeightFolder:
    """A folder of this run's own, removed on every way out but a kill; folders that killed runs left in shared memory
    are removed when the next one starts.

    Args:
        shared: The folder to make it in, which trainer and servers see under this path. None: shared memory, or the
            system's temporary folder where there is none.

    Raises:
        ConfigurationError: ``shared`` is no folder that can be written to.

    Example:
        >>> import torch
        >>> with tempfile.TemporaryDirectory() as shared:
        ...     folder = WeightFolder(shared)
        ...     ready = folder.write({"head": torch.ones(2, 3)}, version=4)
        ...     ready.path.name, ready.size > 24, folder.remove(ready.path), ready.path.exists()
        ('weights-4.safetensors', True, None, False)
    """

    def __init__(self, shared: str | Path | None = None) -> None:
        parent = Path(shared) if shared is not None else _local_folder()
        if shared is None:
            _sweep(parent)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        except OSError as error:
            raise ConfigurationError(
                f"vllm_sync_dir={str(parent)!r} cannot be written to ({error.strerror}); give a folder that "
                "trainer and servers share"
            ) from error
        if shared is not None:
            self.path.chmod(0o755)  # servers may run as somebody else there
        # Held while this process lives: who can take it knows that nobody needs the folder any more.
        self._lock = open(self.path / _LOCK, "w")  # noqa: SIM115
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._closer = weakref.finalize(self, _remove_folder, self.path, self._lock)

    def probe(self) -> Published:
        """A small file, by which a server shows that it sees this folder."""
        path = self.path / "probe"
        text = secrets.token_bytes(32)
        path.write_bytes(text)
        return Published(path=path, version=0, size=len(text), sha256=hashlib.sha256(text).hexdigest())

    def write(self, named_tensors: Mapping[str, Tensor], version: int, *, name: str | None = None) -> Published:
        """Write tensors as one safetensors file, one after the other, so that no copy of all is needed.

        Args:
            named_tensors: On any device.
            version: The policy's.
            name: The file's, relative to the folder; its parent must be there. By default from the version.

        Raises:
            WeightTransferError: there is no room, the disk fails, or a tensor's type is unknown to safetensors. What
                was written is removed.
        """
        target = self.path / (name or f"weights-{version}.safetensors")
        head = head_of(named_tensors.items())
        beginning = head.written({"format": "pt"})
        size = len(beginning) + head.tensor_bytes
        free = shutil.disk_usage(self.path).free
        if size > free:
            raise WeightTransferError(
                f"version {version} of the policy takes {size / 1e6:.1f} MB in {self.path}, which has "
                f"{free / 1e6:.1f} MB left; make room there, or give another vllm_sync_dir"
            )
        unfinished = target.with_name(f".{target.name}.unfinished")
        found = hashlib.sha256()
        try:
            with open(unfinished, "wb") as file:
                parts: Iterator[bytes | memoryview[int]] = map(tensor_bytes, named_tensors.values())
                for part in itertools.chain([beginning], parts):
                    found.update(part)
                    write_all(file, part)
                file.flush()
                os.fsync(file.fileno())
            os.rename(unfinished, target)
        except OSError as error:
            raise WeightTransferError(
                f"version {version} of the policy ({size / 1e6:.1f} MB) cannot be written to {self.path}: "
                f"{first_line(error)}; make room there, or give another vllm_sync_dir"
            ) from error
        finally:
            unfinished.unlink(missing_ok=True)
        return Published(path=target, version=version, size=size, sha256=found.hexdigest())

    def remove(self, path: Path) -> None:
        """Remove a file or folder in here; one that is gone already is no error."""
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the folder. Safe to call twice."""
        self._closer()


def write_all(file: IO[bytes], part: bytes | memoryview[int]) -> None:
    """One write; in a place of its own, for tests of disks that are full."""
    file.write(part)


def _local_folder() -> Path:
    usable = SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)
    return SHARED_MEMORY if usable else Path(tempfile.gettempdir())


def _sweep(parent: Path) -> None:
    """Remove folders whose process is gone: nobody holds their lock."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            with open(folder / _LOCK) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # its process lives, or it is somebody else's
            continue


def _remove_folder(path: Path, lock: IO[str]) -> None:
    shutil.rmtree(path, ignore_errors=True)
    lock.close()
