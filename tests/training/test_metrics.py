from __future__ import annotations

from dataclasses import replace

import pytest

from envgrad.rollout.group import GroupPolicy
from envgrad.rollout.runner import Round
from envgrad.training.metrics import MetricAverages, round_metrics
from envgrad.training.stream import split_round
from envgrad.types import (
    Episode,
    FailedEpisode,
    Group,
    StopReason,
    Task,
    ToolCall,
    ToolOutcome,
    TrainingSample,
    Turn,
)


def outcome(ok: bool, name: str = "inc") -> ToolOutcome:
    return ToolOutcome(call=ToolCall(id="a", name=name, arguments={}), content="", ok=ok)


def episode(position, sibling, reward, *, tokens=4, stop=StopReason.ANSWER, outcomes=(), environment="e", rewards=None):
    task = Task(position=position, split="train", environment=environment, group_id=9, seed=9)
    turns = (Turn(start=1, num_tokens=tokens, policy_version=0, message={}, outcomes=tuple(outcomes)),)
    return Episode(
        task=task, sibling=sibling, token_ids=(1,) * (1 + tokens), mask=(0,) + (1,) * tokens,
        logprobs=(0.0,) * (1 + tokens), versions=(0,) * (1 + tokens), prompt_length=1, messages=(), turns=turns,
        stop_reason=stop, reward=reward, rewards={"e": reward} if rewards is None else rewards,
    )  # fmt: skip


def test_numbers_of_a_round_by_hand():
    first = Group(
        task=episode(0, 0, 1.0).task,
        episodes=(
            episode(0, 0, 1.0, tokens=2, outcomes=[outcome(True)]),
            episode(0, 1, 0.0, tokens=6, outcomes=[outcome(False, "nope")]),
            episode(0, 2, None, tokens=4, stop=StopReason.MAX_TURNS),
        ),
        start_mismatch="word: 'a' != 'b'",
    )
    second = Group(task=episode(1, 0, 1.0).task, episodes=(episode(1, 0, 1.0), episode(1, 1, 1.0)))
    failure = FailedEpisode(task=second.task, sibling=2, attempts=3, kind="environment", error=OSError("x"))
    dropped = Group(task=second.task, episodes=(), failures=(failure,))
    metrics = round_metrics(Round(groups=(first, second), dropped=(dropped,)))
    assert metrics["reward"] == pytest.approx(3 / 4) and metrics["episodes/unscored"] == 1
    # Rewards 1, 0, 1, 1: their squared distances to 3/4 sum to 3/4, over N - 1 = 3.
    assert metrics["reward_std"] == pytest.approx(0.5) and metrics["frac_reward_zero_std"] == 0.5
    assert metrics["rewards/e/mean"] == pytest.approx(3 / 4) and metrics["rewards/e/std"] == pytest.approx(0.5)
    assert metrics["completions/mean_length"] == 4 and metrics["completions/clipped_ratio"] == pytest.approx(1 / 5)
    assert metrics["completions/mean_terminated_length"] == 4
    assert metrics["tokens/sampled"] == 20 and metrics["stop/max_turns"] == pytest.approx(1 / 5)
    assert metrics["group/start_mismatch"] == 0.5 and metrics["groups/dropped"] == 1
    assert metrics["failures/total"] == metrics["failures/environment"] == 1


def test_tool_frequencies_of_a_good_call_an_unknown_tool_and_no_call():
    group = Group(
        task=episode(0, 0, 1.0).task,
        episodes=(
            episode(0, 0, 1.0, outcomes=[outcome(True)]),
            episode(0, 1, 1.0, outcomes=[outcome(False, "nope")]),
            episode(0, 2, 1.0),
        ),
    )
    metrics = round_metrics(Round(groups=(group,)))
    assert metrics["tools/call_frequency"] == pytest.approx(2 / 3)
    assert metrics["tools/failure_frequency"] == pytest.approx(1 / 2)


def test_a_mixture_has_its_rewards_by_environment():
    groups = tuple(
        Group(task=one.task, episodes=(one,))
        for one in (episode(0, 0, 1.0, environment="a"), episode(1, 0, 0.0, environment="b"))
    )
    metrics = round_metrics(Round(groups=groups))
    assert (metrics["reward/a"], metrics["reward/b"], metrics["episodes/a"]) == (1.0, 0.0, 1.0)


def test_a_dropped_episode_leaves_its_step_smaller_and_shifts_no_other():
    groups, samples = [], []
    for position in range(3):
        episodes = tuple(episode(position, sibling, 1.0) for sibling in range(4) if (position, sibling) != (0, 1))
        groups.append(Group(task=episodes[0].task, episodes=episodes))
        samples += [
            TrainingSample(
                token_ids=one.token_ids, mask=one.mask, logprobs=one.logprobs, versions=one.versions,
                advantages=(0.0,) * 5, prompt_length=1, group=one.task.key, episode=one,
            )
            for one in episodes
        ]  # fmt: skip
    steps = split_round(groups, samples, 6, GroupPolicy(num_generations=4))
    found = [[(s.episode.task.position, s.episode.sibling) for s in step] for step in steps]
    assert found == [
        [(0, 0), (0, 2), (0, 3), (1, 0), (1, 1)],
        [(1, 2), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3)],
    ]
    empty = split_round(groups, samples[:3], 6, GroupPolicy(num_generations=4))
    assert [len(step) for step in empty] == [3, 0], "a step that lost all its samples is kept"


def test_shares_that_a_round_leaves_out_count_as_zero_in_the_average():
    averages = MetricAverages()
    averages.add({"failures/total": 0.0, "stop/done": 1.0, "kl": 1.0})
    averages.add({"failures/total": 2.0, "failures/reset_timeout": 2.0, "stop/done": 0.5, "stop/context": 0.5})
    assert averages.take() == {
        "failures/total": 1.0, "failures/reset_timeout": 1.0, "stop/done": 0.75, "stop/context": 0.25, "kl": 1.0,
    }  # fmt: skip


def test_lengths_count_sampled_tokens_and_not_tool_results():
    plain = episode(0, 0, 1.0, tokens=3)
    with_result = replace(plain, sibling=1, token_ids=(1,) * 8, mask=(0, 1, 1, 0, 0, 0, 1, 1), logprobs=(0.0,) * 8,
                          versions=(0,) * 8)  # fmt: skip
    metrics = round_metrics(Round(groups=(Group(task=plain.task, episodes=(plain, with_result)),)))
    assert metrics["completions/mean_length"] == 3.5 and metrics["completions/max_length"] == 4
    assert metrics["completions/min_terminated_length"] == 3 and metrics["completions/max_terminated_length"] == 4
