from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from envgrad.algorithms.base import Algorithm
from envgrad.algorithms.grpo import GRPO
from envgrad.attention import use_envgrad_attention
from envgrad.errors import ConfigurationError
from envgrad.logprobs import PolicyOutputs, install_policy_forward, policy_logprobs
from envgrad.losses import LossInputs, LossType, merge_metrics
from envgrad.packing import pack, padding_micro_batch
from envgrad.types import Episode, Group, StopReason, Task, TrainingSample

ALGORITHM: Algorithm = GRPO()


def episode(task: Task, sibling: int, reward: float | None, own: int = 3) -> Episode:
    ids = torch.randint(0, 40, (own,), generator=torch.Generator().manual_seed(10 * task.position + sibling)).tolist()
    mask = tuple(0 if i == 1 and own > 2 else 1 for i in range(own))
    size = 4 + own
    return Episode(
        task=task, sibling=sibling, token_ids=(1, 2, 3, 4 + task.position, *ids), mask=(0,) * 4 + mask,
        logprobs=tuple(-1.0 - 0.1 * i for i in range(size)), versions=(0,) * size, prompt_length=4, messages=(),
        turns=(), stop_reason=StopReason.MAX_TURNS if own == 5 else StopReason.ANSWER, reward=reward,
    )  # fmt: skip


def group(position: int, rewards: list[float | None], lengths: tuple[int, ...] = (3, 5, 1, 9)) -> Group:
    task = Task(position=position, split="train", environment="e", group_id=position, seed=position)
    episodes = (
        episode(task, sibling, reward, own)
        for sibling, (reward, own) in enumerate(zip(rewards, lengths, strict=False))
    )  # fmt: skip
    return Group(task=task, episodes=tuple(episodes))


def tiny() -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    )
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    use_envgrad_attention(model)
    install_policy_forward(model)
    return model


# Credit


def test_credit_is_the_group_advantage_on_sampled_tokens() -> None:
    samples = GRPO().credit([group(0, [1.0, 0.0, None, math.nan]), group(1, [2.0, 2.0, 2.0])])
    advantage = 0.5 / (math.sqrt(0.5) + 1e-4)  # the unbiased deviation of 1 and 0 is sqrt(1 / 2)
    assert len(samples) == 5  # unscorable episodes are not trained
    assert samples[0].advantages == pytest.approx((0, 0, 0, 0, advantage, 0, advantage))
    assert samples[1].advantages == pytest.approx((0, 0, 0, 0, -advantage, 0, *(-advantage,) * 3))
    assert all(not any(sample.advantages) for sample in samples[2:])
    assert [sample.truncated for sample in samples] == [False, True, False, True, False]
    assert [sample.group for sample in samples] == ["train/0"] * 2 + ["train/1"] * 3
    first = samples[0].episode
    assert first is not None and samples[0].token_ids == first.token_ids and samples[0].logprobs == first.logprobs
    unscaled = GRPO(scale_rewards="none").credit([group(0, [1.0, 0.0])])
    assert unscaled[0].advantages[4] == 0.5


def test_a_step_without_anything_to_learn_forwards_nothing() -> None:
    def forwards(algorithm: GRPO, groups: list[Group]) -> bool:
        samples = algorithm.credit(groups)
        skip = algorithm.skips_zero_advantages
        return len(pack(samples, algorithm.weights(samples), skip_zero_advantages=skip)) > 0

    flat, mixed = [group(0, [1.0, 1.0])], [group(0, [0.0, 1.0])]
    assert not forwards(GRPO(), flat) and not forwards(GRPO(), [])
    assert forwards(GRPO(), mixed)
    assert forwards(GRPO(beta=0.1), flat) and forwards(GRPO(entropy_coef=0.1), flat)
    only_truncated = [group(0, [0.0, 1.0], (5, 5))]
    assert not forwards(GRPO(mask_truncated_completions=True, beta=0.1), only_truncated)
    assert not forwards(GRPO(beta=0.1), [])


def test_needs() -> None:
    assert not GRPO().needs_reference and GRPO().entropy == "metric"
    assert GRPO(beta=0.1).needs_reference and GRPO(entropy_coef=0.1).entropy == "grad"


# Loss. Two samples with 3 and 1 trained tokens; ratios 1.5, 1, 0.5 and 1.5, advantages 1 and -1.
# Clipped at [0.8, 1.2]: l = -1.2, -1, -0.5 and 1.5.


