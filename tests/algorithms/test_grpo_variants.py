"""GRPO's options beyond the paper: other credits, losses, masks and the entropy's control."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from envgrad.advantages import gdpo_advantages
from envgrad.algorithms.grpo import GRPO
from envgrad.errors import ConfigurationError
from envgrad.losses import LossInputs, merge_metrics
from envgrad.types import Group
from helpers.episodes import episode, group_of


def first(groups: list[Group], algorithm: GRPO) -> list[float]:
    """Each sample's advantage on its first sampled token."""
    return [sample.advantages[4] for sample in algorithm.credit(groups)]


# Credit


def components(position: int, *rewards: dict[str, float | None]) -> Group:
    totals = [sum(value for value in one.values() if value is not None) for one in rewards]
    return group_of(
        *(
            episode(position, sibling, total, rewards=one)
            for sibling, (one, total) in enumerate(zip(rewards, totals, strict=True))
        )
    )


def test_gdpo_normalises_each_component_in_its_group() -> None:
    groups = [
        components(0, {"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 100.0}),
        components(1, {"right": 1.0, "short": 7.0}, {"right": 0.0, "short": 6.0}),
    ]
    algorithm = GRPO(multi_objective_aggregation="normalize_then_sum")
    weighted = algorithm.with_reward_weights({"right": 2.0})
    # each component is +-a with a = 1/sqrt(2): sums 2a - a, a - 2a and 3a, -3a; their squares sum to 10, over 3
    a, std = math.sqrt(0.5), math.sqrt(10 / 3)
    assert first(groups, weighted) == pytest.approx([a / std, -a / std, 3 * a / std, -3 * a / std], rel=1e-3)
    # by the sum, the first group's second sibling wins: its 100 drowns the rest
    assert first(groups, GRPO())[0] < 0 < first(groups, weighted)[0]
    unweighted = gdpo_advantages([[[1.0, 0.0], [0.0, 100.0]], [[1.0, 0.0], [7.0, 6.0]]], [1.0, 1.0])
    assert first(groups, algorithm) == pytest.approx([value for group in unweighted for value in group])


def test_gdpo_leaves_out_what_does_not_apply_and_what_cannot_be_scored() -> None:
    group = components(0, {"right": 1.0, "style": 3.0}, {"right": 0.0}, {"right": 1.0, "style": 1.0})
    unscorable = replace(group.episodes[2], reward=None)
    group = replace(group, episodes=(*group.episodes[:2], unscorable))
    # style is left with one sibling: nothing to compare
    samples = GRPO(multi_objective_aggregation="normalize_then_sum").credit([group])
    assert [sample.advantages[4] for sample in samples] == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)], rel=1e-3)


def test_reward_weights_go_only_to_a_credit_that_reads_them() -> None:
    assert GRPO().with_reward_weights({"right": 2.0}).reward_weights is None
    assert GRPO(credit_level="turn").with_reward_weights({"turns": 2.0}).reward_weights == {"turns": 2.0}


def test_turn_credit_by_hand() -> None:
    # returns at discount 1/2: (1, 0) + get_reward 1 -> (1.5, 1); (0, 2) -> (1, 2); one turn (0.5)
    group = group_of(
        episode(0, 0, 2.0, turns=(1.0, None)), episode(0, 1, 2.0, turns=(None, 2.0)), episode(0, 2, 0.5, turns=(0.5,)),
        episode(0, 3, None, turns=(9.0,)),
    )  # fmt: skip
    algorithm = GRPO(credit_level="turn", turn_discount=0.5, scale_rewards="none")
    samples = algorithm.credit([group])
    assert [sample.advantages for sample in samples] == [
        (0, 0, 0, 0, 0.5, 0.5, 0, -0.5, -0.5, 0),
        (0, 0, 0, 0, 0, 0, 0, 0.5, 0.5, 0),
        (0, 0, 0, 0, -0.5, -0.5, 0),
    ]
    assert GRPO().credit([group])[0].advantages[4] > 0  # equal rewards of 2 each: no turn is told apart


def test_turn_credit_of_single_turns_is_the_episodes() -> None:
    group = group_of(*(episode(0, sibling, reward) for sibling, reward in enumerate((1.0, 0.0, 3.0))))
    assert first([group], GRPO(credit_level="turn")) == pytest.approx(first([group], GRPO()))


# Losses. Two samples with 3 and 1 trained tokens; ratios 1.5, 1, 0.5 and 1.5, advantages 1 and -1.


