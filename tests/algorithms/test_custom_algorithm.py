from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from envgrad.algorithms.base import Algorithm
from envgrad.algorithms.custom import Custom, custom, resolve_algorithm
from envgrad.algorithms.grpo import GRPO
from envgrad.algorithms.rloo import RLOO
from envgrad.errors import ConfigurationError
from envgrad.logprobs import PolicyOutputs
from envgrad.losses import LossInputs, LossOutputs, Metric, merge_metrics, sample_weights, step_totals
from envgrad.packing import StepTotals, pack
from envgrad.types import Group, TrainingSample
from helpers.episodes import episode, group_of, step, tiny


def group(*rewards: float | None) -> Group:
    return group_of(*(episode(0, sibling, reward, tokens=2 + sibling) for sibling, reward in enumerate(rewards)))


def inputs() -> LossInputs:
    old = torch.tensor([-1.0, -2.0, -3.0])
    return LossInputs(
        logprobs=old.clone().requires_grad_(), old_logprobs=old, sampler_logprobs=old,
        advantages=torch.tensor([1.0, 1.0, -2.0]), weights=torch.tensor([0.25, 0.25, 0.5]),
        sample_index=torch.tensor([0, 0, 1]), num_samples=2, total_tokens=3.0,
    )  # fmt: skip


def reinforce(inputs: LossInputs) -> Tensor:
    return -inputs.advantages * inputs.logprobs


def resolve(algorithm: object, base: Algorithm | None = None) -> Algorithm:
    return resolve_algorithm(algorithm, GRPO() if base is None else base)  # type: ignore[arg-type]


# Losses


def test_a_plain_function_gives_losses_that_the_base_weighs() -> None:
    algorithm = resolve(reinforce, GRPO(loss_type="grpo"))
    outputs = algorithm.loss(inputs())
    assert outputs.loss.item() == pytest.approx(0.25 * 1 + 0.25 * 2 - 0.5 * 6)
    assert {"ratio/max", "sampler_mismatch"} <= set(outputs.metrics)
    samples = algorithm.credit([group(1.0, 0.0)])
    assert [sample.advantages for sample in samples] == [s.advantages for s in GRPO().credit([group(1.0, 0.0)])]
    assert algorithm.weights(samples) == [1 / 4, 1 / 6]  # of loss_type="grpo", on 2 and 3 tokens


def test_a_scalar_is_taken_as_it_is_and_outputs_keep_their_metrics() -> None:
    def scalar(inputs: LossInputs) -> Tensor:
        return (inputs.weights * reinforce(inputs)).sum()

    def outputs(inputs: LossInputs) -> LossOutputs:
        one = torch.ones(())
        return LossOutputs(loss=7 * inputs.logprobs.sum(), metrics={"mine": Metric(value=3 * one, count=one)})

    assert resolve(scalar).loss(inputs()).loss.item() == pytest.approx(-2.25)
    found = resolve(outputs).loss(inputs())
    assert found.loss.item() == -42.0 and merge_metrics([found.metrics])["mine"] == 3.0


def test_a_loss_of_ones_own_does_not_depend_on_the_split() -> None:
    model = tiny()
    algorithm = resolve(reinforce)
    samples = algorithm.credit([group(1.0, 0.0, 3.0)])
    loss, _, gradient = step(model, algorithm, samples, None)
    other, _, other_gradient = step(model, algorithm, samples, 1)
    assert loss == pytest.approx(other, rel=1e-5) and torch.allclose(gradient, other_gradient, atol=1e-6)


def returning(value: object) -> object:
    def bad_loss(inputs: LossInputs) -> object:
        return value(inputs) if callable(value) else value

    return bad_loss


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1.0, "bad_loss returned float; return a tensor"),
        (None, "bad_loss returned NoneType"),
        (lambda given: given.logprobs[:2], r"shape \(2,\); return \(3,\) or a scalar"),
        (lambda given: given.logprobs[None], r"shape \(1, 3\); return \(3,\) or a scalar"),
        (lambda given: given.logprobs.detach(), "a loss without gradient"),
        (lambda given: given.logprobs / 0, "a loss that is not finite"),
        (lambda given: LossOutputs(loss=given.logprobs, metrics={}), r"shape \(3,\); return a scalar"),
    ],
)
def test_a_wrong_loss_is_named(value: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resolve(returning(value)).loss(inputs())


def test_an_error_in_the_users_loss_is_the_users() -> None:
    def broken(inputs: LossInputs) -> Tensor:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        resolve(broken).loss(inputs())


# Advantages


def test_advantages_get_rewards_by_group_and_keep_unscorable_episodes_out() -> None:
    seen = []

    def ranks(rewards: list[list[float | None]]) -> Sequence[Sequence[float]]:
        seen.append(rewards)
        return [[10.0 * index for index in range(len(of_group))] for of_group in rewards]

    algorithm = resolve(custom(advantages=ranks))
    samples = algorithm.credit([group(1.0, None, math.nan, 4.0), group(2.0)])
    assert seen == [[[1.0, None, None, 4.0], [2.0]]]
    assert [sample.advantages[4] for sample in samples] == [0.0, 30.0, 0.0]
    assert algorithm.skips_zero_advantages
    given_inputs = inputs()
    assert algorithm.loss(given_inputs).loss.item() == GRPO().loss(given_inputs).loss.item()


def test_the_function_cannot_change_our_rewards() -> None:
    def greedy(rewards: list[list[float | None]]) -> list[list[float]]:
        rewards[0].clear()
        return [[1.0, 2.0]]

    samples = resolve(custom(advantages=greedy)).credit([group(1.0, 0.0)])
    assert [sample.advantages[4] for sample in samples] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([[1.0]], r"mine returned groups of \[1\] advantages for groups of \[2\]"),
        ([[1.0, 2.0], [1.0]], r"groups of \[2, 1\] advantages for groups of \[2\]"),
        ([1.0, 2.0], "mine returned list .* no list of lists of numbers"),
        (None, "mine returned NoneType"),
        ([["a", "b"]], "no list of lists of numbers"),
        ([[1.0, math.nan]], "mine returned nan for sibling 1 of group 0, whose reward is 0.0"),
    ],
)
def test_wrong_advantages_are_named(returned: object, message: str) -> None:
    def mine(rewards: list[list[float | None]]) -> object:
        return returned

    with pytest.raises(ConfigurationError, match=message):
        resolve(custom(advantages=mine)).credit([group(1.0, 0.0)])  # type: ignore[arg-type]


