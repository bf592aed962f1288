from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, PreTrainedModel

from envgrad.algorithms.demonstrations import Reprompting
from envgrad.algorithms.grpo import GRPO
from envgrad.algorithms.sdpo import SDPO
from envgrad.attention import use_envgrad_attention
from envgrad.divergence import Divergence, DivergenceMode
from envgrad.errors import ConfigurationError
from envgrad.logprobs import install_policy_forward, policy_logprobs
from envgrad.losses import Distillation, LossInputs, merge_metrics
from envgrad.packing import Batch, PackMode, pack, padding_micro_batch
from envgrad.training.teacher import Teacher
from envgrad.types import TrainingSample
from helpers.world import RENDERER

VOCABULARY = 40


def inputs(**changes: Any) -> LossInputs:
    """Three tokens: two of a sample with a teacher, one of a sample without, and what the teacher said."""
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    given: dict[str, Any] = {
        "logprobs": logprobs, "old_logprobs": torch.tensor([-1.0, -3.0, -0.5]),
        "sampler_logprobs": torch.tensor([-1.0, -3.0, -0.5]), "advantages": torch.tensor([1.0, 1.0, -1.0]),
        "weights": torch.tensor([1 / 3, 1 / 3, 1 / 3]), "sample_index": torch.tensor([0, 0, 1]), "num_samples": 2,
        "total_tokens": 3.0,
        "distillation": Distillation(
            divergence=torch.tensor([0.5, 0.25]), index=torch.tensor([0, 1]), weights=torch.tensor([0.25, 0.25])
        ),
    }  # fmt: skip
    return LossInputs(**(given | changes))


def test_the_loss_by_hand() -> None:
    # ratios exp(0) = 1 and exp(1) = 2.718, capped at 2; weights 1 / (2 samples * 2 tokens)
    assert SDPO().loss(inputs()).loss.item() == pytest.approx(0.25 * (1 * 0.5 + 2 * 0.25))
    free = SDPO(distillation_is_clip=None).loss(inputs())
    assert free.loss.item() == pytest.approx(0.25 * 0.75)
    wide = SDPO(distillation_is_clip=5.0).loss(inputs()).loss.item()
    assert wide == pytest.approx(0.25 * (0.5 + math.e * 0.25))
    corrected = SDPO(distillation_is_clip=None).loss(inputs(importance=torch.tensor([0.5, 1.0, 9.0])))
    assert corrected.loss.item() == pytest.approx(0.25 * (0.25 + 0.25))
    assert merge_metrics([free.metrics])["self_distillation/distillation_loss"] == pytest.approx(0.375)


def test_the_ratio_has_no_gradient() -> None:
    given = inputs()
    SDPO().loss(given).loss.backward()
    assert given.logprobs.grad is None or not given.logprobs.grad.any()


def test_the_loss_is_a_convex_combination_with_grpos() -> None:
    policy = GRPO().loss(inputs()).loss.item()
    both = SDPO(distillation_weight=0.25).loss(inputs())
    assert both.loss.item() == pytest.approx(0.75 * policy + 0.25 * 0.25)
    found = merge_metrics([both.metrics])
    assert found["self_distillation/policy_loss"] == pytest.approx(policy) and "clip_ratio/low_mean" in found
    none = SDPO(distillation_weight=0.0)
    assert none.teacher is None and none.loss(inputs(distillation=None)).loss.item() == pytest.approx(policy)


def test_without_a_teacher_in_the_micro_batch_there_is_a_zero_to_differentiate() -> None:
    given = inputs(distillation=None)
    loss = SDPO().loss(given).loss
    loss.backward()
    assert loss.item() == 0 and given.logprobs.grad is not None and not given.logprobs.grad.any()


# The whole way through a model


def tiny(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
        )
    )
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    use_envgrad_attention(model)
    install_policy_forward(model)
    return model


def row(number: int, own: int, teacher: tuple[int, ...] | None, advantage: float, truncated: bool = False) -> Any:
    draw = torch.Generator().manual_seed(number)
    ids = (1, 2, 3, 4, *torch.randint(0, VOCABULARY, (own,), generator=draw).tolist())
    mask = (0,) * 4 + tuple(0 if i == 1 and own > 2 else 1 for i in range(own))
    return TrainingSample(
        token_ids=ids, mask=mask, logprobs=tuple(-3.0 - 0.1 * i for i in range(len(ids))), versions=(0,) * len(ids),
        advantages=tuple(advantage * m for m in mask), prompt_length=4, group="train/0", teacher_prompt=teacher,
        truncated=truncated,
    )  # fmt: skip


