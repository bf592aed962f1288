"""The no-grad passes before an update, on a real trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from envgrad import GRPOTrainer
from envgrad.algorithms.rloo import RLOO
from envgrad.logprobs import policy_logprobs
from envgrad.losses import importance_correction
from envgrad.packing import MicroBatch, pack
from envgrad.training.prepare import select_top_entropy
from envgrad.types import TrainingSample
from helpers.models import Letters, config, tiny_llama, tokenizer_of


def samples_of(*advantages: float) -> list[TrainingSample]:
    """Rows of 3 trained tokens of the tiny model's vocabulary."""
    return [
        TrainingSample(
            token_ids=(11, 12, 20 + index, 30 + index, 40 + index), mask=(0, 0, 1, 1, 1), logprobs=(0, 0, -1.5, -2, -1),
            versions=(0,) * 5, advantages=(0, 0, advantage, advantage, advantage), prompt_length=2, group="train/0",
        )
        for index, advantage in enumerate(advantages)
    ]  # fmt: skip


def micro_batches(*advantages: float, max_tokens: int | None = 1) -> list[MicroBatch]:
    samples = samples_of(*advantages)
    return list(pack(samples, [0.5] * len(samples), max_tokens=max_tokens).micro_batches)


# Selection: one micro-batch for each sample


def test_the_share_is_of_the_whole_step_and_not_of_a_micro_batch() -> None:
    entropies = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])]
    # of six values the quantile 1/2 lies at place 2.5: 4, 5 and 6 are above it
    found = select_top_entropy(micro_batches(1.0, -1.0), entropies, 0.5)
    assert [packed.selected.tolist() for packed in found] == [[0, 0, 0], [1, 1, 1]]  # type: ignore[union-attr]
    assert [packed.total_selected for packed in found] == [3.0, 3.0]


def test_tokens_that_no_advantage_moves_do_not_raise_the_threshold() -> None:
    entropies = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])]
    found = select_top_entropy(micro_batches(1.0, 0.0), entropies, 0.0)
    assert [packed.selected.tolist() for packed in found] == [[0, 0, 1], [1, 1, 1]]  # type: ignore[union-attr]
    found = select_top_entropy(micro_batches(0.0, 0.0), entropies, 0.0)  # an entropy bonus alone: of all tokens
    assert [packed.selected.tolist() for packed in found] == [[0, 0, 0], [0, 0, 1]]  # type: ignore[union-attr]
    assert select_top_entropy([], [], 0.5) == []


@given(st.lists(st.floats(0, 5, width=32), min_size=12, max_size=12), st.floats(0, 0.99))
def test_selection_does_not_depend_on_the_split(values: list[float], share: float) -> None:
    flat = torch.tensor(values)
    apart = select_top_entropy(micro_batches(1.0, -1.0, 2.0, 0.5), list(flat.split(3)), share)
    together = select_top_entropy(micro_batches(1.0, -1.0, 2.0, 0.5, max_tokens=None), [flat], share)
    chosen = torch.cat([packed.selected for packed in apart if packed.selected is not None])
    assert together[0].selected is not None and torch.equal(chosen, together[0].selected)
    assert apart[0].total_selected == together[0].total_selected == float(chosen.sum()) >= 1


# On a trainer


def trainer_of(tmp_path: Path, algorithm: object = None, **changes: object) -> GRPOTrainer:
    return GRPOTrainer(
        tiny_llama(), args=config(tmp_path, **changes), environment_factory=Letters, processing_class=tokenizer_of(),
        algorithm=algorithm,
    )  # fmt: skip


def test_nothing_is_passed_where_nothing_is_due(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    batch = pack(samples_of(1.0, -1.0), [0.5, 0.5])
    assert trainer.preparation.batch(batch) is batch
    trainer.close()


def test_entropies_are_the_policys_and_old_logprobs_stay_the_samplers(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, top_entropy_quantile=0.4)
    packed = trainer.preparation.batch(pack(samples_of(1.0, -1.0), [0.5, 0.5])).micro_batches[0]
    with torch.no_grad():
        entropy = policy_logprobs(trainer.model, packed, entropy="metric").entropy
    assert packed.selected is not None and entropy is not None and packed.total_selected == 3
    # of six tokens the quantile 0.6 lies at place 3: the upper three
    assert torch.equal(packed.selected, (entropy >= entropy.sort().values[3]).float())
    assert torch.equal(packed.old_logprobs, packed.sampler_logprobs) and packed.importance is None
    trainer.close()


def test_the_reference_runs_for_the_loss_or_for_the_credit_but_not_twice(tmp_path: Path) -> None:
    batch = pack(samples_of(1.0, -1.0), [0.5, 0.5])
    with_kl = trainer_of(tmp_path, beta=0.1)
    packed = with_kl.preparation.batch(batch).micro_batches[0]
    with torch.no_grad():
        expected = policy_logprobs(with_kl.model, packed).logprobs
    assert packed.ref_logprobs is not None and torch.allclose(packed.ref_logprobs, expected, atol=1e-6)
    with_kl.close()
    in_reward = trainer_of(tmp_path, algorithm=RLOO())
    assert in_reward.preparation.reference is not None and in_reward.preparation.batch(batch) is batch
    in_reward.close()


@pytest.mark.parametrize(
    ("changes", "mode", "low", "high"),
    [
        ({}, "token_truncate", None, 3.0),
        ({"sampler_ratio_mode": "sequence_mask", "sampler_ratio_min": 0.5}, "sequence_mask", 0.5, 3.0),
        ({"sampler_ratio_mode": "token_truncate", "sampler_ratio_cap": 1.25}, "token_truncate", None, 1.25),
        ({"sampler_ratio_mode": "none"}, None, None, None),
    ],
)
def test_the_samplers_ratio_is_bounded_as_configured(tmp_path, changes, mode, low, high):  # type: ignore[no-untyped-def]
    trainer = trainer_of(tmp_path, **changes)
    preparation = replace(trainer.preparation, recompute_old=True)
    packed = preparation.batch(pack(samples_of(1.0, -1.0), [0.5, 0.5])).micro_batches[0]
    with torch.no_grad():
        old = policy_logprobs(trainer.model, packed).logprobs
    assert torch.allclose(packed.old_logprobs, old) and not torch.allclose(old, packed.sampler_logprobs)
    if mode is None:
        assert packed.importance is None
    else:
        expected = importance_correction(
            old, packed.sampler_logprobs, packed.sample_index, 2, mode=mode, clip_min=low, clip_max=high
        )
        assert packed.importance is not None and torch.allclose(packed.importance, expected)
        assert not torch.allclose(expected, torch.ones(6))
    trainer.close()
