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
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from envgrad.errors import WeightTransferError

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_METADATA = "__metadata__"
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
        >>> with write_weights({"a": torch.ones(2, 3)}, version=5) as file:
        ...     read_weights(file.file, file.facts())["a"].sum()
        tensor(6.)
    """
    header, size = _header(named_tensors, version)
    names = [name for name in header if name != _METADATA]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    written = WeightFile(file=_open(), size=8 + len(text) + size, checksum=0, version=version)
    try:
        _write(written, memoryview(struct.pack("<Q", len(text)) + text))
        for name in names:
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


def _header(named_tensors: Mapping[str, Tensor], version: int) -> tuple[dict[str, Any], int]:
    """What stands where in the file, and how many bytes the tensors take."""
    header: dict[str, Any] = {}
    first: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    at = 0
    for name, tensor in named_tensors.items():
        if tensor.dtype not in _NAMES:
            raise WeightTransferError(f"tensor {name!r} is of {tensor.dtype}, which safetensors cannot hold")
        memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        other = first.setdefault(memory, name)
        # Memory is freed and given again where tensors are made as they are read: compare two that both live.
        if other != name and tensor.numel() and named_tensors[other].data_ptr() == tensor.data_ptr():
            aliases[name] = other
            continue
        end = at + _bytes_of(tensor)
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    header[_METADATA] = {"version": str(version), "aliases": json.dumps(aliases)}
    return header, at


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _parts(tensor: Tensor) -> Iterator[memoryview]:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    data = flat.numpy().data
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
    metadata: dict[str, str] = json.loads(os.pread(file, length, 8))[_METADATA]
    return metadata