def inputs(**more: object) -> LossInputs:
    old = torch.tensor([-1.0, -2.0, -3.0, -1.0])
    values: dict[str, object] = {
        "logprobs": (old + torch.tensor([1.5, 1.0, 0.5, 1.5]).log()).requires_grad_(), "old_logprobs": old,
        "sampler_logprobs": old, "advantages": torch.tensor([1.0, 1.0, 1.0, -1.0]), "weights": torch.full((4,), 0.25),
        "sample_index": torch.tensor([0, 0, 0, 1]), "num_samples": 2, "total_tokens": 4.0,
    }  # fmt: skip
    return LossInputs(**{**values, **more})  # type: ignore[arg-type]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_sapo_by_hand() -> None:
    expected = -4 * (sigmoid(0.5) + 0.5 + sigmoid(-0.5)) + 4 / 2 * sigmoid(2 * 0.5)
    outputs = GRPO(loss_type="sapo", sapo_temperature_neg=2.0).loss(inputs())
    assert outputs.loss.item() == pytest.approx(0.25 * expected, rel=1e-5)
    assert not any(name.startswith("clip_ratio") for name in outputs.metrics)


def test_luspo_is_the_sequences_loss_times_its_length() -> None:
    # weights 1 / S: (1 / 2) * (3 * -(0.75 ** (1 / 3)) + 1.5), the second ratio of 1.5 with A < 0 not clipped
    given_inputs = inputs(weights=torch.full((4,), 0.5))
    found = GRPO(loss_type="luspo", importance_sampling_level="sequence").loss(given_inputs)
    assert found.loss.item() == pytest.approx(0.5 * (-3 * 0.75 ** (1 / 3) + 1.5), rel=1e-5)
    assert "clip_ratio/low_mean" in found.metrics


def test_vespo_by_hand() -> None:
    given_inputs = inputs(importance=torch.tensor([2.0, 1.0, 1.0, 1.0]))
    # w: 1.5 * 1 * 0.5 * 2 = 1.5, A > 0: 1.5^2 e^-1.5; and 1.5, A < 0: 1.5^3 e^-1; the correction acts in there only
    good, bad = 1.5**2 * math.exp(-1.5), 1.5**3 * math.exp(-1.0)
    logprobs = [math.log(1.5) - 1, -2, math.log(0.5) - 3, math.log(1.5) - 1]
    outputs = GRPO(loss_type="vespo").loss(given_inputs)
    expected = -good * sum(logprobs[:3]) + bad * logprobs[3]
    assert outputs.loss.item() == pytest.approx(0.25 * expected, rel=1e-5)
    outputs.loss.backward()
    assert given_inputs.logprobs.grad is not None
    assert given_inputs.logprobs.grad.tolist() == pytest.approx([-0.25 * good] * 3 + [0.25 * bad], rel=1e-5)
    assert merge_metrics([outputs.metrics])["vespo/phi_seq_mean"] == pytest.approx((good + bad) / 2, rel=1e-5)


def test_off_policy_mask_drops_the_surrogate_and_keeps_the_kl() -> None:
    # the bad sample was sampled at -0.5 and is now at log 1.5 - 1 = -0.595: it drifted by 0.0945
    sampler = torch.tensor([-1.0, -2.0, -3.0, -0.5])
    ref = inputs().logprobs.detach()
    for threshold, expected in ((0.09, -1.2 - 1 - 0.5), (0.1, -1.2 - 1 - 0.5 + 1.5)):
        outputs = GRPO(off_policy_mask_threshold=threshold, beta=0.1).loss(
            inputs(sampler_logprobs=sampler, ref_logprobs=ref)
        )
        assert outputs.loss.item() == pytest.approx(0.25 * expected, rel=1e-5)
        assert merge_metrics([outputs.metrics])["off_policy_mask_ratio"] == (0.5 if threshold == 0.09 else 0.0)
    further = inputs(sampler_logprobs=sampler, ref_logprobs=ref - math.log(2.0))
    kl = 0.5 + math.log(2.0) - 1
    found = GRPO(off_policy_mask_threshold=0.09, beta=0.1, use_bias_correction_kl=False).loss(further)
    assert found.loss.item() == pytest.approx(0.25 * (-2.7 + 0.1 * 4 * kl), rel=1e-5)


def test_selected_tokens_alone_teach_and_the_denominators_stay() -> None:
    selected = {"selected": torch.tensor([1.0, 0.0, 0.0, 1.0]), "total_selected": 2.0}
    ref = inputs().logprobs.detach() + math.log(2.0)
    kl = 2 - math.log(2.0) - 1
    algorithm = GRPO(top_entropy_quantile=0.5, beta=0.1, use_bias_correction_kl=False)
    outputs = algorithm.loss(inputs(**selected, ref_logprobs=ref))
    assert outputs.loss.item() == pytest.approx(0.25 * (-1.2 + 1.5 + 0.1 * 4 * kl), rel=1e-5)
    entropy = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    with_bonus = GRPO(top_entropy_quantile=0.5, entropy_coef=0.2).loss(inputs(**selected, entropy=entropy))
    assert with_bonus.loss.item() == pytest.approx(0.25 * 0.3 - 0.2 * (1 + 4) / 2, rel=1e-5)
    metrics = merge_metrics([with_bonus.metrics])
    assert (
        metrics["entropy"] == 2.5
        and metrics["entropy/selected"] == 2.5
        and metrics["entropy_coef"] == pytest.approx(0.2)
    )
    assert metrics["policy_loss"] == pytest.approx(0.25 * 0.3, rel=1e-5)