DEMONSTRATION = (1, 2, 3, 9, 8, 7, 6, 4)
SAMPLES = [
    row(1, 5, DEMONSTRATION, 0.5),
    row(2, 1, None, -0.5),
    row(3, 9, DEMONSTRATION, 0.0),
    row(4, 3, (5, 4), 1.0),
    row(5, 4, None, 0.0),
]
HOW: list[Divergence] = [
    Divergence(),
    Divergence(mode="full_logits", alpha=0.5),
    Divergence(mode="topk_logits", topk=5, add_tail=True),
    Divergence(mode="topk_logits", topk=5, alpha=0.0),
]


def teacher_of(model: PreTrainedModel, algorithm: SDPO, temperature: float = 1.0) -> Teacher:
    plan = algorithm.teacher
    assert plan is not None
    return Teacher(plan, model, renderer=RENDERER, temperature=temperature)


def forward_backward(
    model: PreTrainedModel, algorithm: SDPO, batch: Batch, temperature: float = 1.0
) -> tuple[float, list[Tensor]]:
    teacher = teacher_of(model, algorithm, temperature)
    model.zero_grad()
    total = 0.0
    for packed in batch.micro_batches:
        signal = teacher.signal(packed)
        outputs = policy_logprobs(model, packed, temperature=temperature, entropy=algorithm.entropy, teacher=signal)
        loss = algorithm.loss(LossInputs.of(packed, outputs)).loss
        loss.backward()
        total += loss.item()
    return total, [p.grad.clone() for p in model.parameters() if p.grad is not None]


def packed(algorithm: SDPO, samples: list[TrainingSample], **options: Any) -> Batch:
    totals = algorithm.totals(samples)
    skip = algorithm.skips_zero_advantages
    return pack(samples, algorithm.weights(samples, totals), totals=totals, skip_zero_advantages=skip, **options)


