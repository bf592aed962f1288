from __future__ import annotations

import json
import math

import pytest

from envgrad.errors import EnvironmentFailure
from envgrad.evaluation.summary import evaluation_metrics, summarize
from envgrad.rollout.runner import Round
from envgrad.types import Episode, FailedEpisode, Group, StopReason, Task


def group(
    rewards: list[float | None],
    position: int = 0,
    *,
    environment: str = "game",
    index: int | None = None,
    stop: StopReason = StopReason.ANSWER,
    failed: int = 0,
) -> Group:
    task = Task(position=position, split="eval", environment=environment, group_id=1, seed=2, task_index=index)
    episodes = [
        Episode(task=task, sibling=number, token_ids=(5, 6, 7, 8), mask=(0, 1, 0, 1), logprobs=(0.0,) * 4,
                versions=(-1, 0, -1, 0), prompt_length=1, messages=(), turns=(), stop_reason=stop, reward=reward)
        for number, reward in enumerate(rewards)
    ]  # fmt: skip
    error = EnvironmentFailure("gone")
    failures = [
        FailedEpisode(task=task, sibling=len(rewards) + number, attempts=3, kind=error.kind, error=error)
        for number in range(failed)
    ]
    return Group(task=task, episodes=tuple(episodes), failures=tuple(failures))


def test_the_figures_of_a_round() -> None:
    played = Round(
        groups=(
            group([1.0, 1.0, 0.0, 0.0], 0),
            group([0.0, 0.0, 0.0, 0.2], 1, stop=StopReason.MAX_TURNS),
            group([1.0, 1.0, 1.0, 1.0], 2),
        )
    )
    summary = summarize(played)
    assert (summary.tasks, summary.unscored_tasks, summary.episodes) == (3, 0, 12)
    assert summary.reward is not None and summary.reward.mean == pytest.approx(6.2 / 12)
    # pass@1: 1/2, 0, 1; pass@2 of the first: 1 - C(2, 2) / C(4, 2) = 5/6; pass@4: 1, 0, 1.
    means = {k: estimate.mean for k, estimate in summary.pass_at.items()}
    assert means == pytest.approx({1: 1.5 / 3, 2: (5 / 6 + 0 + 1) / 3, 4: 2 / 3})
    assert summary.stop_reasons == {StopReason.ANSWER: 8 / 12, StopReason.MAX_TURNS: 4 / 12}
    assert (summary.prompt_tokens, summary.result_tokens, summary.sampled_tokens) == (12, 12, 24)
    assert summary.completion_length == 3.0


def test_what_counts_as_success_is_said() -> None:
    played = Round(groups=(group([0.2, 0.6], 0), group([0.6, 0.7], 1)))
    assert {k: estimate.mean for k, estimate in summarize(played, 0.6).pass_at.items()} == {1: 0.75, 2: 1.0}
    assert {k: estimate.mean for k, estimate in summarize(played).pass_at.items()} == {1: 0.0, 2: 0.0}


def test_failures_and_missing_rewards_are_never_zeros() -> None:
    played = Round(groups=(group([1.0, 1.0], 0),), dropped=(group([1.0], 1, failed=1), group([None, None], 2)))
    summary = summarize(played)
    assert summary.reward is not None and summary.reward.mean == 1.0
    assert summary.reward.clusters == 2  # the single episode of a dropped group counts
    assert (summary.tasks, summary.unscored_tasks, summary.unscored_episodes) == (3, 1, 2)
    assert summary.failures == {"environment": 1}
    # The task with one scored sample is left out of pass@2, not guessed.
    assert (summary.pass_at[1].clusters, summary.pass_at[2].clusters) == (2, 1)


def test_a_task_that_is_drawn_twice_is_one_task() -> None:
    twice = Round(groups=(group([1.0, 0.0], 0, index=7), group([0.0, 0.0], 1, index=7), group([1.0, 1.0], 2, index=8)))
    summary = summarize(twice)
    assert summary.tasks == 2
    assert summary.pass_at[1].mean == pytest.approx((0.25 + 1.0) / 2)
    assert summary.pass_at[2].mean == pytest.approx((0.5 + 1.0) / 2)
    # k ends at the samples of one draw: beyond, the mean would be over other tasks.
    assert {k: estimate.clusters for k, estimate in summary.pass_at.items()} == {1: 2, 2: 2}


def test_environments_have_figures_of_their_own() -> None:
    groups = (group([1.0], 0, environment="easy"), group([1.0], 1, environment="easy"), group([0.0], 2))
    summary = summarize(Round(groups=groups))
    assert list(summary.environments) == ["easy", "game"]
    assert summary.environments["easy"].pass_at[1].mean == 1.0
    metrics = summary.metrics()
    assert (metrics["reward/easy"], metrics["reward/game"]) == (1.0, 0.0)
    assert metrics["reward"] == pytest.approx(2 / 3)
    assert summarize(Round(groups=groups[:2])).environments == {}


def test_metrics_are_finite_and_leave_out_what_has_no_value() -> None:
    metrics = evaluation_metrics(Round(groups=(group([1.0, 0.0], 0),)))
    assert metrics == {"tasks": 1.0, "tasks/unscored": 0.0, "reward": 0.5, "pass@1": 0.5, "pass@2": 1.0}
    several = evaluation_metrics(Round(groups=(group([1.0, 0.0], 0), group([0.0, 0.0], 1))))
    assert {"reward_ci95", "pass@1_ci95", "pass@2_ci95"} <= set(several)
    assert all(math.isfinite(value) for value in several.values())
    assert evaluation_metrics(Round(groups=())) == {"tasks": 0.0, "tasks/unscored": 0.0}


def test_the_summary_is_plain_data() -> None:
    summary = summarize(Round(groups=(group([1.0, 0.0], 0, failed=1),)))
    data = json.loads(json.dumps(summary.as_dict(), allow_nan=False))
    assert data["reward"] == {"mean": 0.5, "standard_error": None, "ci95": None, "tasks": 1}
    assert data["pass_at"]["2"]["mean"] == 1.0
    assert (data["failed_episodes"], data["failures"]) == (1, {"environment": 1})
    assert data["stop_reasons"] == {"answer": 1.0}
