"""Filters, orders and searches give what a look at every episode gives, and text that people type breaks nothing."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envgrad.episodes import EpisodeFilter, EpisodeReader, EpisodeSummary, Use, export_jsonl
from envgrad.episodes.index import EpisodeIndex
from envgrad.episodes.queries import match_words, order_clause, where_clause
from envgrad.errors import ConfigurationError
from helpers.episode_runs import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("run")
    yield make_run(folder, episodes=800)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def reader(run: Path) -> Iterator[EpisodeReader]:
    with EpisodeReader(run) as reader:
        yield reader


CASES: list[tuple[dict[str, object], Callable[[EpisodeSummary], bool]]] = [
    ({}, lambda row: True),
    ({"split": "eval"}, lambda row: row.split == "eval"),
    ({"environment": "chess"}, lambda row: row.environment == "chess"),
    ({"first_step": 3, "last_step": 5}, lambda row: 3 <= row.step <= 5),
    ({"min_reward": 1.1}, lambda row: row.reward is not None and row.reward >= 1.1),
    ({"max_reward": 0.2}, lambda row: row.reward is not None and row.reward <= 0.2),
    ({"stop_reason": "max_turns"}, lambda row: row.stop_reason == "max_turns"),
    ({"use": Use.FILTERED}, lambda row: row.use is Use.FILTERED),
    ({"failed": True}, lambda row: row.failed is not None),
    ({"failed": False, "split": "train"}, lambda row: row.failed is None and row.split == "train"),
    ({"truncated": True}, lambda row: row.truncated),
    ({"task_index": 5}, lambda row: row.task_index == 5),
    ({"group": 7}, lambda row: row.group == 7),
    ({"current": None, "environment": "compass", "min_reward": 0.5, "stop_reason": "done"},
     lambda row: row.environment == "compass" and (row.reward or 0) >= 0.5 and row.stop_reason == "done"),
]  # fmt: skip


@pytest.mark.parametrize(("conditions", "keeps"), CASES)
def test_filters_keep_what_they_say(
    reader: EpisodeReader, conditions: dict[str, object], keeps: Callable[[EpisodeSummary], bool]
) -> None:
    every = reader.rows(order="oldest", limit=None)
    expected = [row for row in every if keeps(row)]
    chosen = EpisodeFilter(**conditions)  # type: ignore[arg-type]
    assert len(expected) > 0 and reader.rows(chosen, order="oldest", limit=None) == expected
    assert reader.count(chosen) == len(expected)
    newest = reader.rows(chosen, limit=3, offset=1)
    assert newest == expected[::-1][1:4]


def test_every_condition_acts() -> None:
    """A field without a clause would let everything through."""
    values: dict[str, object] = {"text": "word", "failed": False, "current": False}
    for one in fields(EpisodeFilter):
        where, _ = where_clause(EpisodeFilter(**{"current": None, one.name: values.get(one.name, 1)}))  # type: ignore[arg-type]
        assert where != "1", one.name


def test_orders_put_what_has_no_figure_last(reader: EpisodeReader) -> None:
    for order, value in (("reward", "reward"), ("advantage", "advantage"), ("tokens", "sampled_tokens")):
        for name, sign in ((order, 1), (f"-{order}", -1)):
            rows = reader.rows(order=name, limit=None)  # type: ignore[arg-type]
            figures = [getattr(row, value) for row in rows]
            there = [figure for figure in figures if figure is not None]
            assert figures[: len(there)] == sorted(there, key=lambda figure: sign * figure)
    with pytest.raises(ConfigurationError, match=r"order='best' must be one of newest"):
        order_clause("best")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"min_reward=2 is above max_reward=1"):
        EpisodeFilter(min_reward=2, max_reward=1)


def test_text_is_searched_in_prompts_answers_and_results(reader: EpisodeReader) -> None:
    numbers = [row.number for row in reader.rows(EpisodeFilter(failed=False), limit=None)]
    every = list(reader.episodes(numbers))

    def words_of(record: object) -> str:
        return " ".join(str(message) for message in record.messages).lower()  # type: ignore[attr-defined]

    expected = [record.summary.number for record in every if "harbour" in words_of(record)]
    found = reader.rows(EpisodeFilter(text="HARBOUR", failed=False), order="oldest", limit=None)
    assert [row.number for row in found] == expected and 0 < len(expected) < len(every)
    both = {row.number for row in reader.rows(EpisodeFilter(text="harbour tower"), limit=None)}
    assert both == {r.summary.number for r in every if "harbour" in words_of(r) and "tower" in words_of(r)}
    phrase = {row.number for row in reader.rows(EpisodeFilter(text='"find the harbour"'), limit=None)}
    assert phrase == {r.summary.number for r in every if "find the harbour" in words_of(r)} and phrase
    assert reader.count(EpisodeFilter(text="harb")) == reader.count(EpisodeFilter(text="harbour"))  # a beginning
    assert reader.count(EpisodeFilter(text="harb tower")) == 0  # of the last word only
    assert reader.count(EpisodeFilter(text="crashed")) == reader.count(EpisodeFilter(failed=True))
    assert reader.count(EpisodeFilter(text="?!")) == reader.count()


@given(st.text(max_size=40))
def test_whatever_is_typed_is_a_search(text: str) -> None:
    words = match_words(text)
    index = EpisodeIndex(":memory:")
    try:
        if words is not None:
            index.connection.execute("SELECT count(*) FROM words WHERE words MATCH ?", (words,)).fetchone()
    finally:
        index.close()


def test_groups_steps_previews_and_lists(reader: EpisodeReader) -> None:
    groups = reader.groups(2)
    assert len(groups) == 8 and all(len({row.group for row in group}) == 1 for group in groups)
    assert reader.group(groups[3][0].group) == groups[3]
    siblings = [row.sibling for row in groups[3]]
    assert siblings == sorted(siblings)
    steps = reader.steps()
    assert [step.step for step in steps] == list(range(len(steps)))
    train = reader.rows(EpisodeFilter(split="train", first_step=4, last_step=4), limit=None)
    assert steps[4].episodes == len(train) and steps[4].failed >= sum(row.failed is not None for row in train)
    used = [row for row in train if row.use in (Use.TRAINED, Use.FILTERED) and row.environment == "numbers"]
    scored = [row.reward for row in used if row.reward is not None]
    assert steps[4].rewards["numbers"] == pytest.approx(sum(scored) / len(scored))
    assert steps[4].eval_rewards and set(steps[4].metrics) >= {"loss", "reward", "eval_reward"}
    assert reader.environments() == ["chess", "compass", "numbers"] and reader.splits() == ["eval", "train"]
    assert reader.failure_kinds() == ["environment"] and "done" in reader.stop_reasons()
    assert reader.reward_components() == ["chess", "compass", "numbers", "turns"]
    row = train[0]
    preview = reader.previews([row.number], length=9)[row.number]
    record = reader.episode(row.number)
    if row.failed is None:
        assert preview.prompt == str(record.messages[1]["content"])[:9]
        assert preview.answer == str(record.turns[-1].message["content"])[:9]


def test_threads_share_a_reader(reader: EpisodeReader) -> None:
    expected = reader.count()
    wrong: list[object] = []

    def look() -> None:
        for number in range(20):
            if reader.count() != expected or reader.episode(number).summary.number != number:
                wrong.append(number)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_folder_without_a_log_is_an_error_that_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"holds no episode log; give the output_dir of a run"):
        EpisodeReader(tmp_path)


def test_a_folder_that_cannot_be_written_is_read(run: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copy"
    shutil.copytree(run, copied)
    folder = copied / "episodes"
    for path in folder.iterdir():
        path.chmod(0o444)
    folder.chmod(0o555)
    try:
        with EpisodeReader(copied) as reader:
            assert reader.count() > 700 and reader.episode(3).messages is not None
    finally:
        folder.chmod(0o755)


def test_json_lines_hold_every_episode(run: Path, reader: EpisodeReader, tmp_path: Path) -> None:
    count = export_jsonl(run, tmp_path / "episodes.jsonl", EpisodeFilter(split="eval"))
    lines = (tmp_path / "episodes.jsonl").read_text(encoding="utf-8").splitlines()
    assert count == len(lines) == reader.count(EpisodeFilter(split="eval")) > 0


def test_five_thousand_episodes_are_filtered_and_opened_at_once(tmp_path: Path) -> None:
    """The bounds hold for 100,000 (tests/longrun); with room for a busy machine."""
    make_run(tmp_path, episodes=5_000, round_episodes=256, tokens=8)
    with EpisodeReader(tmp_path) as reader:
        reader.episode(0)
        began = time.perf_counter()
        assert reader.rows(EpisodeFilter(environment="chess", min_reward=0.5), order="-reward")
        assert reader.count(EpisodeFilter(text="tower")) > 0
        assert reader.episode(4_000).messages is not None
        assert time.perf_counter() - began < 12.0
