"""Trackers for real: TensorBoard's files, trackio's database and wandb's offline file are read back."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback

# trackio reads it once, when it is imported.
os.environ.setdefault("TRACKIO_DIR", tempfile.mkdtemp(prefix="trackio-"))

from envgrad import GRPOConfig, GRPOTrainer
from envgrad.config import reporting
from envgrad.errors import ConfigurationError
from envgrad.training.reward_plot import can_draw, reward_curves
from envgrad.training.tracking_episodes import MAX_CHARACTERS, MAX_MESSAGES, episode_rows, plain_messages, table_columns
from helpers.models import Constant, Letters, config, tiny_llama, tokenizer_of

ENVIRONMENTS = {"letters": Letters, "constant": Constant}


def make(folder: Path, *, environment: object = None, callbacks: object = (), **changes: object) -> GRPOTrainer:
    return GRPOTrainer(
        tiny_llama(),
        args=config(folder, **changes),
        processing_class=tokenizer_of(),
        environment_factory=ENVIRONMENTS if environment is None else environment,  # type: ignore[arg-type]
        callbacks=list(callbacks),  # type: ignore[call-overload]
    )


class Interrupt(TrainerCallback):
    """Ends a run in its second step."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            raise KeyboardInterrupt


class Broken(Letters):
    def reset(self, seed):
        raise RuntimeError("no such world")


def logged(trainer: GRPOTrainer, name: str) -> list[tuple[int, float]]:
    return [(entry["step"], entry[name]) for entry in trainer.state.log_history if name in entry]


# -- TensorBoard


