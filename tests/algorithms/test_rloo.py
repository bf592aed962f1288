from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from envgrad.algorithms.rloo import RLOO, sequence_kl
from envgrad.errors import ConfigurationError
from envgrad.logprobs import PolicyOutputs
from envgrad.losses import LossInputs, merge_metrics
from envgrad.packing import pack, padding_micro_batch
from envgrad.types import Group
from helpers.episodes import episode, group_of, reference_of, step, tiny


def rewarded(*rewards: float | None, position: int = 0, tokens: tuple[int, ...] = (2, 3, 1, 4)) -> Group:
    return group_of(
        *(
            episode(position, sibling, reward, tokens=size, truncated=sibling == 1)
            for sibling, (reward, size) in enumerate(zip(rewards, tokens, strict=False))
        )
    )


def advantages_of(algorithm: RLOO, group: Group, lower: float = 0.25) -> list[float]:
    samples = algorithm.credit([group], reference_of([group], lower=lower))
    return [next(value for value, trained in zip(one.advantages, one.mask, strict=True) if trained) for one in samples]


# Credit. Sequence KLs: 0.25 nats a token on 2, 3 and 1 tokens.


def test_kl_is_taken_off_the_reward_by_hand() -> None:
    # rewards 1, 0, 2 less 0.4 * (0.5, 0.75, 0.25): 0.8, -0.3, 1.9; others' means 0.8, 1.35, 0.25
    assert advantages_of(RLOO(beta=0.4), rewarded(1.0, 0.0, 2.0)) == pytest.approx([0.0, -1.65, 1.65])
    assert advantages_of(RLOO(beta=0.0), rewarded(1.0, 0.0, 2.0)) == pytest.approx([0.0, -1.5, 1.5])


def test_rewards_are_clipped_before_the_kl() -> None:
    # clipped to 0.5, 0, 0.5; less 0.4 * KL: 0.3, -0.3, 0.4; clipping after it would give 0.5, -0.3, 0.5
    algorithm = RLOO(beta=0.4, reward_clip_range=(0.0, 0.5))
    assert advantages_of(algorithm, rewarded(1.0, -7.0, 2.0)) == pytest.approx([0.25, -0.65, 0.4])


def test_unscorable_episodes_are_in_no_baseline() -> None:
    group = rewarded(1.0, None, 3.0, math.nan)
    samples = RLOO(beta=0.0).credit([group])
    assert [sample.advantages[4] for sample in samples] == [-2.0, 2.0]
    assert RLOO(beta=0.0).credit([rewarded(None, None)]) == []
    assert [sample.advantages[4] for sample in RLOO(beta=0.0).credit([rewarded(5.0, None)])] == [0.0]


def test_normalised_advantages_by_hand() -> None:
    # leave-one-out: 1, -1 and 4, -4: squares 34, variance 34 / 3
    groups = [rewarded(1.0, 0.0), rewarded(4.0, 0.0, position=1)]
    samples = RLOO(beta=0.0, normalize_advantages=True).credit(groups)
    std = math.sqrt(34 / 3) + 1e-4
    assert [sample.advantages[4] for sample in samples] == pytest.approx([1 / std, -1 / std, 4 / std, -4 / std])


def test_a_kl_within_rounding_is_none_so_that_equal_rewards_teach_nothing() -> None:
    group = rewarded(1.0, 1.0, 1.0)
    assert advantages_of(RLOO(beta=0.5), group, lower=3e-6) == [0.0, 0.0, 0.0]
    assert any(advantages_of(RLOO(beta=0.5), group, lower=3e-3))
    played = group.episodes[0]
    assert sequence_kl(played, [logprob - 0.5 for logprob in played.logprobs[4:6]]) == pytest.approx(1.0)
    samples = RLOO(beta=0.5).credit([group], reference_of([group], lower=3e-6))
    assert len(pack(samples, RLOO().weights(samples), skip_zero_advantages=RLOO().skips_zero_advantages)) == 0


