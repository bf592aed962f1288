"""The log loses nothing, stays within its limit, tells lineages apart, and survives what kills its run."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from envgrad.episodes import EpisodeFilter, EpisodeReader, Use
from envgrad.episodes import log as log_module
from envgrad.episodes.index import INDEX_NAME, EpisodeIndex
from envgrad.episodes.log import EpisodeLog
from envgrad.episodes.parts import part_files, read_rows
from envgrad.errors import ConfigurationError, EpisodeLogError
from envgrad.rollout.runner import Round
from envgrad.types import Group
from helpers.episode_runs import make_credit, make_group, make_run


def group(position: int, *, split: str = "train", environment: str = "compass", siblings: int = 4) -> Group:
    return make_group(random.Random(position), position, environment, split=split, siblings=siblings)


def played(*positions: int, split: str = "train") -> Round:
    return Round(groups=tuple(group(position, split=split) for position in positions))


def size(one: Round) -> int:
    return sum(len(g.episodes) + len(g.failures) for g in (*one.groups, *one.filtered, *one.stale, *one.dropped))


def test_what_was_written_is_read_back_whole(tmp_path: Path) -> None:
    log = EpisodeLog(tmp_path / "episodes")
    one = group(0)
    credit = make_credit(random.Random(1), [one])
    log.write(Round(groups=(one,)), step=3, credit=lambda: credit)
    log.close()
    with EpisodeReader(tmp_path) as reader:
        rows = reader.rows(EpisodeFilter(failed=False), order="oldest")
        assert [row.sibling for row in rows] == [episode.sibling for episode in one.episodes]
        for row, episode in zip(rows, one.episodes, strict=True):
            record = reader.episode(row.number)
            assert (row.step, row.split, row.environment, row.position) == (3, "train", "compass", 0)
            assert (row.group_id, row.seed, row.reward) == (one.task.group_id, one.task.seed, episode.reward)
            assert row.rewards == episode.rewards and row.stop_reason == episode.stop_reason
            assert row.use is Use.TRAINED and row.turns == len(episode.turns)
            assert row.sampled_tokens == episode.num_sampled_tokens and row.prompt_tokens == episode.num_prompt_tokens
            assert record.messages == episode.messages and record.opening == 2 and record.tools == episode.tools
            assert record.seconds == episode.seconds and record.extras == episode.extras
            for token_row, logged in zip(episode.rows, record.rows, strict=True):
                assert logged.token_ids == token_row.token_ids and logged.mask == token_row.mask
                assert logged.versions == token_row.versions and logged.prompt_length == token_row.prompt_length
                assert logged.logprobs == pytest.approx(token_row.logprobs, abs=1e-6)
            given = credit.advantages[(*episode.key, 0)]
            assert record.rows[0].advantages == pytest.approx(given, abs=1e-6)
            total = sum(sum(credit.advantages[(*episode.key, number)]) for number in range(len(episode.rows)))
            assert row.advantage == pytest.approx(total / episode.num_sampled_tokens)
            sampled = [v for v, m in zip(record.rows[0].trainer_logprobs or (), record.rows[0].mask, strict=True) if m]
            assert sampled == pytest.approx(credit.trainer_logprobs[(*episode.key, 0)], abs=1e-6)
            for turn, recorded in zip(episode.turns, record.turns, strict=True):
                assert (recorded.text, recorded.message, recorded.reward) == (turn.text, turn.message, turn.reward)
                assert [call.result for call in recorded.calls] == [outcome.content for outcome in turn.outcomes]
                assert [call.arguments for call in recorded.calls] == [o.call.arguments for o in turn.outcomes]


def test_every_use_is_told_and_failures_keep_their_kind_and_causes(tmp_path: Path) -> None:
    rng = random.Random(8)
    groups = [make_group(rng, position, "numbers", siblings=20) for position in range(5)]
    one = Round(groups=(groups[0],), filtered=(groups[1],), stale=(groups[2],), dropped=(groups[3],))
    log = EpisodeLog(tmp_path / "episodes")
    log.write(one, step=0)
    log.write(played(9, split="eval"), step=0)
    log.close()
    with EpisodeReader(tmp_path) as reader:
        for use, of_use in zip(list(Use)[:4], groups[:4], strict=True):
            assert reader.count(EpisodeFilter(use=use)) == len(of_use.episodes)
        assert reader.count(EpisodeFilter(use=Use.EVALUATED)) == len(group(9).episodes)
        failed = reader.rows(EpisodeFilter(failed=True), limit=None)
        assert len(failed) == sum(len(g.failures) for g in (*groups[:4], group(9, split="eval"))) > 0
        assert {row.failed for row in failed} == {"environment"} and {row.attempt for row in failed} == {2}
        error = reader.episode(failed[0].number).error
        assert error is not None and error.splitlines()[1] == "ConnectionError: the browser crashed"
        # Failed siblings stand in their group, and are found by the words of their error.
        with_failure = reader.group(failed[0].group)
        assert [row.sibling for row in with_failure] == sorted(row.sibling for row in with_failure)
        assert failed[0].number in {row.number for row in with_failure}
        assert reader.count(EpisodeFilter(text="browser crashed")) == len(failed)
        # Means are the trainer's: of what was trained or filtered, not of stale or dropped groups.
        scored = [reward for g in groups[:2] for reward in g.scored_rewards]
        assert reader.steps()[0].rewards["numbers"] == pytest.approx(sum(scored) / len(scored))


def test_a_running_log_is_read_while_it_is_written_and_parts_fill_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "PART_EPISODES", 20)
    log = EpisodeLog(tmp_path / "episodes")
    log.write(played(0), step=0)
    log.flush()
    assert not part_files(tmp_path / "episodes")
    with EpisodeReader(tmp_path) as reader:
        news = reader.follow()
        assert (news.episodes, news.reset) == (4, False) and not reader.follow(news.cursor).changed
        first = reader.episode(0)  # whole, though in no part yet
        for step in range(1, 12):
            log.write(played(step), step=step)
        log.metrics(12, {"loss": 0.5, "bad": float("inf")})
        log.flush()
        later = reader.follow(news.cursor)
        assert (later.changed, later.episodes, later.last_step, later.reset) == (True, 44, 12, False)
        assert len(part_files(tmp_path / "episodes")) == 2
        assert reader.episode(0) == first  # the same from its part
        assert [record.summary.number for record in reader.episodes(range(48))] == list(range(48))
        assert reader.steps()[-1].metrics["loss"] == 0.5
    log.close()
    rows = [row["number"] for path in part_files(tmp_path / "episodes") for row in read_rows(path)]
    assert rows == list(range(48))


def test_a_resume_hides_what_lies_beyond_its_checkpoint_and_keeps_it(tmp_path: Path) -> None:
    log = EpisodeLog(tmp_path / "episodes")
    log.begin(0)
    for step in range(4):
        log.write(played(step), step=step)
        log.metrics(step + 1, {"loss": float(step + 1)})
        log.write(played(step, split="eval"), step=step + 1)
    log.close()
    again = EpisodeLog(tmp_path / "episodes")
    again.begin(2)  # the round of step 2 is played anew; the evaluation at step 2 came before the checkpoint
    again.write(played(2), step=2)
    again.close()
    with EpisodeReader(tmp_path) as reader:
        current = reader.rows(order="oldest", limit=None)
        assert {(row.split, row.step) for row in current} == {
            ("train", 0), ("train", 1), ("train", 2), ("eval", 1), ("eval", 2)
        }  # fmt: skip
        assert len([row for row in current if row.split == "train" and row.step == 2]) == 4
        assert reader.count(EpisodeFilter(current=None)) == 36 and reader.count(EpisodeFilter(current=False)) == 16
        assert [step.metrics.get("loss") for step in reader.steps()] == [None, 1.0, 2.0]
        assert reader.follow("0.0.31").reset
    # What is made again from the parts knows it too.
    (tmp_path / "episodes" / INDEX_NAME).unlink()
    with EpisodeReader(tmp_path) as reader:
        assert reader.rows(order="oldest", limit=None) == current


def test_the_oldest_parts_are_dropped_for_room_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log_module, "PART_EPISODES", 8)
    log = EpisodeLog(tmp_path / "episodes", limit=400_000)
    for step in range(60):
        log.write(played(2 * step, 2 * step + 1), step=step)
    log.close()
    taken = sum(path.stat().st_size for path in (tmp_path / "episodes").iterdir())
    with EpisodeReader(tmp_path) as reader:
        dropped = reader.dropped_episodes()
        assert 0 < dropped < 480 and reader.count() == 480 - dropped
        assert reader.rows(limit=1)[0].number == 479
        with pytest.raises(ConfigurationError, match=rf"its episodes are {dropped} to 479; {dropped} older ones"):
            reader.episode(0)
        assert len(reader.steps()) == 60  # curves keep their steps
        assert reader.count(EpisodeFilter(text="task")) == 480 - dropped - reader.count(EpisodeFilter(failed=True))
    assert taken < 1_000_000
    said = [record for record in caplog.records if "episode_log_gb" in record.getMessage()]
    assert len(said) == 1


_WRITER = """
import random, sys
from pathlib import Path
from helpers.episode_runs import make_group
from envgrad.episodes import log as log_module
from envgrad.episodes.log import EpisodeLog
from envgrad.rollout.runner import Round
log_module.PART_EPISODES = 12
log = EpisodeLog(Path(sys.argv[1]))
step = 0
while True:
    groups = tuple(make_group(random.Random(p), p, "compass", siblings=4) for p in (2 * step, 2 * step + 1))
    log.write(Round(groups=groups), step=step)
    log.flush()
    print(step, flush=True)
    step += 1
