"""Decoding siblings attend to the prompt that they share all at once, on a CPU.

Each row's softmax is over two sets of keys, the shared prompt's and its own. With outputs ``a``, ``b`` and log-sum-exps
``l_a``, ``l_b`` of the two, the whole is ``a + (b - a) sigmoid(l_b - l_a)`` (Hydragen, arXiv:2402.05099). The prompt's
keys and values are read once for all siblings, whose queries make one large product with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from envgrad.sampling.kv_cache import StepRow
from envgrad.sampling.requests import SharedPrefix

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def is_flash(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether torch's CPU flash kernel takes these."""
    same = query.dtype == keys.dtype == values.dtype and query.shape[-1] == keys.shape[-1] == values.shape[-1]
    return same and query.device.type == "cpu" and query.dtype in _DTYPES


def flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """``(n, H, L, D)`` over ``(n, H, K, D)`` -> output ``(n, H, L, D)`` and log-sum-exp ``(n, H, L)``.

    Example:
        >>> q, k = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 8, 4)
        >>> output, norm = flash(q, k, torch.ones(1, 1, 8, 4), None, None)
        >>> output.flatten().unique().tolist(), round(norm[0, 0, 0].exp().item(), 3)
        ([1.0], 8.0)
    """
    found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        q, k, v, 0.0, False, attn_mask=mask, scale=scale
    )
    return found


class SharedHalf:
    """The prompts that decoding rows share with their siblings, and who attends to which.

    Args:
        prefixes: of each row.
        rows: in the order of their bucket.
        offsets: index of each row's token in the flat step.
    """

    def __init__(
        self, prefixes: Sequence[SharedPrefix], rows: Sequence[StepRow], offsets: Sequence[int], device: torch.device
    ) -> None:
        families: dict[SharedPrefix, list[int]] = {}
        for index, prefix in enumerate(prefixes):
            families.setdefault(prefix, []).append(index)
        self.prefixes = tuple(sorted(families))
        members = [families[prefix] for prefix in self.prefixes]
        lengths = [prefix.length for prefix in self.prefixes]
        self.longest, self.most = max(lengths), max(len(family) for family in members)
        padded = [[*family, *([family[0]] * (self.most - len(family)))] for family in members]
        self.size = (len(members), self.most)
        self.take = torch.tensor([offsets[one] for family in padded for one in family], device=device)
        """(families * most,) flat token index of each query"""
        self.sources = torch.tensor([rows[family[0]].slot for family in members], device=device)
        self.mask: Tensor | None = None
        """(families, 1, 1, longest) additive, where prompts differ in length"""
        if min(lengths) < self.longest:
            hidden = torch.arange(self.longest) >= torch.tensor(lengths).unsqueeze(1)
            mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
            self.mask = mask.view(-1, 1, 1, self.longest).to(device)
        self.lengths = [0] * len(rows)
        """keys of each row that are in this half"""
        self._at = [0] * len(rows)
        for number, (family, length) in enumerate(zip(members, lengths, strict=True)):
            for place, index in enumerate(family):
                self.lengths[index], self._at[index] = length, number * self.most + place
        self.give = self.take
        self.cut: Tensor | None = None

    def align(self, places: Sequence[int], size: int) -> None:
        """Set ``give`` (size,), which brings this half into the order of the other, where row i is at ``places[i]``;
        and ``cut`` (size, 1, 1, 1), the first key of each row's other half (None if it is the same for all)."""
        give, cut = [0] * size, [0] * size
        for place, at, length in zip(places, self._at, self.lengths, strict=True):
            give[place], cut[place] = at, length
        self.give = torch.tensor(give, device=self.take.device)
        if min(self.lengths) < max(self.lengths):
            self.cut = torch.tensor(cut, device=self.take.device).view(-1, 1, 1, 1)

    def complete(
        self, query: Tensor, block: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], scale: float | None
    ) -> Tensor:
        """The whole attention of the rows, ``(size, Hq, D)``.

        Args:
            query: of all the step's tokens, ``(T, Hq, D)``.
            block: keys and values of ``prefixes``, ``(families, Hkv, longest, D)``.
            own: the other half's output ``(size, Hkv, G, D)`` and log-sum-exp ``(size, Hkv, G)``, in the order that
                ``align`` was told.
            scale: of the products.
        """
        output, norm = own
        size, heads, groups, _ = output.shape
        families, most = self.size
        q = query.index_select(0, self.take).view(families, most, heads, groups, -1).transpose(1, 2)
        q = q.reshape(families, heads, most * groups, -1)
        mask = None
        if self.mask is not None:
            mask = self.mask.to(query.dtype).expand(families, heads, most * groups, -1)
        found, found_norm = flash(q, block[0], block[1], mask, scale)
        found = found.reshape(families, heads, most, groups, -1).transpose(1, 2).flatten(0, 1)
        found_norm = found_norm.reshape(families, heads, most, groups).transpose(1, 2).flatten(0, 1)
        found, found_norm = found.index_select(0, self.give), found_norm.index_select(0, self.give)
        weight = torch.sigmoid(found_norm - norm).unsqueeze(-1).to(output.dtype)
        return torch.lerp(output, found, weight).reshape(size, heads * groups, -1)
