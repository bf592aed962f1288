from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from math import exp
from pathlib import Path

import pytest

from envgrad.episodes import EpisodeFilter, EpisodeReader
from envgrad.episodes.log import EpisodeLog
from envgrad.errors import ConfigurationError
from envgrad.rollout.runner import Round
from envgrad.viewer.serve import run_places
from envgrad.viewer.source import MAX_POINTS, RunSource, plain, thinned
from helpers.episode_runs import make_group, make_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "first", 400)


@pytest.fixture(scope="module")
def source(folder: Path) -> Iterator[RunSource]:
    source = RunSource(run_places([folder])[0])
    yield source
    source.close()


def test_the_run_says_what_there_is_to_choose(source: RunSource, folder: Path) -> None:
    run = source.run()
    assert run["environments"] == ["chess", "compass", "numbers"]
    assert run["splits"] == ["train", "eval"]
    with EpisodeReader(folder) as reader:
        assert run["episodes"] == reader.count() > 300
    assert (run["name"], run["dropped"], run["left_behind"], run["parts"]) == ("first", 0, 0, False)


def test_columns_over_steps_have_one_length_and_the_reader_s_means(source: RunSource, folder: Path) -> None:
    steps = source.steps()
    with EpisodeReader(folder) as reader:
        whole = reader.steps()
    assert steps["steps"] == [one.step for one in whole]
    columns = [*steps["rewards"].values(), *steps["eval_rewards"].values(), *steps["headline"].values()]
    assert {len(column) for column in columns} == {len(whole)}
    assert steps["rewards"]["chess"] == [one.rewards.get("chess") for one in whole]
    assert sum(steps["failed"]) == sum(one.failed for one in whole) > 0


def test_an_evaluation_without_a_logged_metric_is_its_environments_mean(source: RunSource, folder: Path) -> None:
    with EpisodeReader(folder) as reader:
        first = next(one for one in reader.steps() if one.eval_rewards and "eval_reward" in one.metrics)
    at = source.steps()["steps"].index(first.step)
    assert source.steps()["headline"]["eval_reward"][at] == first.metrics["eval_reward"]


def test_a_page_of_the_list_has_texts_and_the_whole_count(source: RunSource) -> None:
    found = source.episodes(EpisodeFilter(environment="chess"), order="oldest", limit=5, offset=2)
    assert len(found["rows"]) == 5 and found["total"] > 50
    row = found["rows"][0]
    assert row["prompt"].startswith("Task ") and row["answer"]
    assert isinstance(row["group_id"], str) and int(row["group_id"]) > 2**53
    assert source.episodes(EpisodeFilter(), order="newest", limit=0, offset=0)["rows"] == []
    json.dumps(found, allow_nan=False)


def test_the_newest_step_is_shown_first_and_steps_are_walked(source: RunSource) -> None:
    newest = source.step(None, None, None)
    steps = source.steps()
    played = [step for step, count in zip(steps["steps"], steps["episodes"], strict=True) if count]
    assert (newest["step"], newest["split"]) == (played[-1], "train")
    assert (newest["previous"], newest["next"]) == (played[-2], None)
    assert source.step(played[0], "train", None)["next"] == played[1]
    siblings = [row["sibling"] for row in newest["groups"][0]["rows"]]
    assert siblings == sorted(siblings)
    only = source.step(2, "train", "chess")
    assert {row["environment"] for group in only["groups"] for row in group["rows"]} == {"chess"}
    assert only["environments"] == ["chess", "compass", "numbers"]


def test_a_step_that_was_only_evaluated_is_shown_as_evaluation(tmp_path: Path) -> None:
    log = EpisodeLog(tmp_path / "episodes")
    log.write(Round(groups=(make_group(random.Random(1), 0, "compass"),)), step=0)
    log.write(Round(groups=(make_group(random.Random(2), 0, "compass", split="eval", siblings=1),)), step=3)
    log.close()
    source = RunSource(run_places([tmp_path])[0])
    assert (source.step(None, None, None)["step"], source.step(None, None, None)["split"]) == (0, "train")
    assert (source.step(3, None, None)["split"], len(source.step(3, None, None)["groups"])) == ("eval", 1)
    assert source.step(0, "eval", None)["groups"] == []
    source.close()


def test_a_group_has_its_siblings_whole_and_failed_ones_with_their_error(source: RunSource, folder: Path) -> None:
    with EpisodeReader(folder) as reader:
        failed = reader.rows(EpisodeFilter(failed=True), limit=1)[0]
    group = source.group(failed.group)
    assert len(group["episodes"]) == 8
    lost = group["episodes"][failed.sibling]
    assert "the browser crashed" in lost["error"] and lost["messages"] == []
    other = next(one for one in group["episodes"] if one["summary"]["failed"] is None)
    assert other["turns"] and other["messages"][other["opening"]]["role"] == "assistant"
    with pytest.raises(ConfigurationError, match="there is no group 99999"):
        source.group(99_999)


