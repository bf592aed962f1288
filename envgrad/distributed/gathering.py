"""Small tensors and plain data of all ranks, put together on each of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from envgrad.distributed.ranks import Ranks


def gather_tensors(ranks: Ranks, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All ranks' tensors by name, on the CPU; names of two ranks differ.

    Raises:
        RankFailed: a rank is gone.

    Example:
        >>> import torch
        >>> from envgrad.distributed.ranks import Alone
        >>> gather_tensors(Alone(), {"a": torch.ones(2)})
        {'a': tensor([1., 1.])}
    """
    if ranks.size == 1:
        return dict(own)
    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in own.items()})
    found: dict[str, Tensor] = {}
    for part in ranks.exchange(data):
        found |= load(part)
    return found


def gather_lists(ranks: Ranks, own: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """All ranks' lists of plain JSON data by name, one behind the other in the order of ranks.

    Raises:
        RankFailed: a rank is gone.

    Example:
        >>> from envgrad.distributed.ranks import Alone
        >>> gather_lists(Alone(), {"a": [1, 2]})
        {'a': [1, 2]}
    """
    if ranks.size == 1:
        return {name: list(values) for name, values in own.items()}
    found: dict[str, list[Any]] = {}
    for part in ranks.exchange(json.dumps({name: list(values) for name, values in own.items()}).encode()):
        for name, values in json.loads(part).items():
            found.setdefault(name, []).extend(values)
    return found
