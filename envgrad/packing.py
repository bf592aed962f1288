"""Samples -> ``Batch``: micro-batches of one flat token row each, a group's common prompt in it once.

A group with prompt ``p0 p1`` and two siblings, ``a0 a1 s0 b0`` and ``c0 c1``, of which all but ``s0`` is trained::

    input_ids      p0  p1 | a0  a1  s0 | c0       own tokens of each sibling, siblings of one length bucket side by side
    position_ids    0   1 |  2   3   4 |  2       the last trained token predicts nothing, so it is not forwarded
    predicts       -  a0,c0 | a1  -  b0 | c1      the prompt's last token predicts the first token of every sibling

Each sibling attends to the prompt and to itself. What is learned does not depend on how samples are packed: loss
weights are decided for the whole optimizer step before anything is packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from envgrad.errors import ConfigurationError
from envgrad.layout import PackedLayout
from envgrad.types import TrainingSample

PackMode: TypeAlias = Literal["shared", "packed", "single"]
"""``shared``: a group's prompt once per micro-batch; ``packed``: whole rows side by side; ``single``: one plain row per
forward, for models whose attention cannot be expressed by a layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTotals:
    """Counts over one whole optimizer step: all micro-batches, all processes. The loss weights' denominators.

    Example:
        >>> StepTotals(num_samples=2, num_tokens=10) + StepTotals(num_samples=1, num_tokens=5)
        StepTotals(num_samples=3, num_tokens=15)
    """

    num_samples: float
    num_tokens: float
    """trained tokens"""

    def __add__(self, other: StepTotals) -> StepTotals:
        return StepTotals(
            num_samples=self.num_samples + other.num_samples, num_tokens=self.num_tokens + other.num_tokens
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward and backward: a flat row of T tokens of which N positions predict a trained token.

    Made by ``pack``; ``dataclasses.replace`` fills in what a no-grad pass computes (old and reference log-probs).
    """

    input_ids: Tensor
    """``(1, T)`` int64"""
    position_ids: Tensor
    """``(1, T)`` int64"""
    layout: PackedLayout | None
    """None for a plain row"""
    predict_index: Tensor
    """``(N,)`` index into T of the token whose hidden state predicts the n-th trained token"""
    target_ids: Tensor
    """``(N,)`` the trained tokens"""
    sampler_logprobs: Tensor
    """``(N,)`` the log-probs they were sampled with"""
    old_logprobs: Tensor
    """``(N,)`` denominators of the importance ratio: the sampler's, unless they were recomputed"""
    advantages: Tensor
    """``(N,)``"""
    weights: Tensor
    """``(N,)`` loss weights, decided for the whole step"""
    sample_index: Tensor
    """``(N,)`` int64, which of this micro-batch's samples the token belongs to: 0 .. num_samples - 1"""
    num_samples: int
    samples: tuple[int, ...]
    """this micro-batch's samples, as indices into ``Batch.samples``"""
    total_tokens: float
    """trained tokens in the whole step"""
    ref_logprobs: Tensor | None = None
    """``(N,)`` the reference model's, if there is one"""
    importance: Tensor | None = None
    """``(N,)`` weight old / sampler where the old log-probs were recomputed (``losses.importance_correction``)"""

    @property
    def num_forwarded_tokens(self) -> int:
        return self.input_ids.shape[1]

    @property
    def num_trained_tokens(self) -> int:
        return self.target_ids.shape[0] if self.samples else 0

    def to(self, device: torch.device | str) -> MicroBatch:
        def move(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(device)

        return replace(
            self,
            input_ids=self.input_ids.to(device),
            position_ids=self.position_ids.to(device),
            layout=None if self.layout is None else self.layout.to(device),
            predict_index=self.predict_index.to(device),
            target_ids=self.target_ids.to(device),
            sampler_logprobs=self.sampler_logprobs.to(device),
            old_logprobs=self.old_logprobs.to(device),
            advantages=self.advantages.to(device),
            weights=self.weights.to(device),
            sample_index=self.sample_index.to(device),
            ref_logprobs=move(self.ref_logprobs),
            importance=move(self.importance),
        )


def padding_micro_batch() -> MicroBatch:
    """One token of weight 0: a forward and backward that change nothing, to even out counts over processes.

    Example:
        >>> padding_micro_batch().weights.tolist()
        [0.0]
    """
    index = torch.zeros(1, dtype=torch.int64)
    zero = torch.zeros(1)
    return MicroBatch(
        input_ids=index[None], position_ids=index[None], layout=None, predict_index=index, target_ids=index,
        sampler_logprobs=zero, old_logprobs=zero, advantages=zero, weights=zero, sample_index=index, num_samples=1,
        samples=(), total_tokens=inf, ref_logprobs=zero, importance=zero,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """All micro-batches of one optimizer step on this process."""

    micro_batches: tuple[MicroBatch, ...]
    samples: tuple[TrainingSample, ...]
    totals: StepTotals
    num_required_tokens: int
    """tokens that must be forwarded if every common prompt is forwarded once"""

    def __len__(self) -> int:
        return len(self.micro_batches)

    @property
    def num_samples(self) -> int:
        return len(self.samples)

    @property
    def num_tokens(self) -> int:
        """Trained tokens."""
        return sum(micro_batch.num_trained_tokens for micro_batch in self.micro_batches)

    @property
    def num_forwarded_tokens(self) -> int:
        return sum(micro_batch.num_forwarded_tokens for micro_batch in self.micro_batches)

    def padded_to(self, count: int) -> Batch:
        """With ``padding_micro_batch`` appended up to ``count``: processes must agree on it under FSDP and ZeRO-3."""
        missing = max(0, count - len(self))
        return replace(self, micro_batches=self.micro_batches + (padding_micro_batch(),) * missing)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """A sample that is forwarded, with what packing needs to know of it."""

    index: int
    """in ``Batch.samples``"""
    sample: TrainingSample
    weight: float
    family: tuple[str, tuple[int, ...]] | int
    """equal for samples that share their prompt's forward"""
    needed: int
    """tokens of its row that are forwarded: all before its last trained token"""

    @property
    def own(self) -> int:
        return self.needed - self.sample.prompt_length


def pack(
    samples: Sequence[TrainingSample],
    weights: Sequence[float],
    *,
    max_tokens: int | None = None,
    mode: PackMode = "shared",
    totals: StepTotals | None = None,
    skip_zero_advantages: bool = False,
) -> Batch:
    """Pack a step's samples into micro-batches of at most ``max_tokens`` forwarded tokens.

    How they are packed never changes what is learned. Groups stay together where they fit (a common prompt counts
    once), a larger group is cut between siblings, and a sample longer than the budget is a micro-batch of its own. The
    order is deterministic.

    Args:
        samples: The step's samples on this process.
        weights: One loss weight per sample, put on each of its trained tokens (``losses.sample_weights``). A sample of
            weight 0, or without trained tokens, is not forwarded.
        max_tokens: Tokens per forward; None for one micro-batch. Not read in mode ``single``.
        mode: ``PackMode``.
        totals: Counts over the whole step and all processes; these samples' own if None.
        skip_zero_advantages: Also leave out samples whose advantages are all 0: exact if the loss has no KL and no
            entropy term; metrics then cover the other samples only.

    Raises:
        ConfigurationError: ``max_tokens`` below 1, an unknown mode, or weights that do not fit the samples.

    Example:
        >>> siblings = [
        ...     TrainingSample(token_ids=(5, 6, 7, token), mask=(0, 0, 1, 1), logprobs=(0.0,) * 4, versions=(0,) * 4,
        ...         advantages=(0.0, 0.0, 1.0, 1.0), prompt_length=2, group="train/0")
        ...     for token in (8, 9)]
        >>> batch = pack(siblings, [0.25, 0.25])
        >>> batch.micro_batches[0].input_ids.tolist(), batch.num_tokens
        ([[5, 6, 7, 7]], 4)
    """
    _check(samples, weights, max_tokens, mode)
    items = [
        _item(index, sample, weight, mode)
        for index, (sample, weight) in enumerate(zip(samples, weights, strict=True))
        if weight and any(sample.mask) and not (skip_zero_advantages and not any(sample.advantages))
    ]
    if totals is None:
        tokens = sum(item.sample.num_trained_tokens for item in items)
        totals = StepTotals(num_samples=len(samples), num_tokens=tokens)
    bins = [[item] for item in items] if mode == "single" else _bins(items, max_tokens)
    return Batch(
        micro_batches=tuple(_micro_batch(members, totals, plain=mode == "single") for members in bins),
        samples=tuple(samples),
        totals=totals,
        num_required_tokens=_cost(items),
    )


def _check(samples: Sequence[TrainingSample], weights: Sequence[float], max_tokens: int | None, mode: PackMode) -> None:
    if max_tokens is not None and max_tokens < 1:
        raise ConfigurationError(f"max_tokens={max_tokens} must be at least 1; None packs a step into one micro-batch")
    if mode not in get_args(PackMode):
        raise ConfigurationError(f"mode={mode!r} must be one of {get_args(PackMode)}")
    if len(weights) != len(samples):
        raise ConfigurationError(
            f"{len(weights)} weights for {len(samples)} samples: give one weight per sample, as sample_weights does"
        )
    for index, weight in enumerate(weights):
        if not (isfinite(weight) and weight >= 0):
            raise ConfigurationError(f"the weight of sample {index} is {weight}; weights must be finite and at least 0")


def _item(index: int, sample: TrainingSample, weight: float, mode: PackMode) -> _Item:
    last_trained = len(sample.mask) - 1 - sample.mask[::-1].index(1)
    family = (sample.group, sample.token_ids[: sample.prompt_length]) if mode == "shared" else index
    return _Item(index=index, sample=sample, weight=weight, family=family, needed=last_trained)


def _families(items: Sequence[_Item]) -> list[list[_Item]]:
    """Items that share a prompt together, in order of their first."""
    families: dict[object, list[_Item]] = {}
    for item in items:
        families.setdefault(item.family, []).append(item)
    return list(families.values())


def _cost(items: Sequence[_Item]) -> int:
    """Tokens that ``items`` forward in one micro-batch."""
    return sum(
        family[0].sample.prompt_length + sum(item.own for item in family) for family in _families(items)
    )  # fmt: skip


def _bins(items: Sequence[_Item], max_tokens: int | None) -> list[list[_Item]]:
    """First fit, largest first, of whole families and of the parts of families that are larger than the budget."""
    if max_tokens is None:
        return [list(items)] if items else []
    pieces = [piece for family in _families(items) for piece in _cut(family, max_tokens)]
    bins: list[list[_Item]] = []
    room: list[int] = []
    for piece in sorted(pieces, key=lambda piece: (-_cost(piece), piece[0].index)):
        cost = _cost(piece)
        fitting = next((place for place, left in enumerate(room) if left >= cost), None)
        if fitting is None:
            bins.append(list(piece))
            room.append(max_tokens - cost)
        else:
            bins[fitting].extend(piece)
            room[fitting] -= cost
    ordered = [sorted(members, key=lambda item: item.index) for members in bins]
    return sorted(ordered, key=lambda members: members[0].index)


def _cut(family: list[_Item], max_tokens: int) -> list[list[_Item]]:
    pieces: list[list[_Item]] = []
    left = 0
    for item in family:
        if pieces and item.own <= left:
            pieces[-1].append(item)
            left -= item.own
        else:
            pieces.append([item])
            left = max_tokens - item.needed
    return pieces


class _Row:
    """The flat row of a micro-batch: what is forwarded, and where in it a sample's positions lie."""

    def __init__(self, members: Sequence[_Item]) -> None:
        self.input_ids: list[int] = []
        self.position_ids: list[int] = []
        self.families: list[tuple[int, list[int]]] = []
        """what ``PackedLayout.build`` takes"""
        self._origins: dict[int, tuple[int, int]] = {}
        """row index of position 0, as seen from a sample's prompt and from its own tokens, which lie elsewhere"""
        families = _families(members)
        for family in families:
            if len(family) > 1:
                self._add(family[0].sample.prompt_length, family)
        if alone := [family[0] for family in families if len(family) == 1]:
            self._add(0, alone)

    def _add(self, prefix: int, family: Sequence[_Item]) -> None:
        """Append a common prefix of ``prefix`` tokens and the rest of each row, longest first."""
        prefix_origin = len(self.input_ids)
        self.input_ids.extend(family[0].sample.token_ids[:prefix])
        self.position_ids.extend(range(prefix))
        by_length = sorted(family, key=lambda item: (-item.needed, item.index))
        for item in by_length:
            own_origin = len(self.input_ids) - prefix
            self._origins[item.index] = (prefix_origin if prefix else own_origin, own_origin)
            self.input_ids.extend(item.sample.token_ids[prefix : item.needed])
            self.position_ids.extend(range(prefix, item.needed))
        self.families.append((prefix, [item.needed - prefix for item in by_length]))

    def predicting(self, item: _Item, position: int) -> int:
        """Row index of the token before ``position`` of ``item``'s sample."""
        in_prompt, in_own = self._origins[item.index]
        return (in_own if position > item.sample.prompt_length else in_prompt) + position - 1


def _micro_batch(members: Sequence[_Item], totals: StepTotals, *, plain: bool) -> MicroBatch:
    row = _Row(members)
    trained = [
        (number, item, position)
        for number, item in enumerate(members)
        for position in range(item.sample.prompt_length, item.needed + 1)
        if item.sample.mask[position]
    ]
    logprobs = torch.tensor([item.sample.logprobs[at] for _, item, at in trained], dtype=torch.float32)
    return MicroBatch(
        input_ids=torch.tensor([row.input_ids]),
        position_ids=torch.tensor([row.position_ids]),
        layout=None if plain else PackedLayout.build(row.families),
        predict_index=torch.tensor([row.predicting(item, at) for _, item, at in trained]),
        target_ids=torch.tensor([item.sample.token_ids[at] for _, item, at in trained]),
        sampler_logprobs=logprobs,
        old_logprobs=logprobs,
        advantages=torch.tensor([item.sample.advantages[at] for _, item, at in trained], dtype=torch.float32),
        weights=torch.tensor([item.weight for _, item, _ in trained], dtype=torch.float32),
        sample_index=torch.tensor([number for number, _, _ in trained]),
        num_samples=len(members),
        samples=tuple(item.index for item in members),
        total_tokens=totals.num_tokens,
    )
