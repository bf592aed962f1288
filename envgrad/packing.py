"""Samples -> ``Batch``: micro-batches of one flat token row each, a group's common prompt in it once.

A group with prompt ``p0 p1`` and two siblings, ``a0 a1 s0 b0`` and ``c0 c1``, of which all but ``s0`` is trained::

    input_ids      p0  p1 | a0  a1  s0 | c0       own tokens of each sibling, siblings of one length bucket side by side
    position_ids    0   1 |  2   3   4 |  2       the last trained token predicts nothing, so it is not forwarded
    predicts       -  a0,c0 | a1  -  b0 | c1      the prompt's last token predicts the first token of every sibling

Each sibling attends to the prompt and to itself. What is learned does not depend on how samples are packed: loss
weights are decided for the whole optimizer step before anything is packed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from envgrad.batch import Batch, MicroBatch, StepTotals, TeacherRows, padding_micro_batch
from envgrad.errors import ConfigurationError
from envgrad.layout import PackedLayout
from envgrad.types import TrainingSample

__all__ = ["Batch", "MicroBatch", "PackMode", "StepTotals", "TeacherRows", "pack", "padding_micro_batch"]

PackMode: TypeAlias = Literal["shared", "packed", "single"]
"""``shared``: a group's prompt once per micro-batch; ``packed``: whole rows side by side; ``single``: one plain row per
forward, for models whose attention cannot be expressed by a layout."""

TOKENS_ON_CPU = 2048
"""``preferred_tokens`` that are as quick as any more on a CPU: activations stay in its caches and the allocator reuses
their memory"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """A sample that is forwarded, with what packing needs to know of it."""

    index: int
    """in ``Batch.samples``"""
    sample: TrainingSample
    weight: float
    family: int
    """equal for samples that share their prompt's forward"""
    needed: int
    """tokens of its row that are forwarded: all before its last trained token"""
    teacher: _Item | None = None
    """the same sample behind its teacher's prompt"""

    @property
    def own(self) -> int:
        return self.needed - self.sample.prompt_length

    def teacher_cost(self, seen: Collection[int]) -> int:
        """Tokens that the teacher forwards for it, where prompts of the families ``seen`` are there already."""
        if self.teacher is None:
            return 0
        return self.teacher.own if self.teacher.family in seen else self.teacher.needed


