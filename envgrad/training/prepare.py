"""Passes without gradient before a round's first update: the reference's log-probs, and old ones where they are due.

Consumes a round's samples and packed batches; produces the same with what a loss or a credit reads of other policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from envgrad.algorithms.base import EpisodeKey, ReferenceLogprobs
from envgrad.algorithms.credit import training_samples
from envgrad.config.sampler_ratio import SamplerRatioFields
from envgrad.distributed.dealing import share_of, shares_of
from envgrad.distributed.gathering import gather_tensors
from envgrad.logprobs import PolicyOutputs, policy_logprobs
from envgrad.losses import entropy_threshold, importance_correction
from envgrad.packing import Batch, MicroBatch, PackMode, pack
from envgrad.training.flops import wait_for
from envgrad.training.inputs import UserInputs
from envgrad.training.model import Reference, has_dropout, is_half_precision
from envgrad.types import Group

if TYPE_CHECKING:
    from envgrad.training.trainer import RolloutTrainer


_PASSED = ("old_logprobs", "ref_logprobs", "importance")
"""what a pass fills in of a micro-batch"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """The no-grad passes of one trainer."""

    trainer: RolloutTrainer
    reference: Reference | None
    recompute_old: bool
    """the sampler's log-probs are not those of training: active dropout, autocast, half precision"""

    @classmethod
    def of(cls, trainer: RolloutTrainer, model: nn.Module, inputs: UserInputs) -> Preparation:
        """What a trainer needs; made behind ``Trainer``'s own construction, which puts the model on its device."""
        algorithm, args = trainer.algorithm, trainer.args
        inexact = args.bf16 or args.fp16 or is_half_precision(model)
        asked = inputs.rollout_func is not None or trainer.user_args.recompute_old_logprobs
        needs_reference = algorithm.needs_reference or algorithm.credit_reads_reference
        return cls(
            trainer=trainer,
            reference=Reference(model) if needs_reference else None,
            recompute_old=has_dropout(model) or inexact or asked,
        )

    @property
    def recomputes(self) -> bool:
        """Whether old log-probs are computed here: because of the trainer, or because of its sampler."""
        return self.recompute_old or not self.trainer.rollouts.exact_logprobs

    def batch(self, batch: Batch) -> Batch:
        """What a round's samples need from forwards without gradient, before the round's first update."""
        algorithm = self.trainer.algorithm
        selects = algorithm.top_entropy_quantile < 1
        if not (algorithm.needs_reference or self.recomputes or selects):
            return batch
        device = self.trainer.args.device
        passed = self._of_all(batch, [self._micro_batch(packed.to(device)) for packed in self._own(batch)])
        micro_batches = [packed for packed, _ in passed]
        if selects:
            entropies = [entropy for _, entropy in passed if entropy is not None]
            micro_batches = select_top_entropy(micro_batches, entropies, algorithm.top_entropy_quantile)
        wait_for(device)  # so that its time is its own, not the next phase's
        return replace(batch, micro_batches=tuple(micro_batches))

    def _own(self, batch: Batch) -> Sequence[MicroBatch]:
        """What this process passes: with padding, so that all make as many forwards."""
        ranks = self.trainer.ranks
        return share_of(batch, ranks.rank, ranks.size).micro_batches

    def _of_all(
        self, batch: Batch, passed: Sequence[tuple[MicroBatch, torch.Tensor | None]]
    ) -> Sequence[tuple[MicroBatch, torch.Tensor | None]]:
        """What all processes have passed, in the batch's order."""
        ranks, device = self.trainer.ranks, self.trainer.args.device
        if ranks.size == 1:
            return passed
        own: dict[str, torch.Tensor] = {}
        for index, (packed, entropy) in zip(shares_of(batch, ranks.size)[ranks.rank], passed, strict=False):
            found = {name: getattr(packed, name) for name in _PASSED} | {"entropy": entropy}
            own |= {f"{index}/{name}": tensor for name, tensor in found.items() if tensor is not None}
        every = {name: tensor.to(device) for name, tensor in gather_tensors(ranks, own).items()}
        result = []
        for index, packed in enumerate(batch.micro_batches):
            filled = {name: every.get(f"{index}/{name}") for name in _PASSED}
            changes: dict[str, Any] = {name: tensor for name, tensor in filled.items() if tensor is not None}
            result.append((replace(packed.to(device), **changes), every.get(f"{index}/entropy")))
        return result

    @torch.no_grad()
    def _micro_batch(self, packed: MicroBatch) -> tuple[MicroBatch, torch.Tensor | None]:
        """With reference and old log-probs where they are due; and the entropies, if tokens are selected by them."""
        trainer = self.trainer
        if self.reference is not None and trainer.algorithm.needs_reference:
            packed = replace(packed, ref_logprobs=self._of_reference(self.reference, packed))
        selects = trainer.algorithm.top_entropy_quantile < 1
        if not (self.recomputes or selects):
            return packed, None
        model: nn.Module = trainer.model_wrapped
        if isinstance(model, DistributedDataParallel):  # gradients alone are its business
            model = model.module
        model.eval()
        with trainer.compute_loss_context_manager():
            outputs = policy_logprobs(
                model, packed, temperature=trainer.user_args.temperature, entropy="metric" if selects else "none"
            )
        if self.recomputes:
            packed = replace(packed, old_logprobs=outputs.logprobs, importance=self._importance(outputs, packed))
        return packed, outputs.entropy

    def _importance(self, outputs: PolicyOutputs, packed: MicroBatch) -> torch.Tensor | None:
        """``(N,)`` weights old / sampler, bounded as the configuration says."""
        config: SamplerRatioFields = self.trainer.user_args
        mode = config.correction_mode()
        if mode is None:
            return None
        return importance_correction(
            outputs.logprobs, packed.sampler_logprobs, packed.sample_index, packed.num_samples,
            mode=mode, clip_min=config.sampler_ratio_min, clip_max=config.sampler_ratio_cap,
        )  # fmt: skip

    def _of_reference(self, reference: Reference, packed: MicroBatch) -> torch.Tensor:
        """``(N,)`` the reference's log-probs of ``packed``'s trained tokens."""
        with reference.active() as model, self.trainer.accelerator.autocast():
            temperature = self.trainer.user_args.temperature
            return policy_logprobs(model, packed, temperature=temperature, entropy="none").logprobs

    @torch.no_grad()
    def reference_logprobs(
        self, groups: Sequence[Group], mode: PackMode, max_tokens: int | None, temperature: float | None = None
    ) -> ReferenceLogprobs:
        """The reference's log-probs of every episode of ``groups``, for a credit that reads them.

        ``temperature``: that the groups were sampled at, where it is not the run's.
        """
        if self.reference is None:
            raise AssertionError("an algorithm whose credit reads the reference needs one")
        episodes = [episode for group in groups for episode in group.episodes if episode.num_sampled_tokens]
        samples = [sample for episode in episodes for sample in training_samples(episode, 0.0)]
        batch = pack(samples, [1.0] * len(samples), max_tokens=max_tokens, mode=mode)
        passed: dict[str, torch.Tensor] = {}
        for packed in self._own(batch):
            moved = packed.to(self.trainer.args.device)
            moved = moved if temperature is None else moved.at_temperature(temperature)
            logprobs, owner = self._of_reference(self.reference, moved).cpu(), packed.sample_index
            passed |= {str(index): logprobs[owner == number] for number, index in enumerate(packed.samples)}
        every = gather_tensors(self.trainer.ranks, passed)
        rows = {int(index): tuple(logprobs.tolist()) for index, logprobs in every.items()}
        found: dict[EpisodeKey, tuple[float, ...]] = {}
        for index, sample in enumerate(samples):  # an episode's rows follow one another
            if sample.episode is None:
                raise AssertionError("a credit's samples know their episodes")
            key = sample.episode.key
            found[key] = found.get(key, ()) + rows.get(index, ())
        return found