def tensorboard(folder: Path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (runs,) = (folder / "runs").iterdir()
    found = event_accumulator.EventAccumulator(str(runs), size_guidance={"scalars": 0, "tensors": 0, "images": 0})
    return found.Reload()


def text(events, tag: str) -> dict[int, str]:
    return {one.step: one.tensor_proto.string_val[0].decode() for one in events.Tensors(f"{tag}/text_summary")}


def test_tensorboard_shows_metrics_episodes_the_plot_and_the_settings(tmp_path):
    pytest.importorskip("tensorboard")
    trainer = make(tmp_path, report_to="tensorboard", max_steps=3, eval_strategy="steps", eval_steps=3, eval_tasks=2,
                   hub_token="hf_secret", num_episodes_to_report=2)  # fmt: skip
    trainer.train()
    events = tensorboard(tmp_path)
    scalars = events.Tags()["scalars"]
    for ours, shown in {"reward": "train/reward", "reward/letters": "train/reward/letters", "loss": "train/loss",
                        "rewards/constant/mean": "train/rewards/constant/mean", "eval_reward": "eval/reward",
                        "reward/constant": "train/reward/constant"}.items():  # fmt: skip
        values = {one.step: one.value for one in events.Scalars(shown)}
        assert values == pytest.approx(dict(logged(trainer, ours))), shown
    assert {"train/reward", "train/reward/letters", "train/reward/constant", "eval/reward"} <= set(scalars)
    shown = text(events, "train/episodes")
    assert sorted(shown) == [1, 2, 3]
    for block in shown.values():
        assert block.count("stop_reason ") == 2 and "user: Write" in block and "group_id" in block
        assert all(line.startswith("    ") for line in block.splitlines() if line), "all of it is a code block"
    assert "hf_secret" not in "".join(text(events, "args").values())
    if can_draw():
        assert events.Images("train/reward_plot")[0].step == 3
    assert "_hparams_/session_start_info" in events.PluginTagToContent("hparams")
    assert events.Scalars("hparam/eval_reward")[0].value == pytest.approx(logged(trainer, "eval_reward")[-1][1])
    (callback,) = [one for one in trainer.callback_handler.callbacks if isinstance(one, TensorBoardCallback)]
    assert callback.tb_writer is None, "closed"


def test_evaluation_before_training_writes_into_the_output_folder_and_closes(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    trainer = make(tmp_path, report_to="tensorboard", eval_tasks=2)
    before = set(threading.enumerate())
    trainer.evaluate()
    assert not list(elsewhere.iterdir())
    assert [one.step for one in tensorboard(tmp_path).Scalars("eval/reward")] == [0]
    assert not [one for one in set(threading.enumerate()) - before if "EventWriter" in type(one).__name__]


# -- trackio


def trackio_rows(project: str) -> list[dict]:
    from trackio import utils

    with sqlite3.connect(utils.TRACKIO_DIR / f"{project}.db") as db:
        found = db.execute("select run_name, metrics from metrics order by id").fetchall()
    return [{"run": run} | json.loads(metrics) for run, metrics in found]


def trackio_traces(project: str) -> list[tuple[list, dict]]:
    from trackio import utils

    with sqlite3.connect(utils.TRACKIO_DIR / f"{project}.db") as db:
        found = db.execute("select messages, metadata from traces order by step, trace_index").fetchall()
    return [(json.loads(messages), json.loads(metadata)) for messages, metadata in found]


TRACKIO = {"report_to": "trackio", "trackio_space_id": None, "trackio_static_space_id": False}


def test_trackio_shows_metrics_tables_and_traces_and_an_evaluation_later_joins_the_run(tmp_path):
    trackio = pytest.importorskip("trackio")
    trainer = make(tmp_path, project="tables", max_steps=2, eval_tasks=2, num_episodes_to_report=3, **TRACKIO)
    trainer.train()
    assert trackio.context_vars.current_run.get() is None, "finished"
    trainer.evaluate()
    assert trackio.context_vars.current_run.get() is None
    rows = trackio_rows("tables")
    assert len({row["run"] for row in rows}) == 1
    rewards = [(row["train/global_step"], row["train/reward"]) for row in rows if "train/reward" in row]
    assert dict(rewards) == pytest.approx(dict(logged(trainer, "reward")))
    assert [row["eval/reward"] for row in rows if "eval/reward" in row] == [logged(trainer, "eval_reward")[0][1]]
    tables = [row["train/episodes"]["_value"] for row in rows if "train/episodes" in row]
    assert [len(table) for table in tables] == [3, 3]
    columns = {"step", "environment", "task", "group_id", "sibling", "reward", "advantage", "stop_reason", "turns",
               "tokens", "transcript"}  # fmt: skip
    assert columns <= set(tables[0][0])
    traces = trackio_traces("tables")
    assert len(traces) == 6
    messages, metadata = traces[0]
    assert messages[0]["role"] == "user" and messages[0]["content"].startswith("Write")
    assert metadata["stop_reason"] in ("done", "max_completion_length") and isinstance(metadata["group_id"], str)
    assert not can_draw() or any("train/reward_plot" in row for row in rows)


def test_a_resumed_run_goes_on_in_the_same_trackio_run(tmp_path):
    pytest.importorskip("trackio")
    options = {"project": "resumed", "run_name": "mine", "save_strategy": "steps", "save_steps": 1, **TRACKIO}
    make(tmp_path, max_steps=1, **options).train()
    make(tmp_path, max_steps=2, **options).train(resume_from_checkpoint=True)
    rows = trackio_rows("resumed")
    assert {row["run"] for row in rows} == {"mine"}
    assert [row["train/global_step"] for row in rows if "train/reward" in row] == [1, 2]


# -- wandb


@pytest.fixture
def offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true",
                        "WANDB_CONSOLE": "off", "WANDB_DISABLE_GIT": "true", "WANDB_DISABLE_CODE": "true",
                        "WANDB_CACHE_DIR": str(tmp_path / "cache"), "WANDB_DATA_DIR": str(tmp_path / "data"),
                        "WANDB_CONFIG_DIR": str(tmp_path / "settings")}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    yield wandb
    wandb.teardown()


def wandb_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)