def naive(model: PreTrainedModel, algorithm: SDPO, temperature: float) -> Tensor:
    """Plain forwards row by row, and the formulas of the docstrings."""
    model.set_attn_implementation("sdpa")
    how, share = algorithm.divergence, algorithm.distillation_weight
    policy_loss, distilled = torch.zeros(()), torch.zeros(())
    tokens = sum(sample.num_trained_tokens for sample in SAMPLES)

    def logs_of(ids: tuple[int, ...], prompt: int) -> Tensor:
        return (model(input_ids=torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)[prompt - 1 : -1]

    for sample in SAMPLES:
        own, mask = sample.token_ids[4:], torch.tensor(sample.mask[4:], dtype=torch.bool)
        ids = torch.tensor(own)[mask]
        student = logs_of(sample.token_ids, 4)[mask]
        chosen = student.gather(1, ids[:, None])[:, 0]
        old = torch.tensor(sample.logprobs[4:])[mask]
        ratio = (chosen - old).exp()
        advantages = torch.tensor(sample.advantages[4:])[mask]
        policy_loss = policy_loss - torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum() / tokens
        if sample.teacher_prompt is None:
            continue
        with torch.no_grad():
            teacher = logs_of(sample.teacher_prompt + own, len(sample.teacher_prompt))[mask]
        if how.reads_distributions:
            each = how.of_logs(student, teacher)
        else:
            each = (chosen - teacher.gather(1, ids[:, None])[:, 0]).detach() * chosen
        distilled = distilled + (each * ratio.detach().clamp(max=2.0)).mean() / len(SAMPLES)
    use_envgrad_attention(model)
    return (1 - share) * policy_loss + share * distilled


@pytest.mark.parametrize("how", HOW, ids=lambda how: f"{how.mode}-{how.alpha}")
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_packed_loss_and_gradient_equal_the_naive_ones(how: Divergence, share: float) -> None:
    model, temperature = tiny(), 0.8
    algorithm = SDPO(divergence=how, distillation_weight=share, teacher_model_kind="live")
    expected = naive(model, algorithm, temperature)
    expected.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    loss, found = forward_backward(model, algorithm, packed(algorithm, SAMPLES), temperature)
    assert loss == pytest.approx(expected.item(), abs=1e-5)
    scale = max(float(gradient.abs().max()) for gradient in gradients)
    for a, b in zip(found, gradients, strict=True):
        assert (a - b).abs().max() <= 2e-5 * scale


@pytest.mark.parametrize("how", HOW[:3], ids=lambda how: how.mode)
@pytest.mark.parametrize(("max_tokens", "mode"), [(1, "shared"), (40, "shared"), (None, "packed"), (None, "single")])
def test_nothing_depends_on_how_a_step_is_packed(how: Divergence, max_tokens: int | None, mode: PackMode) -> None:
    model = tiny()
    algorithm = SDPO(divergence=how, distillation_weight=0.5)
    loss, gradients = forward_backward(model, algorithm, packed(algorithm, SAMPLES))
    cut = packed(algorithm, SAMPLES, max_tokens=max_tokens, mode=mode).padded_to(12)
    other_loss, other = forward_backward(model, algorithm, cut)
    assert other_loss == pytest.approx(loss, abs=1e-6)
    for a, b in zip(other, gradients, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("mode", ["sampled_token", "full_logits", "topk_logits"])
@pytest.mark.parametrize("kind", ["live", "ema", "base"])
def test_a_teacher_that_sees_nothing_more_teaches_nothing(mode: DivergenceMode, kind: Any) -> None:
    model = tiny()
    how = Divergence(mode=mode, topk=4 if mode == "topk_logits" else None)
    algorithm = SDPO(divergence=how, teacher_model_kind=kind)
    same = [replace(sample, teacher_prompt=sample.token_ids[:4]) for sample in SAMPLES]
    loss, gradients = forward_backward(model, algorithm, packed(algorithm, same))
    assert abs(loss) < 1e-5 and max(float(gradient.abs().max()) for gradient in gradients) < 1e-4


@pytest.mark.parametrize("how", HOW[1:3], ids=lambda how: how.mode)
def test_a_model_that_changes_its_logits_behind_the_head(how: Divergence) -> None:
    torch.manual_seed(0)
    settings = Gemma2Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, final_logit_softcapping=2.0, attn_logit_softcapping=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(settings, attn_implementation="eager")
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    assert install_policy_forward(model).path == "logits"
    algorithm = SDPO(divergence=how, teacher_model_kind="live")
    (one,) = pack([SAMPLES[2]], [1.0], mode="single").micro_batches
    outputs = policy_logprobs(model, one, temperature=0.5, teacher=teacher_of(model, algorithm, 0.5).signal(one))
    rows = [SAMPLES[2].token_ids, DEMONSTRATION + SAMPLES[2].token_ids[4:]]
    mask = torch.tensor(SAMPLES[2].mask[4:], dtype=torch.bool)
    student, teacher = (
        (model(input_ids=torch.tensor([ids])).logits[0] / 0.5).log_softmax(-1)[len(ids) - 10 : -1][mask] for ids in rows
    )
    assert outputs.divergence is not None
    assert torch.allclose(outputs.divergence, how.of_logs(student, teacher), atol=1e-5)
    assert outputs.divergence.max() > 1e-3


def test_weights_are_means_over_samples_of_means_over_tokens() -> None:
    assert SDPO().weights(SAMPLES) == pytest.approx([1 / 20, 0, 1 / 40, 1 / 10, 0])
    masked = [replace(SAMPLES[0], truncated=True), *SAMPLES[1:]]
    lenient = SDPO(policy=GRPO(mask_truncated_completions=True))
    assert lenient.weights(masked) == pytest.approx([0, 0, 1 / 40, 1 / 10, 0])
    batch = packed(SDPO(), SAMPLES)
    assert batch.micro_batches[0].samples == (0, 2, 3), "samples without a teacher are not forwarded"
    both = packed(SDPO(distillation_weight=0.5), SAMPLES)
    assert both.micro_batches[0].samples == (0, 1, 2, 3), "neither advantage nor teacher: nothing to learn"
    assert len(packed(SDPO(), [SAMPLES[1]])) == 0


def test_padding_micro_batches_add_nothing() -> None:
    model = tiny()
    outputs = policy_logprobs(model, padding_micro_batch(), entropy="metric")
    loss = SDPO().loss(LossInputs.of(padding_micro_batch(), outputs)).loss
    loss.backward()
    assert loss.item() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distillation_weight": 1.5}, r"distillation_weight=1.5 must be in \[0, 1\]"),
        ({"distillation_is_clip": 0.0}, "distillation_is_clip=0.0 must be above 0"),
        ({"teacher_model_kind": "old"}, "teacher_model_kind='old' must be one of live, ema, base"),
        ({"teacher_update_rate": 0.0}, r"teacher_update_rate=0.0 must be in \(0, 1\]"),
        ({"teacher_sync_steps": 0}, "teacher_sync_steps=0 must be at least 1"),
        ({"teacher_model_kind": "live", "teacher_update_rate": 0.1}, "teacher_update_rate=0.1 cannot act"),
        ({"policy": GRPO(epsilon=0.3)}, "epsilon=0.3 cannot act: distillation_weight=1.0"),
        ({"distillation_weight": 0.0, "teacher_model_kind": "live"}, "teacher_model_kind='live' cannot act"),
        ({"distillation_weight": 0.0, "divergence": Divergence(mode="full_logits")}, "mode='full_logits' cannot act"),
        (
            {"distillation_weight": 0.0, "reprompting": Reprompting(max_reprompt_len=9)},
            "max_reprompt_len=9 cannot act",
        ),
        ({"diagnostics_warning_interval": -1}, "diagnostics_warning_interval=-1 must be at least 0"),
    ],
)
def test_options_that_cannot_work_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SDPO(**options)