# What takes the place of what


@dataclass(frozen=True, slots=True)
class Mine(Algorithm):
    """The four methods alone."""

    def credit(self, groups: Sequence[Group], reference: object = None) -> list[TrainingSample]:
        return GRPO().credit(groups)

    def totals(self, samples: Sequence[TrainingSample]) -> StepTotals:
        return step_totals(samples)

    def weights(self, samples: Sequence[TrainingSample], totals: StepTotals | None = None) -> list[float]:
        return sample_weights(samples, "dapo", totals=totals)

    def loss(self, inputs: LossInputs) -> LossOutputs:
        return LossOutputs(loss=(inputs.weights * reinforce(inputs)).sum(), metrics={})


def test_an_algorithm_is_four_methods() -> None:
    algorithm = resolve(Mine())
    assert isinstance(algorithm, Mine) and not algorithm.needs_reference and algorithm.entropy == "metric"
    samples = algorithm.credit([group(1.0, 0.0)])
    for micro_batch in pack(samples, algorithm.weights(samples)).micro_batches:
        logprobs = torch.zeros(micro_batch.num_trained_tokens, requires_grad=True)
        assert algorithm.loss(LossInputs.of(micro_batch, PolicyOutputs(logprobs, None))).loss.item() == 0
    with pytest.raises(TypeError, match="abstract"):
        type("Half", (Algorithm,), {"loss": Mine.loss})()


def test_what_is_not_given_is_the_configurations() -> None:
    base = GRPO(beta=0.1)
    assert resolve(None, base) is base
    algorithm = resolve(reinforce, base)
    assert algorithm.needs_reference and algorithm.entropy == "metric" and not algorithm.skips_zero_advantages
    assert resolve(custom(loss=reinforce, entropy="grad", skips_zero_advantages=True)).entropy == "grad"
    assert resolve(custom(loss=reinforce, skips_zero_advantages=True)).skips_zero_advantages
    assert resolve(custom(loss=reinforce, base=RLOO()), GRPO()).credit_reads_reference
    assert not resolve(custom(advantages=lambda rewards: rewards, base=RLOO())).credit_reads_reference
    weighted = resolve(reinforce, GRPO(credit_level="turn")).with_reward_weights({"turns": 2.0})
    assert weighted.base.reward_weights == {"turns": 2.0}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("algorithm", "base", "message"),
    [
        (RLOO(), GRPO(beta=0.1, loss_type="grpo"), r"loss_type='grpo', beta=0.1 cannot act beside algorithm=RLOO"),
        (reinforce, GRPO(epsilon=0.3), "epsilon=0.3 cannot act beside the loss of reinforce"),
        (custom(loss=reinforce, base=GRPO()), GRPO(beta=0.1), r"beta=0.1 cannot act beside custom\(base=GRPO"),
        (
            custom(advantages=lambda rewards: rewards), GRPO(scale_rewards="none"),
            "scale_rewards='none' cannot act beside the advantages of",
        ),
        (GRPO, GRPO(), r"algorithm=GRPO is a class; pass an instance: GRPO\("),
        (3, GRPO(), "algorithm=3 is neither a loss function nor an Algorithm, which has after_step, compares_siblings"),
        ("dapo", GRPO(), "algorithm='dapo' is neither"),
    ],
)  # fmt: skip
def test_what_cannot_act_is_refused(algorithm: object, base: Algorithm, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resolve(algorithm, base)


def test_the_length_limit_is_the_episodes_and_no_contradiction() -> None:
    assert isinstance(resolve(RLOO(), GRPO(max_completion_length=7)), RLOO)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: custom(), r"custom\(\) needs advantages= or loss="),
        (lambda: custom(loss=3), "loss=3 must be a function"),
        (lambda: custom(loss=lambda: 0), "cannot be the loss: it is called with one argument"),
        (lambda: custom(advantages=lambda a, b: a), "cannot be the advantages: it is called with one argument"),
        (lambda: custom(advantages=lambda a: a, entropy="grad"), "entropy='grad' cannot act"),
    ],
)
def test_wrong_parts_are_named(build, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError, match=message):
        build()


def test_a_builtin_without_a_signature_is_taken_at_its_word() -> None:
    assert isinstance(custom(loss=max), Custom)
