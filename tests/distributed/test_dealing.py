"""Who trains what of a step, and what ranks say to each other about it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from envgrad.batch import Batch, StepTotals, padding_micro_batch
from envgrad.distributed.dealing import deal, imbalance, limit_for, share_of
from envgrad.distributed.gathering import gather_lists, gather_tensors
from envgrad.distributed.meeting import Step, meet
from envgrad.distributed.ranks import Alone
from envgrad.distributed.wire import Led, Played, from_bytes, to_bytes
from envgrad.errors import EnvironmentFailure, RankFailed
from envgrad.losses import LossOutputs, Metric
from envgrad.packing import pack
from envgrad.rollout.runner import Round
from envgrad.types import TrainingSample
from helpers.thread_ranks import ThreadRanks, on_threads
from helpers.training_checkpoints import group_of, stream_of_rows


@given(costs=st.lists(st.integers(1, 500), max_size=40), ranks=st.integers(1, 9))
def test_every_micro_batch_is_dealt_once_and_evenly(costs: list[int], ranks: int) -> None:
    shares = deal(costs, ranks)
    assert sorted(place for share in shares for place in share) == list(range(len(costs)))
    loads = [sum(costs[place] for place in share) for share in shares]
    assert max(loads) <= sum(costs) / ranks + max(costs, default=0)


def _sample(group: str, length: int) -> TrainingSample:
    size = 5 + length
    return TrainingSample(
        token_ids=tuple(range(size)), mask=(0,) * 5 + (1,) * length, logprobs=(0.0,) * size, versions=(0,) * size,
        advantages=(0.0,) * 5 + (1.0,) * length, prompt_length=5, group=group,
    )  # fmt: skip


@given(lengths=st.lists(st.integers(1, 60), min_size=8, max_size=40), ranks=st.integers(2, 5))
def test_ranks_have_equal_counts_and_about_equal_tokens(lengths: list[int], ranks: int) -> None:
    samples = [_sample(f"train/{number // 4}", length) for number, length in enumerate(lengths)]
    batch = pack(samples, [1.0] * len(samples), max_tokens=limit_for(samples, ranks, None))
    shares = [share_of(batch, rank, ranks) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    kept = [packed.samples for share in shares for packed in share.micro_batches if packed.samples]
    assert sorted(kept) == sorted(packed.samples for packed in batch.micro_batches)
    longest = max(packed.num_forwarded_tokens for packed in batch.micro_batches)
    assert imbalance(batch, ranks) <= 1 + longest * ranks / batch.num_forwarded_tokens


def test_an_empty_step_is_dealt_too() -> None:
    empty = Batch(micro_batches=(), samples=(), totals=StepTotals(num_samples=0, num_tokens=0), num_required_tokens=0)
    assert len(share_of(empty, 1, 3)) == 0 and imbalance(empty, 3) == 1.0
    one = Batch(micro_batches=(padding_micro_batch(),), samples=(), totals=empty.totals, num_required_tokens=1)
    assert [len(share_of(one, rank, 3)) for rank in range(3)] == [1, 1, 1]


def test_metrics_are_sums_divided_once() -> None:
    def outputs(rank: int) -> list[LossOutputs]:
        value, count = torch.tensor(float(rank)), torch.tensor(float(2 * rank))
        metrics = {"kl": Metric(value=value, count=count), "ratio/max": Metric(value=value, count=count, reduce="max")}
        return [LossOutputs(loss=torch.tensor(0.5), metrics=metrics)] * rank

    found = on_threads(3, lambda ranks: meet(ranks, outputs(ranks.rank), fault=None, signal=None))
    assert found == [Step(fault=None, loss=1.5, metrics={"kl": 5 / 10, "ratio/max": 2.0}, signal=None)] * 3


def test_a_step_that_is_not_finite_somewhere_is_so_for_all() -> None:
    faults = [None, "the gradient's norm is nan, of GRPO's loss", "the loss of GRPO is nan over train/3/1"]
    found = on_threads(
        3, lambda ranks: meet(ranks, [], fault=faults[ranks.rank], signal=15 if ranks.rank == 1 else None)
    )
    assert {step.fault for step in found} == {faults[2]} and {step.signal for step in found} == {15}


def test_tensors_and_lists_of_all_ranks_come_together() -> None:
    def run(ranks: ThreadRanks) -> tuple[dict[str, torch.Tensor], dict[str, list[int]]]:
        own = {} if ranks.rank == 1 else {str(ranks.rank): torch.tensor([ranks.rank / 3])}
        return gather_tensors(ranks, own), gather_lists(ranks, {"a": [ranks.rank], f"b{ranks.rank}": [1]})

    for tensors, lists in on_threads(3, run):
        assert {name: one.item() for name, one in tensors.items()} == {"0": 0.0, "2": torch.tensor(2 / 3).item()}
        assert lists == {"a": [0, 1, 2], "b0": [1], "b1": [1], "b2": [1]}
    assert gather_lists(Alone(), {"a": [1]}) == {"a": [1]}


def test_groups_arrive_as_they_were_with_the_readers_own_tasks() -> None:
    drawn = stream_of_rows().take(3)  # their rows hold what no pickle takes as it is
    group = group_of(drawn[1])
    mine = stream_of_rows().take(3)
    found = from_bytes(to_bytes(Played(groups={1: group})), mine)
    assert isinstance(found, Played)
    other = found.groups[1]
    assert other.task is mine[1] and all(episode.task is mine[1] for episode in other.episodes)
    for one, two in zip(group.episodes, other.episodes, strict=True):
        assert (one.token_ids, one.logprobs, one.messages, one.turns) == (
            two.token_ids,
            two.logprobs,
            two.messages,
            two.turns,
        )
        assert two.extras == {"note": str([1, "x"])}
        assert two.turns[0].message == one.turns[0].message
    failure = other.failures[0]
    assert isinstance(failure.error, EnvironmentFailure) and str(failure.error) == "it broke"


def test_what_cannot_be_sent_is_an_error_that_says_so() -> None:
    task = stream_of_rows().take(1)[0]
    group = group_of(task, messages=({"role": "user", "content": lambda: None},))
    with pytest.raises(RankFailed, match="cannot be given to the other ranks"):
        to_bytes(Played(groups={0: group}))


def test_a_led_round_brings_its_tasks() -> None:
    task = replace(stream_of_rows().take(1)[0], row={"prompt": "p"})
    led = Led(played=Round(groups=(group_of(task),)), metrics={"a": 1.0}, unused=2)
    found = from_bytes(to_bytes(led))
    assert isinstance(found, Led) and found.played.groups[0].task == task and found.unused == 2
