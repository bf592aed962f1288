"""The safetensors format, as files of weights are written here: tensor after tensor, so that no copy of all is needed.

A file is the length of its head (8 bytes, little endian), the head (JSON: each tensor's type, shape and place), and the
tensors' bytes. https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from envgrad.errors import WeightTransferError

METADATA = "__metadata__"
_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class FileHead:
    """What stands where in a file; tensors follow in the order in which they were added.

    Example:
        >>> head = FileHead()
        >>> head.add("a", torch.ones(2, 3))
        >>> head.names, head.tensor_bytes, len(head.written({"version": "4"})) % 8
        (('a',), 24, 0)
    """

    def __init__(self) -> None:
        self._entries: dict[str, Any] = {}
        self.tensor_bytes = 0
        """of all tensors"""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def add(self, name: str, tensor: Tensor) -> None:
        """
        Raises:
            WeightTransferError: the format has no name for its type.
        """
        if tensor.dtype not in _TYPES:
            raise WeightTransferError(
                f"tensor {name!r} is of {tensor.dtype}, which safetensors cannot hold; convert it"
            )
        end = self.tensor_bytes + tensor.numel() * tensor.element_size()
        self._entries[name] = {
            "dtype": _TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self.tensor_bytes, end],
        }
        self.tensor_bytes = end

    def written(self, metadata: Mapping[str, str]) -> bytes:
        """The file's beginning."""
        text = json.dumps({METADATA: dict(metadata)} | self._entries).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text


def head_of(named_tensors: Iterable[tuple[str, Tensor]]) -> FileHead:
    """
    Raises:
        WeightTransferError: the format has no name for a tensor's type.
    """
    head = FileHead()
    for name, tensor in named_tensors:
        head.add(name, tensor)
    return head


def tensor_bytes(tensor: Tensor) -> memoryview[int]:
    """A tensor's bytes on the host, row by row."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    data: memoryview[int] = flat.numpy().data
    return data