def inputs(weights: list[float], **more: torch.Tensor | float) -> LossInputs:
    old = torch.tensor([-1.0, -2.0, -3.0, -1.0])
    values = {
        "logprobs": (old + torch.tensor([1.5, 1.0, 0.5, 1.5]).log()).requires_grad_(),
        "old_logprobs": old,
        "sampler_logprobs": old,
        "advantages": torch.tensor([1.0, 1.0, 1.0, -1.0]),
        "weights": torch.tensor(weights),
        "sample_index": torch.tensor([0, 0, 0, 1]),
        "num_samples": 2,
        "total_tokens": 4.0,
    }
    return LossInputs(**{**values, **more})  # type: ignore[arg-type]


def rows() -> list[TrainingSample]:
    common = {"prompt_length": 1, "group": "g"}
    return [
        TrainingSample(token_ids=(1,) * n, mask=(0,) + (1,) * (n - 1), logprobs=(0.0,) * n, versions=(0,) * n,
                       advantages=(0.0,) * n, **common)
        for n in (4, 2)
    ]  # fmt: skip


def computed(algorithm: GRPO, **more: torch.Tensor | float) -> float:
    first, second = algorithm.weights(rows())
    return algorithm.loss(inputs([first] * 3 + [second], **more)).loss.item()


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (GRPO(loss_type="grpo"), (-2.7 / 3 + 1.5) / 2),
        (GRPO(loss_type="bnpo"), -1.2 / 4),
        (GRPO(loss_type="dapo"), -1.2 / 4),
        (GRPO(loss_type="dr_grpo", max_completion_length=8), -1.2 / 16),
        (GRPO(epsilon_high=0.6), (-1.5 - 1 - 0.5 + 1.5) / 4),
        (GRPO(delta=1.3), (-1.2 - 1 - 0.5 + 1.3) / 4),
        # -r * A * logp, r bounded by 1.25
        (
            GRPO(loss_type="cispo", epsilon_high=1.25),
            -(1.25 * (math.log(1.5) - 1) + 1 * -2 + 0.5 * (math.log(0.5) - 3) - 1.25 * (math.log(1.5) - 1)) / 4,
        ),
        # GSPO: ratio (1.5 * 1 * 0.5) ** (1 / 3) = 0.9086 on three tokens
        (GRPO(importance_sampling_level="sequence"), (-3 * 0.75 ** (1 / 3) + 1.5) / 4),
        (GRPO(importance_sampling_level="sequence", loss_type="grpo"), (-(0.75 ** (1 / 3)) + 1.5) / 2),
    ],
)
def test_losses_by_hand(algorithm: GRPO, expected: float) -> None:
    assert computed(algorithm) == pytest.approx(expected, rel=1e-5)


def test_kl_and_importance_and_entropy_by_hand() -> None:
    base, old = -1.2 / 4, torch.tensor([-1.0, -2.0, -3.0, -1.0])
    current = old + torch.tensor([1.5, 1.0, 0.5, 1.5]).log()
    ref = current + math.log(2.0)
    kl = 2 - math.log(2.0) - 1
    plain = GRPO(beta=0.1, use_bias_correction_kl=False)
    assert computed(plain, ref_logprobs=ref) == pytest.approx(base + 0.1 * kl, rel=1e-5)
    corrected = GRPO(beta=0.1)
    assert computed(corrected, ref_logprobs=ref) == pytest.approx(base + 0.1 * kl * 4.5 / 4, rel=1e-5)
    metrics = merge_metrics([corrected.loss(inputs([0.25] * 4, ref_logprobs=ref)).metrics])
    assert metrics["kl"] == pytest.approx(kl * 4.5 / 4, rel=1e-5)
    importance = torch.tensor([2.0, 1.0, 0.0, 1.0])
    # the correction is of the surrogate, not of the KL
    expected = (-2.4 - 1 + 1.5) / 4 + 0.1 * kl
    assert computed(plain, ref_logprobs=ref, importance=importance) == pytest.approx(expected, rel=1e-5)
    entropy = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert computed(GRPO(entropy_coef=0.2), entropy=entropy) == pytest.approx(base - 0.2 * 2.5, rel=1e-5)
    with pytest.raises(AssertionError, match="ref_logprobs"):
        computed(plain)