def test_an_opening_that_all_siblings_share_is_given_once(tmp_path: Path) -> None:
    group = make_group(random.Random(1), 0, "compass")
    opening = group.episodes[0].messages[:2]
    same = replace(
        group, episodes=tuple(replace(one, messages=(*opening, *one.messages[2:])) for one in group.episodes)
    )
    log = EpisodeLog(tmp_path / "episodes")
    log.write(Round(groups=(same,)), step=0)
    log.close()
    source = RunSource(run_places([tmp_path])[0])
    assert source.group(0)["opening"] == [dict(message) for message in opening]
    source.close()


def test_other_parts_of_a_game_stand_beside_their_agent_and_share_nothing_with_the_opening(tmp_path: Path) -> None:
    group = make_group(random.Random(1), 0, "compass", siblings=3)
    opening = group.episodes[0].messages[:2]
    episodes = [replace(one, messages=(*opening, *one.messages[2:])) for one in group.episodes]
    rival = replace(
        episodes[0], part="rival", reward=-1.0, messages=({"role": "user", "content": "You are the rival."},)
    )
    whole = replace(group, episodes=(replace(episodes[0], parts=(rival,)), *episodes[1:]))
    log = EpisodeLog(tmp_path / "episodes")
    log.write(Round(groups=(whole,)), step=0)
    log.close()
    source = RunSource(run_places([tmp_path])[0])
    found = source.group(0)
    named = {(one["summary"]["sibling"], one["summary"]["part"]) for one in found["episodes"]}
    assert (0, "rival") in named and len(named) == len(episodes) + 1
    assert found["opening"] == [dict(message) for message in opening]
    assert source.run()["parts"] is True
    source.close()


def test_tokens_come_in_columns_with_ratios_where_both_log_probs_are_there(source: RunSource, folder: Path) -> None:
    with EpisodeReader(folder) as reader:
        row = reader.rows(EpisodeFilter(split="train", failed=False), order="-advantage", limit=1)[0]
        record = reader.episode(row.number).rows[0]
    tokens = source.tokens(row.number, 0)
    length = len(record.token_ids)
    assert {len(tokens[name]) for name in ("ids", "mask", "versions", "logprobs", "ratios", "advantages")} == {length}
    at = record.mask.index(1)
    assert record.trainer_logprobs is not None
    assert tokens["ratios"][at] == pytest.approx(exp(record.trainer_logprobs[at] - record.logprobs[at]), abs=1e-6)
    assert tokens["logprobs"][0] is None and tokens["mask"][0] == 0
    assert tokens["texts"] is None and tokens["decoded"] is False
    with pytest.raises(ConfigurationError, match="so there is no row 7"):
        source.tokens(row.number, 7)


def test_evaluation_has_no_advantages_to_show(source: RunSource) -> None:
    row = source.episodes(EpisodeFilter(split="eval", failed=False), order="newest", limit=1, offset=0)["rows"][0]
    tokens = source.tokens(row["number"], 0)
    assert tokens["advantages"] is None and tokens["ratios"] is None


def test_news_is_nothing_until_something_is_written(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 64, eval_every=0)
    source = RunSource(run_places([folder])[0])
    cursor = source.cursor()
    assert source.news(cursor) == {"cursor": cursor, "changed": False, "reset": False, "run": None}
    make_run(folder, 64, eval_every=0, seed=2)
    news = source.news(cursor)
    assert news["changed"] and news["run"]["episodes"] > 64
    assert source.news(news["cursor"])["changed"] is False
    for bad in ("x", "1.2", "1.2.3.4", "1.2." + "9" * 40):
        with pytest.raises(ConfigurationError, match="is no cursor"):
            source.news(bad)
    source.close()


def test_values_that_json_does_not_hold_become_plain() -> None:
    found = plain({"a": float("inf"), "b": (1, {2}), 3: Path("/x"), "c": True, "d": None, "e": -0.5})
    assert found == {"a": None, "b": [1, "{2}"], "3": "/x", "c": True, "d": None, "e": -0.5}
    assert found["c"] is True


def test_long_curves_are_thinned_to_means_and_keep_their_last_point() -> None:
    points = [(float(step), float(step % 2)) for step in range(5000)]
    kept = thinned(points, MAX_POINTS)
    assert len(kept) <= MAX_POINTS
    assert kept[-1] == (4999.0, 1.0)
    assert all(abs(value - 0.5) < 0.1 for _, value in kept[:-1])