def pack(
    samples: Sequence[TrainingSample],
    weights: Sequence[float],
    *,
    max_tokens: int | None = None,
    preferred_tokens: int | None = None,
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
        max_tokens: Tokens per forward, the teacher's included; None for one micro-batch. Not read in mode ``single``.
        preferred_tokens: Groups are gathered into one forward up to this only; a group that is larger by itself is not
            cut for it. On a CPU small forwards take less memory and no more time, and this costs no token.
        mode: ``PackMode``.
        totals: Counts over the whole step and all processes; these samples' own if None.
        skip_zero_advantages: Also leave out samples whose advantages are all 0 and that have no teacher: exact if the
            loss has no KL and no entropy term; metrics then cover the other samples only.

    Raises:
        ConfigurationError: ``max_tokens`` or ``preferred_tokens`` below 1, an unknown mode, or weights that do not fit
            the samples.

    Example:
        >>> siblings = [
        ...     TrainingSample(token_ids=(5, 6, 7, token), mask=(0, 0, 1, 1), logprobs=(0.0,) * 4, versions=(0,) * 4,
        ...         advantages=(0.0, 0.0, 1.0, 1.0), prompt_length=2, group="train/0")
        ...     for token in (8, 9)]
        >>> batch = pack(siblings, [0.25, 0.25])
        >>> batch.micro_batches[0].input_ids.tolist(), batch.num_tokens
        ([[5, 6, 7, 7]], 4)
    """
    _check(samples, weights, {"max_tokens": max_tokens, "preferred_tokens": preferred_tokens}, mode)
    families: dict[tuple[object, ...], int] = {}
    items = [
        _item(index, sample, weight, mode, families)
        for index, (sample, weight) in enumerate(zip(samples, weights, strict=True))
        if weight and any(sample.mask) and not (skip_zero_advantages and _teaches_nothing(sample))
    ]
    if totals is None:
        tokens = sum(item.sample.num_trained_tokens for item in items)
        totals = StepTotals(num_samples=sum(not sample.row for sample in samples), num_tokens=tokens)
    bins = [[item] for item in items] if mode == "single" else _bins(items, max_tokens, preferred_tokens)
    return Batch(
        micro_batches=tuple(_micro_batch(members, totals, plain=mode == "single") for members in bins),
        samples=tuple(samples),
        totals=totals,
        num_required_tokens=_cost(items),
    )


def _check(
    samples: Sequence[TrainingSample], weights: Sequence[float], limits: Mapping[str, int | None], mode: PackMode
) -> None:
    for name, limit in limits.items():
        if limit is not None and limit < 1:
            raise ConfigurationError(f"{name}={limit} must be at least 1; None packs a step into one micro-batch")
    if mode not in get_args(PackMode):
        raise ConfigurationError(f"mode={mode!r} must be one of {get_args(PackMode)}")
    if len(weights) != len(samples):
        raise ConfigurationError(
            f"{len(weights)} weights for {len(samples)} samples: give one weight per sample, as sample_weights does"
        )
    for index, weight in enumerate(weights):
        if not (isfinite(weight) and weight >= 0):
            raise ConfigurationError(f"the weight of sample {index} is {weight}; weights must be finite and at least 0")


def _teaches_nothing(sample: TrainingSample) -> bool:
    return sample.teacher_prompt is None and not any(sample.advantages)


def _item(
    index: int, sample: TrainingSample, weight: float, mode: PackMode, families: dict[tuple[object, ...], int]
) -> _Item:
    """``families`` numbers what samples share; it grows."""
    last_trained = len(sample.mask) - 1 - sample.mask[::-1].index(1)
    shared = (sample.group, sample.token_ids[: sample.prompt_length]) if mode == "shared" else (index,)
    teacher = None
    if sample.teacher_prompt is not None:
        teacher = _item(index, _for_teacher(sample, sample.teacher_prompt), weight, mode, families)
    return _Item(
        index=index,
        sample=sample,
        weight=weight,
        family=families.setdefault(shared, len(families)),
        needed=last_trained,
        teacher=teacher,
    )


def _for_teacher(sample: TrainingSample, prompt: tuple[int, ...]) -> TrainingSample:
    given, own = len(prompt), slice(sample.prompt_length, None)
    zeros = (0.0,) * given
    return replace(
        sample,
        token_ids=prompt + sample.token_ids[own],
        mask=(0,) * given + sample.mask[own],
        logprobs=zeros + sample.logprobs[own],
        versions=(-1,) * given + sample.versions[own],
        advantages=zeros + sample.advantages[own],
        prompt_length=given,
        ref_logprobs=None,
        teacher_prompt=None,
    )


def _families(items: Sequence[_Item]) -> list[list[_Item]]:
    """Items that share a prompt together, in order of their first."""
    families: dict[object, list[_Item]] = {}
    for item in items:
        families.setdefault(item.family, []).append(item)
    return list(families.values())


def _cost(items: Sequence[_Item]) -> int:
    """Tokens that ``items`` forward in one micro-batch, the teacher's included."""
    teachers = [item.teacher for item in items if item.teacher is not None]
    cost = sum(family[0].sample.prompt_length + sum(item.own for item in family) for family in _families(items))
    return cost + (_cost(teachers) if teachers else 0)


def _bins(items: Sequence[_Item], max_tokens: int | None, preferred: int | None) -> list[list[_Item]]:
    """First fit, largest first, of whole families and of the parts of families that are larger than the budget."""
    if max_tokens is None and preferred is None:
        return [list(items)] if items else []
    families = _families(items)
    pieces = families if max_tokens is None else [piece for family in families for piece in _cut(family, max_tokens)]
    size = min(limit for limit in (max_tokens, preferred) if limit is not None)
    bins: list[list[_Item]] = []
    room: list[int] = []
    for piece in sorted(pieces, key=lambda piece: (-_cost(piece), piece[0].index)):
        cost = _cost(piece)
        fitting = next((place for place, left in enumerate(room) if left >= cost), None)
        if fitting is None:
            bins.append(list(piece))
            room.append(size - cost)
        else:
            bins[fitting].extend(piece)
            room[fitting] -= cost
    ordered = [sorted(members, key=lambda item: item.index) for members in bins]
    return sorted(ordered, key=lambda members: members[0].index)


def _cut(family: list[_Item], max_tokens: int) -> list[list[_Item]]:
    pieces: list[list[_Item]] = []
    left = 0
    seen: set[int] = set()
    for item in family:
        cost = item.own + item.teacher_cost(seen)
        if pieces and cost <= left:
            pieces[-1].append(item)
            left -= cost
        else:
            pieces.append([item])
            seen.clear()
            left = max_tokens - item.needed - item.teacher_cost(seen)
        if item.teacher is not None:
            seen.add(item.teacher.family)
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
        total_samples=totals.num_samples,
        ref_logprobs=_known_reference(trained),
        teacher=_teacher_rows(trained, totals, plain=plain),
    )


def _teacher_rows(trained: Sequence[tuple[int, _Item, int]], totals: StepTotals, *, plain: bool) -> TeacherRows | None:
    """What the teacher reads of these tokens: its own prompts, the same tokens behind them, in the same order."""
    members = {item.index: item.teacher for _, item, _ in trained if item.teacher is not None}
    if not members:
        return None
    index = [place for place, (_, item, _) in enumerate(trained) if item.teacher is not None]
    rows = _micro_batch(list(members.values()), totals, plain=plain)
    return TeacherRows(rows=rows, index=torch.tensor(index))


def _known_reference(trained: Sequence[tuple[int, _Item, int]]) -> Tensor | None:
    """``(N,)`` the reference's log-probs, if the samples carry them."""
    found = [
        item.sample.ref_logprobs[at]
        for _, item, at in trained
        if item.sample.ref_logprobs is not None
    ]  # fmt: skip
    return torch.tensor(found, dtype=torch.float32) if found and len(found) == len(trained) else None