"""


@pytest.mark.parametrize("rounds", [3, 11])
def test_a_killed_run_loses_nothing_that_was_flushed_and_goes_on(tmp_path: Path, rounds: int) -> None:
    folder = tmp_path / "episodes"
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    child = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(folder)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert child.stdout is not None
    for line in child.stdout:
        if int(line) == rounds:
            child.send_signal(signal.SIGKILL)
            break
    child.stdout.close()
    child.wait()
    with EpisodeReader(tmp_path) as reader:
        before = reader.count()
        assert before >= 8 * (rounds + 1)
        assert len(list(reader.episodes(range(before)))) == before
    log = EpisodeLog(folder)
    log.write(played(1000), step=99)
    log.close()
    with EpisodeReader(tmp_path) as reader:
        assert reader.count() == before + 4 and reader.rows(limit=1)[0].number == before + 3
        assert [record.summary.number for record in reader.episodes(range(before + 4))] == list(range(before + 4))


def test_what_a_kill_leaves_between_two_steps_is_mended(tmp_path: Path) -> None:
    """A part that the index does not know of, another half written, an index that is broken or gone."""
    make_run(tmp_path, episodes=128, eval_every=0)
    folder = tmp_path / "episodes"
    with EpisodeReader(tmp_path) as reader:
        whole = reader.rows(order="oldest", limit=None)
    (part,) = part_files(folder)
    (folder / "part-000001.parquet.tmp").write_bytes(part.read_bytes()[:1000])
    (folder / "part-000002.parquet").write_bytes(part.read_bytes()[:1000])  # without its footer
    (folder / "part-000003.parquet").write_bytes(part.read_bytes())  # written, and not noted any more
    with EpisodeReader(tmp_path) as reader:
        assert reader.rows(order="oldest", limit=None) == whole
    for damage in (b"", b"no index at all" * 1000):
        (folder / INDEX_NAME).write_bytes(damage)
        for end in ("-wal", "-shm"):
            (folder / f"{INDEX_NAME}{end}").unlink(missing_ok=True)
        with EpisodeReader(tmp_path) as reader:  # it writes nothing
            assert reader.rows(order="oldest", limit=None) == whole
            assert reader.count(EpisodeFilter(text="task")) > 0
    log = EpisodeLog(folder)
    log.write(played(7), step=50)
    log.close()
    assert sorted(path.name for path in folder.glob("*.tmp")) == []
    with EpisodeReader(tmp_path) as reader:
        assert reader.rows(order="oldest", limit=len(whole)) == whole and reader.count() == len(whole) + 4
        assert reader.episode(len(whole) + 3).messages


def test_episodes_of_a_part_that_is_gone_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "PART_EPISODES", 16)
    make_run(tmp_path, episodes=64, round_episodes=16, eval_every=0)
    parts = part_files(tmp_path / "episodes")
    parts[1].unlink()
    parts[2].write_bytes(b"broken")
    with EpisodeReader(tmp_path) as reader:
        left = [row.number for row in reader.rows(order="oldest", limit=None)]
        assert left == [*range(16), *range(48, 64)] and reader.count() == 32
        with pytest.raises(ConfigurationError, match="is gone, and episode 20"):
            reader.episode(20)


def test_one_run_writes_into_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "LOCK_SECONDS", 0.1)
    first, second = EpisodeLog(tmp_path / "episodes"), EpisodeLog(tmp_path / "episodes")
    first.write(played(0), step=0)
    with pytest.raises(ConfigurationError, match="another run writes"):
        second.write(played(1), step=0)
    first.close()
    second.write(played(1), step=0)
    second.close()
    assert len(list(first.read())) == 8


def test_what_fails_in_the_thread_is_raised_by_the_next_call_and_no_thread_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: EpisodeIndex, *args: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    before = set(threading.enumerate())
    log = EpisodeLog(tmp_path / "episodes")
    log.write(played(0), step=0)
    log.flush()
    monkeypatch.setattr(EpisodeIndex, "add", full)
    log.write(played(1), step=1)
    with pytest.raises(EpisodeLogError, match=r"disk is full.*log_episodes=False"):
        log.flush()
    log.close()
    assert not set(threading.enumerate()) - before
    assert len(list(log.read())) == 4


def test_who_writes_waits_where_the_queue_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = EpisodeIndex.add
    gate = threading.Event()

    def wait(self: EpisodeIndex, *args: object) -> None:
        gate.wait()
        slow(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(EpisodeIndex, "add", wait)
    log = EpisodeLog(tmp_path / "episodes")
    done = threading.Event()

    def write() -> None:
        for step in range(log_module.QUEUE + 3):
            log.write(played(step), step=step)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    time.sleep(0.2)
    assert not done.is_set()
    gate.set()
    writer.join()
    log.close()
    assert len(list(log.read())) == 4 * (log_module.QUEUE + 3)


def test_what_json_does_not_hold_is_logged_as_text(tmp_path: Path) -> None:
    class Mute:
        def __str__(self) -> str:
            raise RuntimeError("no words")

    loop: list[object] = []
    loop.append(loop)
    one = group(0)
    odd = {"mute": Mute(), "path": Path("x"), "loop": loop, "lone": "\ud800", (1, 2): None}
    episodes = tuple(replace(episode, extras=odd) for episode in one.episodes)
    task = replace(one.task, row={"when": time.gmtime(0), "question": "?"})
    log = EpisodeLog(tmp_path / "episodes")
    log.write(Round(groups=(replace(one, episodes=tuple(replace(e, task=task) for e in episodes), task=task),)), step=0)
    log.close()
    with EpisodeReader(tmp_path) as reader:
        record = reader.episode(0)
    assert record.extras["mute"] == "<Mute>" and record.extras["path"] == "x" and record.extras["(1, 2)"] is None
    assert record.extras["lone"] == "\ud800" and record.row is not None and record.row["question"] == "?"
    assert not record.row_is_exact


def test_parts_can_be_read_without_envgrad(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    make_run(tmp_path, episodes=64, eval_every=0)
    table = parquet.read_table(part_files(tmp_path / "episodes")[0])
    with EpisodeReader(tmp_path) as reader:
        record = reader.episode(5)
    row = table.slice(5, 1).to_pylist()[0]
    assert row["reward"] == record.summary.reward and json.loads(row["body"])["messages"] == list(record.messages)
    assert tuple(row["token_ids"][: len(record.rows[0].token_ids)]) == record.rows[0].token_ids


def test_reading_never_waits_for_the_writer(tmp_path: Path) -> None:
    """A reader in another thread sees whole rounds only, however fast they come."""
    log = EpisodeLog(tmp_path / "episodes")
    log.write(played(0), step=0)
    log.flush()
    seen: list[int] = []
    stop = threading.Event()

    def follow(check: Callable[[], bool]) -> None:
        with EpisodeReader(tmp_path) as reader:
            while not check():
                seen.append(reader.count())

    thread = threading.Thread(target=follow, args=(stop.is_set,))
    thread.start()
    for step in range(1, 40):
        log.write(played(step), step=step)
    log.close()
    stop.set()
    thread.join()
    assert all(count % 4 == 0 for count in seen) and seen == sorted(seen)


def test_a_log_of_another_format_is_left_alone_and_a_new_one_begins(tmp_path: Path) -> None:
    make_run(tmp_path, episodes=32, eval_every=0)
    connection = sqlite3.connect(tmp_path / "episodes" / INDEX_NAME)
    connection.execute("UPDATE facts SET value = value - 1 WHERE name = 'format'")
    connection.execute("DROP TABLE open_rows")
    connection.commit()
    connection.close()
    log = EpisodeLog(tmp_path / "episodes")
    log.write(played(0), step=0)
    log.close()
    with EpisodeReader(tmp_path) as reader:
        assert reader.rows(limit=1)[0].number == reader.count() - 1 == 35