def test_samples_carry_the_references_logprobs() -> None:
    group = rewarded(1.0, 0.0)
    sample = RLOO().credit([group], reference_of([group]))[0]
    assert sample.ref_logprobs is not None
    assert sample.ref_logprobs[4:6] == pytest.approx([logprob - 0.25 for logprob in sample.logprobs[4:6]])
    assert sample.ref_logprobs[:4] == (0.0,) * 4 and sample.ref_logprobs[6] == 0.0
    assert RLOO(beta=0.0).credit([group])[0].ref_logprobs is None
    with pytest.raises(AssertionError, match="needs the reference"):
        RLOO().credit([group])


def test_needs() -> None:
    assert RLOO().credit_reads_reference and not RLOO().needs_reference
    assert not RLOO(beta=0.0).credit_reads_reference
    assert RLOO().epsilon == 0.2 and RLOO().beta == 0.05


@given(st.lists(st.floats(-5, 5).map(lambda value: round(value, 2)), min_size=2, max_size=4), st.floats(0, 1))
def test_advantages_of_a_group_sum_to_zero_with_the_kl_in_the_reward(rewards: list[float], beta: float) -> None:
    assert math.fsum(advantages_of(RLOO(beta=beta), rewarded(*rewards))) == pytest.approx(0.0, abs=1e-9)


# Loss. Sequences of 2 tokens with ratio 1.5 * 0.8 = 1.2 and 1 with ratio 0.5; one with 3 and ratio 2.


def inputs(**more: object) -> LossInputs:
    old = torch.tensor([-1.0, -2.0, -3.0, -1.0, -1.0, -1.0])
    ratios = torch.tensor([1.5, 0.8, 0.5, 2.0, 1.0, 1.0])
    values: dict[str, object] = {
        "logprobs": (old + ratios.log()).requires_grad_(), "old_logprobs": old, "sampler_logprobs": old,
        "advantages": torch.tensor([1.0, 1.0, -2.0, 3.0, 3.0, 3.0]), "weights": torch.full((6,), 1 / 3),
        "sample_index": torch.tensor([0, 0, 1, 2, 2, 2]), "num_samples": 3, "total_tokens": 6.0,
    }  # fmt: skip
    return LossInputs(**{**values, **more})  # type: ignore[arg-type]


def test_loss_and_gradient_by_hand() -> None:
    given_inputs = inputs()
    outputs = RLOO(epsilon=0.3, epsilon_high=0.4).loss(given_inputs)
    # 1.2 * 1 unclipped; 0.5 * -2 against 0.7 * -2: the lower, clipped; 2 * 3 against 1.4 * 3: clipped
    assert outputs.loss.item() == pytest.approx((-1.2 + 1.4 - 4.2) / 3, rel=1e-6)
    outputs.loss.backward()
    # of r * A: -A * r on each token of the sequence; none where it is clipped
    assert given_inputs.logprobs.grad is not None
    assert given_inputs.logprobs.grad.tolist() == pytest.approx([-0.4, -0.4, 0, 0, 0, 0], abs=1e-6)
    metrics = merge_metrics([outputs.metrics])
    assert metrics["clip_ratio/low_mean"] == pytest.approx(1 / 3)
    assert metrics["clip_ratio/high_mean"] == pytest.approx(1 / 3)
    assert metrics["clip_ratio/high_max"] == 1 and metrics["clip_ratio/low_min"] == 0
    assert metrics["ratio/max"] == pytest.approx(2.0)
    assert "kl" not in metrics


def test_an_unchanged_policy_has_the_gradient_of_reinforce() -> None:
    old = inputs().old_logprobs
    given_inputs = inputs(logprobs=old.clone().requires_grad_())
    RLOO().loss(given_inputs).loss.backward()
    assert given_inputs.logprobs.grad is not None
    assert given_inputs.logprobs.grad.tolist() == pytest.approx([-1 / 3, -1 / 3, 2 / 3, -1, -1, -1])


