"""An episode with several rows counts once: one reward, one place in the baseline, one share of the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from envgrad.algorithms.base import Algorithm
from envgrad.algorithms.credit import training_sample, training_samples, turn_samples
from envgrad.algorithms.grpo import GRPO
from envgrad.algorithms.rloo import RLOO, sequence_kl
from envgrad.losses import sample_weights, step_totals
from envgrad.packing import pack
from envgrad.rewards.exchange import exchange_of
from envgrad.rollout.group import GroupPolicy
from envgrad.training.stream import split_round
from envgrad.types import Episode, EpisodeRow, Group, TrainingSample, Turn
from helpers.episodes import episode, group_of, task_at


def branching(position: int, sibling: int, reward: float | None, *, tokens: Sequence[int] = (2, 6)) -> Episode:
    """An episode with a row for each of ``tokens``, which says how many are sampled in it."""
    main = episode(position, sibling, reward, tokens=tokens[0])
    rows, turns = [], list(main.turns)
    for number, count in enumerate(tokens[1:], start=1):
        ids, mask, logprobs = (1, 2, *range(5, 5 + count)), (0, 0) + (1,) * count, (0.0, 0.0) + (-0.5,) * count
        rows.append(EpisodeRow(token_ids=ids, mask=mask, logprobs=logprobs, versions=mask, prompt_length=2))
        turns.append(Turn(start=2, num_tokens=count, policy_version=0, message={}, row=number))
    return replace(main, branches=tuple(rows), turns=tuple(turns))


def group() -> Group:
    """Rewards 1, 0, 0: the first episode has two rows."""
    return group_of(branching(0, 0, 1.0), episode(0, 1, 0.0), episode(0, 2, 0.0))


def by_episode(samples: Sequence[TrainingSample]) -> list[tuple[int, int, float]]:
    return [(one.episode.sibling, one.row, max(one.advantages, key=abs)) for one in samples if one.episode is not None]


def test_sums_are_over_rows_and_messages_are_the_main_rows() -> None:
    one = branching(0, 0, 1.0)
    assert [row.num_sampled_tokens for row in one.rows] == [2, 6] and one.num_sampled_tokens == 8
    assert one.completion_length == 3 + 6 and one.num_prompt_tokens == 4 + 2
    assert [turn.row for turn in one.turns] == [0, 1] and len(one.main_turns) == 1
    with_chat = replace(
        one,
        messages=({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}),
        turns=tuple(replace(turn, message={"role": "assistant", "content": "a"}) for turn in one.turns),
    )
    assert exchange_of(with_chat, has_tools=True).prompt == [{"role": "user", "content": "q"}]


@pytest.mark.parametrize(
    ("algorithm", "advantages"),
    [
        # mean 1/3 over three episodes (a mean over four rows would be 1/2)
        (GRPO(scale_rewards="none"), [2 / 3, -1 / 3, -1 / 3]),
        # deviation of (1, 0, 0) with n - 1: sqrt(1/3)
        (GRPO(), [2 / 3 / (3**-0.5 + 1e-4), -1 / 3 / (3**-0.5 + 1e-4), -1 / 3 / (3**-0.5 + 1e-4)]),
        # own reward minus the mean of the two others
        (RLOO(beta=0.0), [1.0, -0.5, -0.5]),
    ],
    ids=["dr_grpo", "grpo", "rloo"],
)
def test_an_episode_counts_once_in_the_baseline_and_its_rows_share_its_advantage(
    algorithm: Algorithm, advantages: list[float]
) -> None:
    samples = algorithm.credit([group()])
    first, second, third = advantages
    assert [(sibling, row) for sibling, row, _ in by_episode(samples)] == [(0, 0), (0, 1), (1, 0), (2, 0)]
    assert [one for _, _, one in by_episode(samples)] == pytest.approx([first, first, second, third])
    assert all(value == 0.0 or own for one in samples for value, own in zip(one.advantages, one.mask, strict=True))


def test_a_mean_over_episodes_divides_by_all_their_tokens() -> None:
    samples = GRPO().credit([group()])
    totals = step_totals(samples)
    assert (totals.num_samples, totals.num_tokens) == (3, 2 + 6 + 2 + 2)
    assert sample_weights(samples, "grpo") == pytest.approx([1 / (3 * 8), 1 / (3 * 8), 1 / 6, 1 / 6])
    assert sample_weights(samples, "dapo") == pytest.approx([1 / 12] * 4)
    assert sample_weights(samples, "luspo") == pytest.approx([1 / 3] * 4)
    assert sample_weights(samples, "dr_grpo", max_completion_length=10) == pytest.approx([1 / 30] * 4)
    assert RLOO(beta=0.0).weights(samples) == pytest.approx([1 / 3] * 4)
    # whatever the number of rows, each episode weighs the same in the mean: weights times tokens sum to 1/3 for each
    weighed = [
        weight * one.num_trained_tokens for weight, one in zip(sample_weights(samples, "grpo"), samples, strict=True)
    ]
    assert [weighed[0] + weighed[1], weighed[2], weighed[3]] == pytest.approx([1 / 3] * 3)
    assert pack(samples, [1.0] * 4).totals.num_samples == 3


def test_one_row_is_what_it_was() -> None:
    plain = episode(0, 0, 1.0)
    assert training_samples(plain, 2.0) == [training_sample(plain, 2.0)]
    assert training_sample(plain, 2.0).episode_tokens is None
    with pytest.raises(ValueError, match="too many values"):
        training_sample(branching(0, 0, 1.0), 2.0)


def test_turns_are_credited_in_their_own_rows() -> None:
    main, branch = turn_samples(branching(0, 0, 1.0), [3.0, -1.0])
    assert main.advantages == (0, 0, 0, 0, 3, 3, 0)
    assert branch.advantages == (0, 0, -1, -1, -1, -1, -1, -1)
    by_turn = GRPO(credit_level="turn", scale_rewards="none").credit([group()])
    # turn 0 is compared with all three (returns 1, 0, 0), turn 1 with nobody
    assert [max(one.advantages, key=abs) for one in by_turn] == pytest.approx([2 / 3, 0.0, -1 / 3, -1 / 3])


def test_the_kl_of_an_episode_is_the_sum_over_its_rows() -> None:
    one = branching(0, 0, 1.0)
    own = [value for row in one.rows for value, trained in zip(row.logprobs, row.mask, strict=True) if trained]
    assert sequence_kl(one, [value - 0.25 for value in own]) == pytest.approx(8 * 0.25)
    other = [episode(0, sibling, 0.0) for sibling in (1, 2)]
    reference = {(task_at(0).key, 0): tuple(value - 0.25 for value in own)}
    for rival in other:
        same = [value for value, trained in zip(rival.logprobs, rival.mask, strict=True) if trained]
        reference[task_at(0).key, rival.sibling] = tuple(same)
    samples = RLOO(beta=0.1).credit([group_of(one, *other)], reference)
    # R = 1 - 0.1 * 2.0 = 0.8 against 0 and 0
    assert [value for _, _, value in by_episode(samples)] == pytest.approx([0.8, 0.8, -0.4, -0.4])
    assert samples[1].ref_logprobs == pytest.approx((0.0, 0.0) + (-0.75,) * 6)


def test_all_rows_of_an_episode_are_in_one_step() -> None:
    groups = [group(), group_of(episode(1, 0, 1.0), branching(1, 1, 0.0), episode(1, 2, 0.5))]
    steps = split_round(groups, GRPO().credit(groups), 2, GroupPolicy(num_generations=3))
    assert [[(one.group, one.episode.sibling, one.row) for one in step if one.episode] for step in steps] == [
        [("train/0", 0, 0), ("train/0", 0, 1), ("train/0", 1, 0)],
        [("train/0", 2, 0), ("train/1", 0, 0)],
        [("train/1", 1, 0), ("train/1", 1, 1), ("train/1", 2, 0)],
    ]
