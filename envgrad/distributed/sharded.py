"""Weights that are cut over ranks: whole ones for samplers, and one tensor at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor


class WholeWeights(Mapping[str, Tensor]):
    """Tensors by name, each gathered from all ranks when it is read. Every rank reads all of them, in order.

    Example:
        >>> weights = WholeWeights({"a": torch.ones(2)})
        >>> weights["a"]
        tensor([1., 1.])
    """

    def __init__(self, parts: Mapping[str, Tensor]) -> None:
        self._parts = parts

    def __getitem__(self, name: str) -> Tensor:
        return whole(self._parts[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """``tensor`` as it would be on one process: of FSDP2's ``DTensor``, or of a parameter that ZeRO-3 has partitioned.

    A collective where it is cut, the tensor itself elsewhere.
    """
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    if hasattr(tensor, "ds_id"):
        with _gathered(tensor):
            return tensor.detach().clone()
    return tensor


def here(tensor: Tensor) -> Tensor:
    """What this rank has of ``tensor``; no collective.

    Example:
        >>> here(torch.ones(1))
        tensor([1.])
    """
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _gathered(parameter: Tensor) -> contextlib.AbstractContextManager[None]:
    from deepspeed.zero import GatheredParameters  # type: ignore[import-not-found,import-untyped,unused-ignore]

    context: contextlib.AbstractContextManager[None] = GatheredParameters([parameter], modifier_rank=None)
    return context


def is_cut(weights: Mapping[str, Tensor]) -> bool:
    """Whether any of ``weights`` is no whole tensor here.

    Example:
        >>> is_cut({"a": torch.ones(2)})
        False
    """
    from torch.distributed.tensor import DTensor

    return any(isinstance(one, DTensor) or hasattr(one, "ds_id") for one in weights.values())