def test_kl_metric_is_per_token_and_the_correction_per_sequence() -> None:
    given_inputs = inputs(
        ref_logprobs=inputs().sampler_logprobs - torch.tensor([0.6, 0.0, 0.0, 0.0, 0.0, 0.0]),
        importance=torch.tensor([0.5, 0.5, 1.0, 1.0, 1.0, 1.0]),
    )
    outputs = RLOO(epsilon=0.3, epsilon_high=0.4).loss(given_inputs)
    assert outputs.loss.item() == pytest.approx((-0.6 + 1.4 - 4.2) / 3, rel=1e-6)
    assert merge_metrics([outputs.metrics])["kl"] == pytest.approx(0.1)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_long_sequence_that_drifted_far_stays_finite(advantage: float) -> None:
    logprobs = torch.full((200,), -0.1, requires_grad=True)
    outputs = RLOO().loss(
        LossInputs(
            logprobs=logprobs, old_logprobs=torch.full((200,), -1.0), sampler_logprobs=torch.full((200,), -1.0),
            advantages=torch.full((200,), advantage), weights=torch.ones(200),
            sample_index=torch.zeros(200, dtype=torch.int64), num_samples=1, total_tokens=200.0,
        )
    )  # fmt: skip
    outputs.loss.backward()  # its ratio would be e^180
    assert math.isfinite(outputs.loss.item()) and logprobs.grad is not None
    assert bool(torch.isfinite(logprobs.grad).all())


def test_weights_are_one_over_the_samples() -> None:
    samples = RLOO(beta=0.0).credit([rewarded(1.0, 0.0, 2.0, 5.0)])
    assert RLOO().weights(samples) == [0.25] * 4
    assert RLOO(mask_truncated_completions=True).weights(samples) == [0.25, 0.0, 0.25, 0.25]


def test_loss_gradient_and_metrics_do_not_depend_on_the_split() -> None:
    model, algorithm = tiny(), RLOO(beta=0.3, epsilon=0.1)
    groups = [rewarded(1.0, 0.0, 3.0, 1.0), rewarded(0.0, 0.5, 1.0, position=1), rewarded(1.0, None, 0.5, position=2)]
    samples = algorithm.credit(groups, reference_of(groups))
    loss, metrics, gradient = step(model, algorithm, samples, None)
    assert loss != 0 and gradient.abs().max() > 1e-3 and metrics["kl"] == pytest.approx(0.25, abs=1e-6)
    for max_tokens, pads in ((1, 0), (12, 2), (64, 1)):
        other, other_metrics, other_gradient = step(model, algorithm, samples, max_tokens, pads)
        assert other == pytest.approx(loss, rel=1e-6, abs=1e-6)
        assert other_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)
        assert torch.allclose(gradient, other_gradient, atol=1e-6, rtol=1e-5)


def test_padding_and_everything_masked_is_loss_zero() -> None:
    micro_batch = padding_micro_batch()
    result = RLOO().loss(LossInputs.of(micro_batch, PolicyOutputs(torch.zeros(1, requires_grad=True), None)))
    assert result.loss.item() == 0 and merge_metrics([result.metrics]) == {}
    truncated = replace(rewarded(1.0, 0.0), episodes=rewarded(1.0, 0.0).episodes[1:])
    algorithm = RLOO(beta=0.0, mask_truncated_completions=True)
    samples = algorithm.credit([truncated])
    assert len(pack(samples, algorithm.weights(samples))) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": 1.0}, r"epsilon=1.0 must be in \[0, 1\)"),
        ({"epsilon_high": -0.1}, "epsilon_high=-0.1 must be at least 0"),
        ({"beta": -1.0}, "beta=-1.0 must be at least 0"),
        ({"reward_clip_range": (1.0, 1.0)}, r"reward_clip_range=\(1.0, 1.0\) must be \(low, high\)"),
        ({"reward_clip_range": (1.0, 2.0, 3.0)}, "must be \\(low, high\\)"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        RLOO(**options)  # type: ignore[arg-type]