def children() -> set[int]:
    found = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return {int(one) for path in found for one in path.read_text().split()}


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_wandb_offline_shows_metrics_and_tables_and_leaves_no_process(tmp_path, offline):
    from helpers.wandb_file import exit_codes, history

    before = children()
    trainer = make(tmp_path, report_to="wandb", max_steps=2, num_episodes_to_report=3, eval_tasks=2)
    trainer.train()
    assert offline.run is not None, "open, as transformers leaves it"
    trainer.evaluate()
    trainer.close()
    assert offline.run is None
    offline.teardown()  # now its process has written all
    assert children() <= before
    (path,) = wandb_files(tmp_path)
    entries = history(path)
    rewards = [(one["train/global_step"], one["train/reward"]) for one in entries if "train/reward" in one]
    assert dict(rewards) == pytest.approx(dict(logged(trainer, "reward")))
    assert [one["eval/reward"] for one in entries if "eval/reward" in one] == [logged(trainer, "eval_reward")[0][1]]
    assert sum("train/episodes" in name for one in entries for name in one) >= 2
    tables = [json.loads(one.read_text()) for one in path.parent.rglob("*.table.json")]
    assert len(tables) == 2 and all(len(one["data"]) == 3 for one in tables)
    assert {"reward", "advantage", "stop_reason", "group_id", "transcript"} <= set(tables[0]["columns"])
    assert exit_codes(path) == [0]


def test_a_run_that_fails_is_marked_so_and_a_run_of_the_users_own_stays_open(tmp_path, offline):
    from helpers.wandb_file import exit_codes

    trainer = make(tmp_path, report_to="wandb", max_steps=4, callbacks=[Interrupt()])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert offline.run is None
    offline.teardown()  # now its process has written all
    assert exit_codes(wandb_files(tmp_path)[-1]) == [1]
    own = offline.init(project="mine")
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "second", report_to="wandb", max_steps=4, callbacks=[Interrupt()]).train()
    assert offline.run is own
    own.finish()


# -- every way out, and failures


@pytest.mark.parametrize("environment", [None, Broken], ids=["interrupt", "error"])
def test_trackers_are_closed_when_a_run_ends_by_an_exception(tmp_path, environment):
    trackio = pytest.importorskip("trackio")
    pytest.importorskip("tensorboard")
    trainer = make(tmp_path, environment=environment, max_steps=4, callbacks=[Interrupt()], project="ended",
                   max_episode_retries=0, max_consecutive_failed_groups=2,
                   **(TRACKIO | {"report_to": ["tensorboard", "trackio"]}))  # fmt: skip
    before = set(threading.enumerate())
    with pytest.raises((KeyboardInterrupt, Exception)):
        trainer.train()
    kinds = {type(one): one for one in trainer.callback_handler.callbacks}
    assert kinds[TensorBoardCallback].tb_writer is None
    assert kinds[TrackioCallback]._initialized is False and trackio.context_vars.current_run.get() is None
    assert not [one for one in set(threading.enumerate()) - before if "EventWriter" in type(one).__name__]


def test_a_tracker_that_fails_is_named_once_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SummaryWriter, "add_scalar", full)
    trainer = make(tmp_path, report_to="tensorboard", max_steps=3)
    with caplog.at_level(logging.WARNING):
        assert trainer.train().global_step == 3
    told = [one.getMessage() for one in caplog.records if "tensorboard" in one.getMessage()]
    assert len(told) == 2
    assert "on_log" in told[0] and "No space left on device" in told[0] and "said once" in told[0]
    assert "failed 5 times" in told[1], "four logs, and the settings' figures"


def test_a_tracker_that_cannot_start_ends_the_run_before_its_first_episode(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")

    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "not yours")

    monkeypatch.setattr(TensorBoardCallback, "_init_summary_writer", refuse)
    trainer = make(tmp_path, report_to="tensorboard")
    with pytest.raises(PermissionError) as raised:
        trainer.train()
    assert "report_to='tensorboard'" in raised.value.__notes__[0]
    assert trainer.state.global_step == 0 and trainer.last_round is None


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb"])
def test_a_tracker_that_is_not_installed_names_its_extra(tmp_path, monkeypatch, name):
    monkeypatch.setitem(reporting._PACKAGES, name, ("no_such_package",))
    with pytest.raises(ConfigurationError, match=rf"pip install 'envgrad\[{name}\]'"):
        make(tmp_path, report_to=[name])


def test_an_unknown_tracker_is_an_error_with_the_known_ones(tmp_path):
    with pytest.raises(ConfigurationError, match=r"tensorbord.*tensorboard, trackio, wandb"):
        make(tmp_path, report_to="tensorbord")