def test_the_policys_loss_is_summed_over_micro_batches() -> None:
    entropy = torch.ones(4)
    parts = [GRPO(entropy_coef=0.2).loss(inputs(entropy=entropy)).metrics] * 2
    assert merge_metrics(parts)["policy_loss"] == pytest.approx(2 * 0.25 * -1.2, rel=1e-5)


def test_adaptive_entropy_acts_from_the_second_step_on_and_only_below_its_target() -> None:
    algorithm = GRPO(use_adaptive_entropy=True, entropy_coef=0.1, entropy_target=2.0, entropy_coef_delta=0.1)
    assert algorithm.entropy == "grad" and not algorithm.skips_zero_advantages

    def bonus(entropy: float) -> float:
        outputs = algorithm.loss(inputs(entropy=torch.full((4,), entropy)))
        metrics = merge_metrics([outputs.metrics])
        algorithm.after_step(metrics)
        return (metrics["policy_loss"] - outputs.loss.item()) / entropy

    # coefficients after each step: 0.2, 0.3, 0.2, 0.3
    assert [bonus(entropy) for entropy in (1.0, 1.5, 3.0, 1.0)] == pytest.approx([0.0, 0.2, 0.3, 0.0], abs=1e-6)
    other = GRPO(use_adaptive_entropy=True, entropy_coef=0.1, entropy_target=2.0, entropy_coef_delta=0.1)
    other.load_state_dict(algorithm.state_dict())
    assert other.controller == algorithm.controller and other.controller is not algorithm.controller
    assert GRPO().state_dict() == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"multi_objective_aggregation": "sum"}, "multi_objective_aggregation='sum' must be one of sum_then_normalize"),
        ({"credit_level": "token"}, "credit='token' must be one of episode, turn"),
        ({"turn_discount": 0.9}, "turn_discount=0.9 cannot act: credit='episode' has no turns"),
        ({"credit_level": "turn", "turn_discount": 1.1}, r"turn_discount=1.1 must be in \[0, 1\]"),
        (
            {"credit_level": "turn", "multi_objective_aggregation": "normalize_then_sum"},
            "credit='turn' and multi_objective_aggregation='normalize_then_sum' contradict",
        ),
        (
            {"scale_rewards": "none", "multi_objective_aggregation": "normalize_then_sum"},
            "scale_rewards='none' cannot act beside",
        ),
        ({"reward_weights": {"a": 2.0}}, "reward_weights={'a': 2.0} cannot act"),
        ({"loss_type": "sapo", "epsilon": 0.1}, "epsilon=0.1 cannot act: loss_type='sapo' clips nothing"),
        ({"loss_type": "vespo", "epsilon_high": 0.1}, "epsilon_high=0.1 cannot act: loss_type='vespo' clips nothing"),
        ({"loss_type": "sapo", "delta": 3.0}, "delta=3.0 has no place in loss_type='sapo'"),
        ({"loss_type": "sapo", "sapo_temperature_pos": 0.0}, "sapo_temperature_pos=0.0 must be above 0"),
        ({"sapo_temperature_pos": 2.0}, "sapo_temperature_pos=2.0 cannot act: loss_type='dapo'"),
        ({"vespo_k_neg": 2.0}, "vespo_k_neg=2.0 cannot act: loss_type='dapo'"),
        ({"loss_type": "vespo", "vespo_lambda_neg": 0.0}, "vespo_lambda_neg=0.0 must be above 0"),
        ({"loss_type": "vespo", "vespo_k_pos": -1.0}, "vespo_k_pos=-1.0 must be at least 0"),
        (
            {"loss_type": "vespo", "importance_sampling_level": "sequence"},
            "importance_sampling_level=sequence cannot act: loss_type='vespo' weighs whole sequences",
        ),
        ({"off_policy_mask_threshold": 0.0}, "off_policy_mask_threshold=0.0 must be above 0"),
        ({"top_entropy_quantile": 1.5}, r"top_entropy_quantile=1.5 must be in \[0, 1\]"),
        ({"entropy_target": 1.0}, "entropy_target=1.0 cannot act: use_adaptive_entropy is off"),
        ({"entropy_coef_max": 2.0}, "entropy_coef_max=2.0 cannot act: use_adaptive_entropy is off"),
        ({"use_adaptive_entropy": True, "entropy_coef": 2.0}, "entropy_coef=2.0 must start within"),
        ({"beta": math.nan}, "beta=nan must be at least 0"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        GRPO(**options)  # type: ignore[arg-type]
