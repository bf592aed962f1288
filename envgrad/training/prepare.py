"""Passes without gradient before a round's first update: the reference's log-probs, and old ones where they are due.

Consumes a round's samples and packed batches; produces the same with what a loss or a credit reads of other policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from envgrad.algorithms.base import EpisodeKey, ReferenceLogprobs
from envgrad.algorithms.grpo import training_sample
from envgrad.logprobs import policy_logprobs
from envgrad.losses import importance_correction
from envgrad.packing import Batch, MicroBatch, PackMode, pack
from envgrad.training.model import Reference
from envgrad.types import Group

if TYPE_CHECKING:
    from envgrad.training.trainer import RolloutTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """The no-grad passes of one trainer."""

    trainer: RolloutTrainer
    reference: Reference | None
    recompute_old: bool
    """the sampler's log-probs are not exact: active dropout, autocast, half precision"""

    def batch(self, batch: Batch) -> Batch:
        """What a round's samples need from forwards without gradient, before the round's first update."""
        if self.reference is None and not self.recompute_old:
            return batch
        device = self.trainer.args.device
        return replace(
            batch, micro_batches=tuple(self._micro_batch(packed.to(device)) for packed in batch.micro_batches)
        )

    @torch.no_grad()
    def _micro_batch(self, packed: MicroBatch) -> MicroBatch:
        trainer = self.trainer
        temperature = trainer.user_args.temperature
        if self.reference is not None:
            packed = replace(packed, ref_logprobs=self._of_reference(self.reference, packed))
        if self.recompute_old:
            model: nn.Module = trainer.model_wrapped
            model.eval()
            with trainer.compute_loss_context_manager():
                outputs = policy_logprobs(model, packed, temperature=temperature, entropy="none")
            packed = replace(
                packed,
                old_logprobs=outputs.logprobs,
                importance=importance_correction(
                    outputs.logprobs, packed.sampler_logprobs, packed.sample_index, packed.num_samples,
                    mode="token_truncate", clip_max=trainer.user_args.sampler_ratio_cap,
                ),
            )  # fmt: skip
        return packed

    def _of_reference(self, reference: Reference, packed: MicroBatch) -> torch.Tensor:
        """``(N,)`` the reference's log-probs of ``packed``'s trained tokens."""
        with reference.active() as model, self.trainer.accelerator.autocast():
            temperature = self.trainer.user_args.temperature
            return policy_logprobs(model, packed, temperature=temperature, entropy="none").logprobs

    @torch.no_grad()
    def reference_logprobs(self, groups: Sequence[Group], mode: PackMode, max_tokens: int | None) -> ReferenceLogprobs:
        """The reference's log-probs of every episode of ``groups``, for a credit that reads them."""
        if self.reference is None:
            raise AssertionError("an algorithm whose credit reads the reference needs one")
        episodes = [episode for group in groups for episode in group.episodes if any(episode.mask)]
        samples = [training_sample(episode, 0.0) for episode in episodes]
        batch = pack(samples, [1.0] * len(samples), max_tokens=max_tokens, mode=mode)
        found: dict[EpisodeKey, tuple[float, ...]] = {}
        for packed in batch.micro_batches:
            moved = packed.to(self.trainer.args.device)
            logprobs, owner = self._of_reference(self.reference, moved).cpu(), packed.sample_index
            for number, index in enumerate(packed.samples):
                episode = episodes[index]
                found[episode.task.key, episode.sibling] = tuple(logprobs[owner == number].tolist())
        return found