def select_top_entropy(
    micro_batches: Sequence[MicroBatch], entropies: Sequence[torch.Tensor], share: float
) -> list[MicroBatch]:
    """Mark the ``share`` of a step's tokens with the highest entropy as ``selected``, over all its micro-batches.

    The share is of the tokens that an advantage moves; the threshold then holds for all. In trl it is a share of each
    micro-batch, with the policy of each pass; here it is of the whole optimizer step, with the policy that sampled it
    (as it was before the round's first update), so that the split changes nothing. Denominators stay those of all
    trained tokens, as in trl.

    Args:
        micro_batches: Of one optimizer step.
        entropies: ``(N,)`` of each one's trained tokens, in nats.
        share: In [0, 1); 0 leaves the highest entropy alone.
    """
    if not micro_batches:
        return []
    moved = [
        entropy[(packed.weights > 0) & (packed.advantages != 0)]
        for packed, entropy in zip(micro_batches, entropies, strict=True)
    ]
    pool = torch.cat(moved) if any(len(found) for found in moved) else torch.cat(list(entropies))
    threshold = entropy_threshold(pool, share)
    selected = [(entropy >= threshold).float() for entropy in entropies]
    total = float(sum(chosen.sum() for chosen in selected))
    return [
        replace(packed, selected=chosen, total_selected=total)
        for packed, chosen in zip(micro_batches, selected, strict=True)
    ]