@pytest.mark.parametrize(("given", "expected"), [
    ("none", set()), (["tensorboard", "trackio"], {TensorBoardCallback, TrackioCallback}),
    ("all", {TensorBoardCallback, TrackioCallback, WandbCallback}),
])  # fmt: skip
def test_report_to_takes_the_words_of_transformers(tmp_path, given, expected):
    for name in ("tensorboard", "trackio", "wandb"):
        pytest.importorskip(name)
    trainer = make(tmp_path, report_to=given)
    kinds = {type(one) for one in trainer.callback_handler.callbacks}
    assert kinds & {TensorBoardCallback, TrackioCallback, WandbCallback} == expected
    trainer.close()


def test_no_episode_is_shown_where_none_is_asked_for(tmp_path):
    pytest.importorskip("tensorboard")
    make(tmp_path, report_to="tensorboard", num_episodes_to_report=0).train()
    assert "train/episodes/text_summary" not in tensorboard(tmp_path).Tags()["tensors"]
    with pytest.raises(ConfigurationError, match="num_episodes_to_report=-1 must be at least 0"):
        config(tmp_path, num_episodes_to_report=-1)


# -- what is sent of an episode


def test_rows_are_bounded_drawn_by_the_step_alone_and_carry_their_advantage(tmp_path):
    seen = []

    class Keep(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append((trainer.last_round, samples[-1]))

    samples = []
    trainer = make(tmp_path, max_steps=1, callbacks=[Keep()])
    record = trainer.trackers.record
    trainer.trackers.record = lambda played, given: (samples.append(given), record(played, given))
    trainer.train()
    played, given = seen[0]
    rows = episode_rows(played, given, step=1, limit=3, seed=0)
    assert rows == episode_rows(played, given, step=1, limit=3, seed=0) and len(rows) == 3
    assert len(episode_rows(played, given, step=1, limit=100, seed=0)) == 8
    by_key = {(sample.episode.task.key, sample.episode.sibling): sample for sample in given}
    for row in rows:
        sample = by_key[(row.task, row.sibling)]
        trained = [value for value, on in zip(sample.advantages, sample.mask, strict=True) if on]
        assert row.advantage == pytest.approx(sum(trained) / len(trained))
        assert row.reward == sample.episode.reward and row.rewards == sample.episode.rewards
    assert len({tuple(record) for record in table_columns(rows)}) == 1, "every row has every column"


def test_long_and_odd_messages_become_short_text():
    messages = [{"role": "user", "content": f"{number}"} for number in range(100)]
    short = plain_messages(messages)
    assert len(short) == MAX_MESSAGES + 1 and short[0]["content"] == "0" and short[-1]["content"] == "99"
    assert short[MAX_MESSAGES // 2]["content"] == "... 60 messages left out ..."
    odd = plain_messages([
        {"role": "tool", "content": [{"type": "text", "text": "a"}, {"type": "image"}], "tool_call_id": 7},
        {"role": "assistant", "content": "x" * (MAX_CHARACTERS + 5) + "\ud800", "tool_calls": [{"name": "f"}, "junk"]},
    ])  # fmt: skip
    assert odd[0] == {"role": "tool", "content": "a[image]", "tool_call_id": "7"}
    assert odd[1]["content"].endswith("... (+6 characters)")
    assert [call["function"]["name"] for call in odd[1]["tool_calls"]] == ["f", "None"]
    json.dumps(odd).encode()


def test_secrets_are_left_out_of_what_trackers_and_files_get(tmp_path):
    given = GRPOConfig(
        output_dir=str(tmp_path), max_steps=1, report_to="none", use_cpu=True, hub_token="hf_1",
        model_init_kwargs={"token": "hf_2", "revision": "main"}, max_turn_tokens=7,
    )  # fmt: skip
    shown = given.to_json_string()
    assert "hf_1" not in shown and "hf_2" not in shown and '"max_turn_tokens": 7' in shown and "main" in shown
    assert given.model_init_kwargs == {"token": "hf_2", "revision": "main"} and given.hub_token == "hf_1"


def test_curves_leave_out_what_is_no_reward_or_no_number():
    history = [{"step": 1, "reward": 0.5, "reward_std": 1.0}, {"step": 2, "reward": float("nan"), "reward/a": 1}]
    assert reward_curves(history) == {"reward": [(1, 0.5)], "reward/a": [(2, 1.0)]}
