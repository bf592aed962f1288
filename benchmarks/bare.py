"""A bare forward loop: the least that decoding with a Hugging Face model can be, as a yardstick.

Prompts of one length, one preallocated slot of keys and values for each row, and a batch that loses rows from its
end: they are sorted by length, so that those that still run are always the first ones, and no mask, copy or gather is
ever needed. No sessions, no refilled slots, no log-probs, no seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin


class _Slots(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values ``(rows, heads, longest, size)``, written in place at the common position."""

    is_sliding = False

    def __init__(self, rows: int, longest: int) -> None:
        super().__init__()
        self._rows, self._longest = rows, longest
        self.filled = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        _, heads, _, size = key_states.shape
        self.keys = key_states.new_empty(self._rows, heads, self._longest, size)
        self.values = torch.empty_like(self.keys)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows, _, new, _ = key_states.shape
        start, self.filled = self.filled, self.filled + new
        self.keys[:rows, :, start : self.filled] = key_states
        self.values[:rows, :, start : self.filled] = value_states
        return self.keys[:rows, :, : self.filled], self.values[:rows, :, : self.filled]

    def get_seq_length(self) -> int:
        return self.filled

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.filled + query_length, 0

    def get_max_length(self) -> int:
        return -1


def sample(logits: Tensor) -> Tensor:
    """One token ``(rows, 1)`` from each row of ``logits`` ``(rows, V)``."""
    return torch.multinomial(torch.softmax(logits, -1), 1)


@torch.no_grad()
def decode_bare(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    choose: Callable[[Tensor], Tensor] = sample,
) -> int:
    """Sample as many tokens as ``lengths`` say, longest first; returns how many were sampled.

    Raises:
        ValueError: prompts of different lengths.
    """
    if len({len(prompt) for prompt in prompts}) != 1:
        raise ValueError("the bare loop has no mask: its prompts must have one length")
    left = sorted(lengths, reverse=True)
    rows, longest = len(left), len(prompts[0]) + left[0]
    cache = Cache(layers=[_Slots(rows, longest) for _ in range(model.config.num_hidden_layers)])
    tokens = torch.tensor([list(prompt) for prompt in prompts])
    position, sampled = 0, 0
    for step in range(left[0]):
        running = sum(length > step for length in left)
        tokens = tokens[:running]
        positions = torch.arange(position, position + tokens.shape[1]).unsqueeze(0)
        output: Any = model(input_ids=tokens, position_ids=positions, cache=cache, use_cache=True, logits_to_keep=1)
        position += tokens.shape[1]
        tokens = choose(output.logits[:, -1])
        sampled += running
    return sampled
