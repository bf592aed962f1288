"""Who trains which micro-batch of a step.

Every rank has packed the whole step, so denominators are those of the whole step, and every rank comes to the same deal
without asking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from envgrad.batch import Batch, MicroBatch
from envgrad.types import TrainingSample

PIECES = 2
"""micro-batches for each rank that packing aims at: more even out better, fewer keep forwards large"""


def deal(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Places of ``costs`` for each rank, in order: the largest first, each to the rank that has least.

    Example:
        >>> deal([5, 9, 4, 1], 2)
        [[1, 3], [0, 2]]
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for place in sorted(range(len(costs)), key=lambda one: (-costs[one], one)):
        rank = min(range(ranks), key=lambda one: (loads[one], one))
        shares[rank].append(place)
        loads[rank] += costs[place]
    return [sorted(share) for share in shares]


def cost(packed: MicroBatch) -> int:
    """Tokens that a micro-batch forwards, the teacher's included."""
    return packed.num_forwarded_tokens + packed.num_teacher_tokens


def shares_of(batch: Batch, ranks: int) -> list[list[int]]:
    """Indices of ``batch``'s micro-batches for each rank."""
    return deal([cost(packed) for packed in batch.micro_batches], ranks)


def share_of(batch: Batch, rank: int, ranks: int) -> Batch:
    """What ``rank`` trains of the whole step: as many micro-batches as every other rank, with padding if need be.

    Example:
        >>> from envgrad.batch import StepTotals, padding_micro_batch
        >>> whole = Batch(micro_batches=(padding_micro_batch(),) * 3, samples=(), num_required_tokens=3,
        ...     totals=StepTotals(num_samples=3, num_tokens=3))
        >>> [len(share_of(whole, rank, 2)) for rank in range(2)]
        [2, 2]
    """
    if ranks == 1:
        return batch
    shares = shares_of(batch, ranks)
    own = replace(batch, micro_batches=tuple(batch.micro_batches[index] for index in shares[rank]))
    return own.padded_to(max(map(len, shares)))


def imbalance(batch: Batch, ranks: int) -> float:
    """What the rank with most tokens has, by what it would have if all had the same; 1 is even."""
    costs = [cost(packed) for packed in batch.micro_batches]
    total = sum(costs)
    if not total:
        return 1.0
    return max(sum(costs[index] for index in share) for share in shares_of(batch, ranks)) * ranks / total


def limit_for(samples: Sequence[TrainingSample], ranks: int, max_tokens: int | None) -> int:
    """Tokens of a micro-batch, so that there are about ``PIECES`` of them for each rank; at most ``max_tokens``.

    Counts a prompt that samples of a group share once. A sample that is longer is a micro-batch of its own.

    Example:
        >>> sample = TrainingSample(token_ids=(5, 6, 7), mask=(0, 1, 1), logprobs=(0.0,) * 3, versions=(0,) * 3,
        ...     advantages=(0.0, 1.0, 1.0), prompt_length=1, group="train/0")
        >>> limit_for([sample] * 8, 2, None)
        5
    """
    prompts = {(sample.group, sample.token_ids[: sample.prompt_length]) for sample in samples}
    tokens = sum(len(prompt) for _, prompt in prompts)
    tokens += sum(len(sample.token_ids) - sample.prompt_length for sample in samples)
    limit = max(1, -(-tokens // (ranks * PIECES)))
    return limit if max_tokens is None else min(limit, max_tokens)