@pytest.mark.parametrize(("corrected", "slope"), [(True, -math.log(2.0)), (False, -1.0)])
def test_kl_gradient_by_hand(corrected: bool, slope: float) -> None:
    """With d = ref - logp: the ratio's own gradient turns 1 - exp(d) into -d, the reverse KL's."""
    old = torch.tensor([-1.0, -2.0, -3.0, -1.0])
    logprobs = old.clone().requires_grad_()
    given_inputs = inputs([0.25] * 4, logprobs=logprobs, advantages=torch.zeros(4), ref_logprobs=old + math.log(2.0))
    GRPO(beta=0.1, use_bias_correction_kl=corrected).loss(given_inputs).loss.backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx([0.25 * 0.1 * slope] * 4, rel=1e-5)


def test_metrics_by_hand() -> None:
    metrics = merge_metrics([GRPO().loss(inputs([0.25] * 4)).metrics])
    assert metrics["clip_ratio/high_mean"] == 0.25 and metrics["clip_ratio/low_mean"] == 0
    assert metrics["ratio/max"] == pytest.approx(1.5)
    assert metrics["sampler_mismatch"] == pytest.approx((2 * math.log(1.5) + math.log(2.0)) / 4, rel=1e-5)
    cispo = merge_metrics([GRPO(loss_type="cispo", epsilon_high=1.25).loss(inputs([0.25] * 4)).metrics])
    assert cispo["cispo_clip_ratio"] == 0.25 and "clip_ratio/low_mean" not in cispo


@pytest.mark.parametrize("loss_type", get_args(LossType))
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_step_makes_good_answers_likelier_and_bad_ones_less(loss_type, level) -> None:  # type: ignore[no-untyped-def]
    if loss_type == "vespo" and level == "sequence":
        return  # refused: see test_grpo_variants.py
    model = tiny()
    algorithm = GRPO(loss_type=loss_type, importance_sampling_level=level, max_completion_length=9)
    samples = algorithm.credit([group(0, [1.0, 0.0], (3, 6))])
    micro_batch = pack(samples, algorithm.weights(samples)).micro_batches[0]
    before = policy_logprobs(model, micro_batch).logprobs
    micro_batch = replace(micro_batch, old_logprobs=before.detach())
    algorithm.loss(LossInputs.of(micro_batch, policy_logprobs(model, micro_batch))).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 1e-2 * parameter.grad
        change = policy_logprobs(model, micro_batch).logprobs - before
    assert change[micro_batch.sample_index == 0].sum() > 0 > change[micro_batch.sample_index == 1].sum()


