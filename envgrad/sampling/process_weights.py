"""Weights on their way to another process: one file in the safetensors format, without a name.

The file lives in memory (``memfd``; where the system has none, an unlinked temporary file) and goes as an open
descriptor, so that nothing is left behind however either process ends. It is written whole before it is sent, is never
written again, and says its version; size and checksum travel apart from it. A receiver that finds any of them wrong
keeps what it has.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from envgrad.errors import WeightTransferError
from envgrad.sampling.weight_format import METADATA, FileHead, tensor_bytes

_CHUNK = 1 << 24
"""bytes read or written at once"""


@dataclass(slots=True, kw_only=True)
class WeightFile:
    """An open file with the weights of one version."""

    file: int
    """its descriptor"""
    size: int
    """bytes"""
    checksum: int
    """CRC-32 of all bytes"""
    version: int

    def facts(self) -> dict[str, int]:
        """What a receiver needs beside the file."""
        return {"size": self.size, "checksum": self.checksum, "version": self.version}

    def close(self) -> None:
        """Close this end; the memory is freed when both are closed. Safe to call twice."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_weights(named_tensors: Mapping[str, Tensor], version: int) -> WeightFile:
    """Write tensors into a new file, one after the other: they may be made as they are read, and are read twice.

    Tensors that share all their memory (tied weights) are written once.

    Raises:
        WeightTransferError: there is no room, or a tensor's type is not known to safetensors.

    Example:
        >>> import torch
        >>> with write_weights({"a": torch.ones(2, 3)}, version=5) as file:
        ...     read_weights(file.file, file.facts())["a"].sum()
        tensor(6.)
    """
    head, aliases = _head(named_tensors)
    beginning = head.written({"version": str(version), "aliases": json.dumps(aliases)})
    written = WeightFile(file=_open(), size=len(beginning) + head.tensor_bytes, checksum=0, version=version)
    try:
        _write(written, memoryview(beginning))
        for name in head.names:
            for part in _parts(named_tensors[name]):
                _write(written, part)
    except OSError as error:
        written.close()
        raise WeightTransferError(
            f"version {version} of the policy, {written.size / 1e6:.1f} MB, cannot be written on its way to the "
            f"sampler: {error.strerror}; free memory, or raise the limits of this process (ulimit -f)"
        ) from error
    return written


def _write(written: WeightFile, part: memoryview) -> None:
    written.checksum = zlib.crc32(part, written.checksum)
    while part:
        part = part[os.write(written.file, part) :]


def _head(named_tensors: Mapping[str, Tensor]) -> tuple[FileHead, dict[str, str]]:
    """What stands where in the file, and which tensors are others of it by another name."""
    head = FileHead()
    first: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in named_tensors.items():
        memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        other = first.setdefault(memory, name)
        # Memory is freed and given again where tensors are made as they are read: compare two that both live.
        if other != name and tensor.numel() and named_tensors[other].data_ptr() == tensor.data_ptr():
            aliases[name] = other
        else:
            head.add(name, tensor)
    return head, aliases


def _parts(tensor: Tensor) -> Iterator[memoryview]:
    data = tensor_bytes(tensor)
    for start in range(0, len(data), _CHUNK):
        yield data[start : start + _CHUNK]


def _open() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("envgrad-weights")
    with tempfile.TemporaryFile(prefix="envgrad-weights-") as file:
        return os.dup(file.fileno())


def read_weights(file: int, facts: Mapping[str, int]) -> dict[str, Tensor]:
    """The tensors in ``file``, which is left open; they are read from it as they are used.

    ``facts`` are those of the sender's ``WeightFile``.

    Raises:
        WeightTransferError: size, checksum, format or version is another than it should be.
    """
    version, size = facts["version"], os.fstat(file).st_size
    if size != facts["size"]:
        raise WeightTransferError(
            f"version {version} of the policy arrived torn: {size} of {facts['size']} bytes; the old version is kept"
        )
    checksum = at = 0
    while part := os.pread(file, _CHUNK, at):
        checksum, at = zlib.crc32(part, checksum), at + len(part)
    if checksum != facts["checksum"]:
        raise WeightTransferError(
            f"version {version} of the policy arrived corrupt: its checksum is {checksum:08x}, not "
            f"{facts['checksum']:08x}; the old version is kept"
        )
    try:
        tensors: dict[str, Tensor] = load_file(f"/dev/fd/{file}")
        metadata = _metadata(file)
        aliases: dict[str, str] = json.loads(metadata["aliases"])
        if metadata["version"] != str(version):
            raise WeightTransferError(
                f"the policy's weights say version {metadata['version']}, not {version}; the old version is kept"
            )
        return tensors | {name: tensors[of] for name, of in aliases.items()}
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise WeightTransferError(f"version {version} of the policy cannot be read: {error}") from error


def _metadata(file: int) -> dict[str, str]:
    (length,) = struct.unpack("<Q", os.pread(file, 8, 0))
    metadata: dict[str, str] = json.loads(os.pread(file, length, 8))[METADATA]
    return metadata
