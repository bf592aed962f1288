"""Operations that a model cannot do without, and how many the device does in a second: what utilization is made of.

A model of ``N`` weights without embeddings and head, ``L`` layers, ``H`` heads of size ``h``, and a head of ``M``
weights spends per forward (Kaplan et al., arXiv:2001.08361, section 2.1)::

    2 N  per token   +   2 M  per predicted token   +   4 L H h  per (query, key) pair

A backward spends twice that: ``6 N`` per token in all. Where only adapters of ``A`` weights are trained, gradients of
the other weights are not computed: ``4 N + 2 A`` per token. Pairs are those of full causal attention; a sliding window
has fewer, and tokens that predict nothing need less of the last layer (``last_layer``); both are counted whole. Norms,
activations and the optimizer are left out, and what is computed twice (activation checkpointing, a prompt in several
micro-batches, evicted keys and values) counts once.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from envgrad.types import Group

if TYPE_CHECKING:  # plans count operations where no torch is loaded
    import torch
    from transformers import PreTrainedModel

    from envgrad.packing import Batch, MicroBatch


class RowWork(NamedTuple):
    """One token row, as far as it must be forwarded."""

    prompt: Hashable
    """equal for rows that share their prompt's forward"""
    prompt_length: int
    needed: int
    """tokens before the last predicted one"""
    predictions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What must be forwarded: every token once, a prompt that rows share once for all of them.

    Example: two rows that share a prompt of 2 tokens.
        >>> Work.of_rows([RowWork("g", 2, 4, 3), RowWork("g", 2, 2, 1)])
        Work(tokens=4, predictions=4, pairs=10)
    """

    tokens: int = 0
    predictions: int = 0
    """tokens whose logits are computed"""
    pairs: int = 0
    """(query, key) pairs"""

    def __add__(self, other: Work) -> Work:
        return Work(
            tokens=self.tokens + other.tokens,
            predictions=self.predictions + other.predictions,
            pairs=self.pairs + other.pairs,
        )

    @classmethod
    def of_rows(cls, rows: Iterable[RowWork]) -> Work:
        prompts: dict[Hashable, int] = {}
        tokens = predictions = pairs = 0
        for prompt, prompt_length, needed, predicted in rows:
            prompts[prompt] = prompt_length
            tokens += needed - prompt_length
            pairs += _pairs(needed) - _pairs(prompt_length)
            predictions += predicted
        tokens += sum(prompts.values())
        pairs += sum(_pairs(length) for length in prompts.values())
        return cls(tokens=tokens, predictions=predictions, pairs=pairs)

    @classmethod
    def of_groups(cls, groups: Iterable[Group]) -> Work:
        """Of playing these groups: prompts, sampled tokens and tool results; what follows a row's last sampled token,
        and that token itself, need no forward."""
        return cls.of_rows(
            RowWork(
                (episode.task.key, row.token_ids[: row.prompt_length]),
                row.prompt_length,
                _last_one(row.mask),
                row.num_sampled_tokens,
            )
            for group in groups
            for whole in group.episodes
            for episode in (whole, *whole.parts)
            for row in episode.rows
            if any(row.mask)
        )

    @classmethod
    def of_batch(cls, batch: Batch) -> Work:
        """Of one pass over a step's samples, without those that were left out and without the teacher's rows."""
        members = {index: None for micro_batch in batch.micro_batches for index in micro_batch.samples}
        samples = [batch.samples[index] for index in members]
        return cls.of_rows(
            RowWork(
                (sample.group, sample.token_ids[: sample.prompt_length]),
                sample.prompt_length,
                _last_one(sample.mask),
                sample.num_trained_tokens,
            )
            for sample in samples
        )

    @classmethod
    def of_packed(cls, packed: MicroBatch) -> Work:
        """Of a micro-batch as it is forwarded."""
        tokens = packed.num_forwarded_tokens
        return cls(tokens=tokens, predictions=packed.target_ids.shape[0], pairs=int(packed.position_ids.sum()) + tokens)


def _pairs(length: int) -> int:
    return length * (length + 1) // 2


def _last_one(mask: tuple[int, ...]) -> int:
    return len(mask) - 1 - mask[::-1].index(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """The sizes of a model that decide its operations.

    Example:
        >>> cost = ModelCost(body=10, trained_body=10, head=5, trained_head=5, attention=2)
        >>> work = Work(tokens=3, predictions=2, pairs=6)
        >>> cost.forward(work), cost.training(work)
        (92, 276)
    """

    body: int
    """``N``: weights without embeddings and head"""
    trained_body: int
    head: int
    """``M``"""
    trained_head: int
    attention: int
    """``4 L H h``"""

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelCost | None:
        """None where the configuration does not tell: no attention sizes, or experts of which each token sees a few."""
        from torch import nn

        sizes = _attention_sizes(model)
        if sizes is None:
            return None
        embeddings = {id(one) for module in model.modules() if isinstance(module, nn.Embedding)
                      for one in module.parameters()}  # fmt: skip
        head: nn.Module | None = model.get_output_embeddings()
        in_head = {} if head is None else {id(one): one for one in head.parameters()}
        own_head = sum(one.numel() for key, one in in_head.items() if key not in embeddings)
        trained_body = sum(
            one.numel()
            for one in model.parameters()
            if one.requires_grad and id(one) not in embeddings and id(one) not in in_head
        )
        # It knows how many weights a packed (quantized) tensor stands for.
        body = model.num_parameters(exclude_embeddings=True) - own_head
        return cls(
            body=body,
            trained_body=trained_body,
            head=sum(one.numel() for one in in_head.values()),
            trained_head=sum(one.numel() for one in in_head.values() if one.requires_grad),
            attention=4 * math.prod(sizes),
        )

    def forward(self, work: Work) -> int:
        """Operations of a forward."""
        return 2 * self.body * work.tokens + 2 * self.head * work.predictions + self.attention * work.pairs

    def training(self, work: Work) -> int:
        """Operations of a forward and a backward."""
        gradients = 2 * self.trained_body * work.tokens + 2 * self.trained_head * work.predictions
        return 2 * self.forward(work) + gradients + self.attention * work.pairs


def _attention_sizes(model: PreTrainedModel) -> tuple[int, int, int] | None:
    """Layers, heads and the size of one; None where the configuration does not tell, or tells of experts."""
    from envgrad.sampling.limits import text_config

    config = text_config(model)
    # Configurations are open sets of attributes.
    if any(getattr(config, name, None) for name in ("num_experts_per_tok", "num_local_experts")):
        return None
    layers, heads, width, head_size = (
        getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size", "head_dim")
    )
    if not (isinstance(layers, int) and isinstance(heads, int) and heads):
        return None
    if isinstance(head_size, int):
        return layers, heads, head_size
    return (layers, heads, width // heads) if isinstance(width, int) else None


_LARGEST = 4096
_LONG_ENOUGH = 5e-3


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a large matrix product on ``device``, on the threads that torch has now.

    Measured on the first call, in about a tenth of a second, and remembered for the process.

    Example:
        >>> import torch
        >>> matmul_rate(torch.device("cpu"), torch.float32) > 1e6
        True
    """
    import torch

    return _measured_rate(device, dtype, torch.get_num_threads())


@functools.cache
def _measured_rate(device: torch.device, dtype: torch.dtype, threads: int) -> float:
    """The best of a few, at the smallest size that takes a few milliseconds."""
    import torch

    size = 128
    seconds = 0.0
    while seconds < _LONG_ENOUGH and size < _LARGEST:
        size *= 2
        # No random numbers: the run's own must not depend on a measurement.
        factor = torch.linspace(-1.0, 1.0, size * size, device=device).reshape(size, size).to(dtype)
        _time(factor, 1)
        seconds = _time(factor, 1)
    count = max(1, math.ceil(2 * _LONG_ENOUGH / seconds))
    best = min(_time(factor, count) for _ in range(3))
    return 2.0 * size**3 / best


def _time(factor: torch.Tensor, count: int) -> float:
    """Seconds of one product, over ``count`` of them."""
    wait_for(factor.device)
    began = time.perf_counter()
    for _ in range(count):
        factor @ factor
    wait_for(factor.device)
    return (time.perf_counter() - began) / count


def wait_for(device: torch.device) -> None:
    """Return when all that was queued on ``device`` is done; a CPU queues nothing."""
    if device.type != "cpu":
        import torch

        torch.accelerator.synchronize(device)
