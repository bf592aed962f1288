from __future__ import annotations

import pytest
import torch

from envgrad.algorithms.grpo import GRPO
from envgrad.rollout.group import GroupPolicy
from envgrad.training.rounds import teaches
from envgrad.training.stream import StepStream, split_round
from envgrad.types import Episode, Group, StopReason, Task


def group_of(position, rewards, environment="a", parts=None):
    """``parts``: the rewards' components."""
    task = Task(position=position, split="train", environment=environment, group_id=position + 3, seed=position + 4)
    episodes = tuple(
        Episode(
            task=task, sibling=number, token_ids=(1, 2 + number, 3), mask=(0, 1, 1), logprobs=(0.0, -1.0, -2.0),
            versions=(-1, 0, 0), prompt_length=1, messages=(), turns=(), stop_reason=StopReason.ANSWER, reward=reward,
            rewards={"env": reward} if parts is None else parts[number],
        )
        for number, reward in enumerate(rewards)
    )  # fmt: skip
    return Group(task=task, episodes=episodes)


def stream_of(algorithm, temperatures=None):
    return StepStream(
        rounds=None, policy=GroupPolicy(num_generations=2), algorithm=algorithm, episodes_per_step=4,
        num_iterations=1, max_tokens=None, pack_mode="shared", prepare=None, temperatures=temperatures or {},
    )  # fmt: skip


class TestSplit:
    def test_episodes_have_their_places_whatever_was_dropped(self):
        groups = [group_of(0, [0.0, 1.0, 2.0]), group_of(3, [1.0, 3.0, 0.0])]
        samples = [sample for sample in GRPO().credit(groups) if sample.episode.sibling != 1]
        steps = split_round(groups, samples, 2, GroupPolicy(num_generations=3))
        names = [[(sample.group, sample.episode.sibling) for sample in step] for step in steps]
        assert names == [[("train/0", 0)], [("train/0", 2), ("train/3", 0)], [("train/3", 2)]]

    def test_groups_of_their_own_size_are_whole_and_count_as_one_of_the_usual_size(self):
        groups = [group_of(0, [0.0, 1.0]), group_of(1, [0.0, 1.0, 2.0, 3.0, 4.0], "b"), group_of(2, [0.0, 1.0])]
        policy = GroupPolicy(num_generations=2, sizes={"b": 5})
        steps = split_round(groups, GRPO().credit(groups), 4, policy)
        names = [[sample.group for sample in step] for step in steps]
        assert names == [["train/0"] * 2 + ["train/1"] * 5, ["train/2"] * 2]

    def test_nothing(self):
        assert split_round([], [], 4, GroupPolicy(num_generations=2)) == []


class TestTeaches:
    def test_equal_rewards_teach_nothing(self):
        decide = teaches(GRPO())
        assert decide(group_of(0, [0.5, 1.0])) and not decide(group_of(0, [0.5, 0.5, None]))

    def test_where_the_reference_is_read_rewards_decide(self):
        class ReadsReference(GRPO):
            credit_reads_reference = True

            def credit(self, groups, reference=None):
                raise AssertionError("there are no log-probs of the reference yet")

        decide = teaches(ReadsReference())
        assert decide(group_of(0, [0.5, 1.0])) and not decide(group_of(0, [1.0, 1.0, None]))

    def test_beside_a_teacher_rewards_decide(self):
        class Taught(GRPO):
            teacher = object()

            def credit(self, groups, reference=None):
                raise AssertionError("what the teacher will say is not known yet")

        assert teaches(Taught())(group_of(0, [0.5, 1.0]))
        assert not teaches(Taught())(group_of(0, [1.0, 1.0]))

    def test_the_algorithm_decides_not_the_sum(self):
        """Components that differ and add up to the same teach an algorithm that compares each of them."""
        parts = [{"x": 1.0, "y": 0.0}, {"x": 1.0, "y": 0.0}, {"x": 0.0, "y": 1.0}]
        group = group_of(0, [1.0, 1.0, 1.0], parts=parts)
        assert not teaches(GRPO())(group)
        weighted = GRPO(multi_objective_aggregation="normalize_then_sum", reward_weights={"x": 2.0})
        assert teaches(weighted)(group)


class TestTemperatures:
    @pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
    def test_each_micro_batch_has_one_and_weights_are_of_the_whole_step(self, loss_type):
        algorithm = GRPO(loss_type=loss_type)
        groups = [group_of(0, [0.0, 1.0]), group_of(1, [0.0, 0.5, 2.0], "b"), group_of(2, [0.0, 1.0], "c")]
        samples = algorithm.credit(groups)
        batch = stream_of(algorithm)._pack(samples, {"train/0": None, "train/1": 0.5, "train/2": None})
        whole = stream_of(algorithm)._pack(samples, dict.fromkeys(("train/0", "train/1", "train/2")))
        assert [one.temperature for one in whole.micro_batches] == [None]
        assert [one.temperature for one in batch.micro_batches] == [None, 0.5]
        assert [one.samples for one in batch.micro_batches] == [(0, 1, 5, 6), (2, 3, 4)]
        assert batch.samples == whole.samples and batch.totals == whole.totals
        assert batch.num_required_tokens == whole.num_required_tokens
        weights = torch.cat([one.weights for one in batch.micro_batches])
        assert weights.sum().item() == pytest.approx(whole.micro_batches[0].weights.sum().item())

    def test_a_step_that_lost_all_its_samples(self):
        batch = stream_of(GRPO())._pack([], {})
        assert batch.micro_batches == () and batch.samples == ()