def step_loss(model: PreTrainedModel, algorithm: GRPO, samples: list[TrainingSample], max_tokens: int | None, pads: int
              ) -> tuple[float, dict[str, float], list[torch.Tensor]]:  # fmt: skip
    batch = pack(samples, algorithm.weights(samples), max_tokens=max_tokens, totals=algorithm.totals(samples))
    total, parts = 0.0, []
    for micro_batch in batch.padded_to(len(batch) + pads).micro_batches:
        outputs = policy_logprobs(model, micro_batch, entropy=algorithm.entropy)
        ref = 0.9 * outputs.logprobs.detach() - 0.1 if algorithm.needs_reference else None
        old = outputs.logprobs.detach() * 0.97
        result = algorithm.loss(LossInputs.of(replace(micro_batch, old_logprobs=old, ref_logprobs=ref), outputs))
        result.loss.backward()
        total += result.loss.item()
        parts.append(result.metrics)
    gradients = [p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    model.zero_grad()
    return total, merge_metrics(parts), gradients


OPTIONS = [
    GRPO(loss_type="grpo"),
    GRPO(loss_type="bnpo", beta=0.3),
    GRPO(loss_type="dapo", entropy_coef=0.2, delta=1.3),
    GRPO(loss_type="dr_grpo", max_completion_length=9, mask_truncated_completions=True),
    GRPO(loss_type="cispo", beta=0.3, entropy_coef=0.2),
    GRPO(loss_type="dapo", importance_sampling_level="sequence", mask_truncated_completions=True, beta=0.3),
    GRPO(loss_type="sapo", off_policy_mask_threshold=0.1),
    GRPO(loss_type="luspo", importance_sampling_level="sequence"),
    GRPO(loss_type="vespo", beta=0.3),
]


@pytest.mark.parametrize("algorithm", OPTIONS, ids=lambda algorithm: algorithm.loss_type)
def test_loss_gradient_and_metrics_do_not_depend_on_the_split(algorithm: GRPO) -> None:
    model = tiny()
    samples = algorithm.credit([group(0, [1.0, 0.0, 3.0, 1.0]), group(1, [0.0, 0.0, 1.0]), group(2, [1.0, None, 0.5])])
    loss, metrics, gradients = step_loss(model, algorithm, samples, None, 0)
    assert loss != 0 and max(gradient.abs().max().item() for gradient in gradients) > 1e-3
    for max_tokens, pads in ((1, 0), (12, 2), (64, 1)):
        other, other_metrics, other_gradients = step_loss(model, algorithm, samples, max_tokens, pads)
        assert other == pytest.approx(loss, rel=1e-6, abs=1e-6)
        assert other_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)
        for a, b in zip(gradients, other_gradients, strict=True):
            assert torch.allclose(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("algorithm", OPTIONS, ids=lambda algorithm: algorithm.loss_type)
def test_two_processes_share_denominators(algorithm: GRPO) -> None:
    model = tiny()
    samples = algorithm.credit([group(0, [1.0, 0.0, 3.0, 1.0]), group(1, [0.0, 0.0, 1.0])])
    _, _, expected = step_loss(model, algorithm, samples, None, 0)
    ranks = [samples[:2], samples[2:]]
    totals = algorithm.totals(ranks[0]) + algorithm.totals(ranks[1])
    for rank in ranks:
        for micro_batch in pack(rank, algorithm.weights(rank, totals), totals=totals).micro_batches:
            outputs = policy_logprobs(model, micro_batch, entropy=algorithm.entropy)
            ref, old = 0.9 * outputs.logprobs.detach() - 0.1, outputs.logprobs.detach() * 0.97
            algorithm.loss(
                LossInputs.of(replace(micro_batch, old_logprobs=old, ref_logprobs=ref), outputs)
            ).loss.backward()  # fmt: skip
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None and torch.allclose(parameter.grad, gradient, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("algorithm", OPTIONS, ids=lambda algorithm: algorithm.loss_type)
def test_everything_masked_is_loss_zero(algorithm: GRPO) -> None:
    algorithm = replace(algorithm, mask_truncated_completions=True)
    samples = algorithm.credit([group(0, [0.0, 1.0], (5, 5))])
    batch = pack(samples, algorithm.weights(samples), totals=algorithm.totals(samples))
    assert len(batch) == 0
    model = tiny()
    micro_batch = padding_micro_batch()
    result = algorithm.loss(LossInputs.of(micro_batch, policy_logprobs(model, micro_batch, entropy=algorithm.entropy)))
    result.loss.backward()
    assert result.loss.item() == 0 and merge_metrics([result.metrics]) == {}
    assert all(p.grad is None or (p.grad == 0).all() for p in model.parameters())


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, 0.5, None]), min_size=1, max_size=4), min_size=1, max_size=3))
def test_skipping_zero_advantages_changes_no_gradient(rewards: list[list[float | None]]) -> None:
    algorithm = GRPO(loss_type="grpo")
    samples = algorithm.credit([group(position, of_group) for position, of_group in enumerate(rewards)])
    losses = []
    for skip in (False, True):
        total = torch.zeros(())
        for micro_batch in pack(samples, algorithm.weights(samples), skip_zero_advantages=skip).micro_batches:
            logprobs = torch.sin(micro_batch.target_ids.float()) - 1.5
            total = total + algorithm.loss(LossInputs.of(micro_batch, PolicyOutputs(logprobs, None))).loss
        losses.append(total.item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "ppo"}, "loss_type='ppo' must be one of grpo"),
        ({"scale_rewards": "all"}, "scale_rewards='all' must be one of group, batch, none"),
        ({"importance_sampling_level": "turn"}, "importance_sampling_level='turn' must be one of token, sequence"),
        ({"epsilon": 1.0}, r"epsilon=1.0 must be in \[0, 1\)"),
        ({"epsilon_high": -0.1}, "epsilon_high=-0.1 must be at least 0"),
        ({"loss_type": "cispo", "epsilon_high": 0.28}, "epsilon_high=0.28 must be at least 1 for loss_type='cispo'"),
        ({"loss_type": "cispo", "delta": 9.0}, "delta=9.0 has no place in loss_type='cispo'"),
        ({"delta": 1.1}, "delta=1.1 must be above 1 \\+ epsilon_high = 1.2"),
        ({"beta": -1.0}, "beta=-1.0 must be at least 0"),
        ({"loss_type": "dr_grpo"}, "max_completion_length=None must be at least 1"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        GRPO(**options)  # type: ignore[arg-type]


def test_cispo_default_bound_leaves_an_unchanged_policy_alone() -> None:
    assert GRPO(loss_type="cispo").upper == 5.0 and GRPO().upper == 0.2 and GRPO(epsilon_high=0.28).upper == 0.28
