"""What a checkpoint holds of the rollouts comes back bit for bit; what is torn, foreign or old is refused by name."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from dataclasses import fields, is_dataclass, replace

import pytest
import torch
from transformers.trainer_utils import get_last_checkpoint

from envgrad.batch import Batch, TeacherRows
from envgrad.errors import CheckpointError, ConfigurationError, EnvironmentFailure
from envgrad.layout import PackedLayout
from envgrad.training.checkpoint import remove_leftovers
from envgrad.training.records import RecordReader, RecordWriter
from envgrad.training.saved import read_state, write_state
from helpers.models import Letters, flat, tiny_llama
from helpers.trainers import NAMES, Kind
from helpers.training_checkpoints import state_with_everything, stream_of_rows

pytestmark = pytest.mark.filterwarnings("ignore")


def same(first, second):
    """Equal in all parts: tensors bit for bit and in dtype, NaN equal to NaN."""
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, PackedLayout):
        return [(p, tuple(o)) for p, o in first.families] == [(p, tuple(o)) for p, o in second.families]
    if isinstance(first, BaseException):
        return type(first) is type(second) and str(first) == str(second)
    if is_dataclass(first):
        return type(first) is type(second) and all(
            same(getattr(first, one.name), getattr(second, one.name)) for one in fields(first)
        )
    if isinstance(first, dict):
        return set(first) == set(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, tuple | list):
        return len(first) == len(second) and all(same(one, two) for one, two in zip(first, second, strict=True))
    return first == second or (first != first and second != second)


def without_episodes(batch):
    return replace(batch, samples=tuple(replace(sample, episode=None) for sample in batch.samples))


def test_everything_comes_back_as_it_was(tmp_path):
    state, tasks = state_with_everything(), stream_of_rows()
    write_state(state, tmp_path)
    read = read_state(tmp_path, tasks)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".safetensors"}
    assert same(read.rounds.tasks, state.rounds.tasks) and same(read.rounds.draws, state.rounds.draws)
    assert read.algorithm == state.algorithm and read.shape == state.shape
    assert same(read.unlogged, state.unlogged)
    drawn = stream_of_rows().take(5)
    groups, kept = read.rounds.unconsumed, state.rounds.unconsumed
    assert groups.waiting[0].group.task.row["when"] is not None, "rows are drawn again: they may hold anything"
    assert [one.group.task.key for one in groups.waiting] == [drawn[1].key, drawn[2].key]
    tasks_of_kept = {one.group.task.key: one.group.task for one in (*groups.waiting,)} | {
        group.task.key: group.task for group in groups.dropped
    }

    def with_task(group):  # rows are objects of another stream
        task = tasks_of_kept[group.task.key]
        return replace(
            group, task=task, episodes=tuple(replace(one, task=task) for one in group.episodes),
            failures=tuple(replace(one, task=task) for one in group.failures),
        )  # fmt: skip

    expected = replace(
        kept, waiting=tuple(replace(one, group=with_task(one.group)) for one in kept.waiting),
        dropped=tuple(map(with_task, kept.dropped)),
    )  # fmt: skip
    for one, other in zip(groups.waiting, expected.waiting, strict=True):
        assert one.group.episodes == other.group.episodes and same(one.group.failures, other.group.failures)
    assert same(replace(groups, waiting=()), replace(expected, waiting=())) and len(groups.dropped) == 1
    assert isinstance(groups.dropped[0].failures[0].error, EnvironmentFailure)
    for step, saved in zip(read.pending, state.pending, strict=True):
        assert same(step, replace(saved, batch=without_episodes(saved.batch)))
    assert read.pending[0].batch is read.pending[1].batch, "passes over one round share its batches"
    first = read.pending[0].batch.micro_batches[0]
    assert first.old_logprobs is first.sampler_logprobs, "what was one tensor is one again"


def test_a_teachers_rows_and_odd_numbers_come_back():
    batch = state_with_everything().pending[0].batch
    micro = batch.micro_batches[0]
    teacher = TeacherRows(rows=micro, index=torch.tensor([0]))
    odd = torch.tensor([1e-45, float("nan"), -0.0], dtype=torch.bfloat16)
    batch = replace(batch, micro_batches=(replace(micro, teacher=teacher, ref_logprobs=odd, temperature=0.7),))
    writer = RecordWriter()
    data = json.loads(json.dumps(writer.write(Batch, batch)))
    read = RecordReader(writer.tensors()).read(Batch, data)
    assert torch.equal(read.micro_batches[0].ref_logprobs.view(torch.int16), odd.view(torch.int16))
    plain = replace(batch, micro_batches=(replace(batch.micro_batches[0], ref_logprobs=None),))
    back = replace(read, micro_batches=(replace(read.micro_batches[0], ref_logprobs=None),))
    assert same(without_episodes(plain), back)


def test_groups_that_json_cannot_hold_are_drawn_again(tmp_path):
    state = state_with_everything(messages=({"role": "user", "content": "hi", "when": {1, 2}},))
    write_state(state, tmp_path)
    read = read_state(tmp_path, tasks := stream_of_rows())
    assert not read.rounds.unconsumed.waiting
    tasks.load_state_dict(read.rounds.drawn_again())
    assert [task.position for task in tasks.take(4)] == [1, 2, 4, 5]


def test_what_reward_functions_logged_is_kept_as_text_where_json_cannot_hold_it(tmp_path):
    write_state(state_with_everything(extras={"seen": {3}}), tmp_path)
    read = read_state(tmp_path, stream_of_rows())
    assert read.rounds.unconsumed.waiting[0].group.episodes[0].extras == {"seen": "{3}"}


# -- torn and foreign


def rewrite(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("rollout_state.json", lambda data: data.update(schema=99), ["version 99", "reads 1"]),
        ("rollout_state.json", lambda data: data.update(envgrad="steps"), ["no file of envgrad's"]),
        ("rollout_state.json", lambda data: data.pop("tasks"), ["lacks ['tasks']"]),
        ("rollout_steps.json", lambda data: data["records"]["steps"][0].update(batch=7), ["steps[0].batch is 7 of 1"]),
        ("rollout_steps.json", lambda data: data["records"]["batches"][0]["micro_batches"][0].update(weights="x"),
         ["batches[0].micro_batches[0].weights='x'", "none of the file's tensors"]),
        ("rollout_steps.json", lambda data: data["records"]["batches"][0]["samples"][0].update(mask=[0, 10**9]),
         ["samples[0].mask ends at 1000000000"]),
        ("rollout_steps.json", lambda data: data["records"]["batches"][0]["samples"][0].update(mask=[0, 1]),
         ["samples[0] is no TrainingSample", "one length"]),
        ("rollout_groups.json", lambda data: data["records"]["identities"].reverse(),
         ["other tasks than this run draws"]),
        ("rollout_groups.json", lambda data: data["records"]["groups"]["waiting"][0].update(teaches=1),
         ["waiting[0].teaches is a int, and must be a bool"]),
        ("rollout_groups.json",
         lambda data: data["records"]["groups"]["waiting"][0]["group"]["episodes"][0].update(stop_reason=[1]),
         ["stop_reason=[1] is no stop reason"]),
    ],
)  # fmt: skip
def test_what_was_changed_is_named(tmp_path, name, change, words):
    write_state(state_with_everything(), tmp_path)
    rewrite(tmp_path / name, change)
    with pytest.raises(CheckpointError) as found:
        read_state(tmp_path, stream_of_rows())
    assert all(word in str(found.value) for word in words), found.value


@pytest.mark.parametrize("name", ["rollout_steps", "rollout_groups"])
def test_torn_missing_and_foreign_tensors_are_named(tmp_path, name):
    write_state(state_with_everything(), tmp_path)
    path = tmp_path / f"{name}.safetensors"
    whole = path.read_bytes()
    for content in (
        whole[:-1],
        whole[:-1] + bytes([whole[-1] ^ 1]),
        b"",
        (tmp_path / "rollout_state.json").read_bytes(),
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{name}.safetensors is not the file"):
            read_state(tmp_path, stream_of_rows())
    path.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        read_state(tmp_path, stream_of_rows())
    path.write_bytes(whole)
    read_state(tmp_path, stream_of_rows())
    (tmp_path / f"{name}.json").write_text('{"envgrad": ')
    with pytest.raises(CheckpointError, match="torn"):
        read_state(tmp_path, stream_of_rows())
    (tmp_path / f"{name}.json").unlink()
    with pytest.raises(CheckpointError, match="not whole"):
        read_state(tmp_path, stream_of_rows())


def test_no_pickle_is_ever_read(tmp_path):
    class Evil:
        def __reduce__(self):
            return (print, ("run",))

    write_state(state_with_everything(), tmp_path)
    (tmp_path / "rollout_steps.pt").write_bytes(pickle.dumps(1))
    with pytest.raises(CheckpointError, match="pickle"):
        read_state(tmp_path, stream_of_rows())


def test_another_runs_checkpoint_is_refused(tmp_path):
    write_state(state_with_everything(), tmp_path)
    other = stream_of_rows()
    other._seed = 4
    with pytest.raises(ConfigurationError, match="seed"):
        read_state(tmp_path, other)
    with pytest.raises(FileNotFoundError, match="cannot be resumed"):
        read_state(tmp_path / "nowhere", other)


# -- whole or not there


def make(folder, **options):
    base = {"max_steps": 3, "max_completion_length": 8, "save_strategy": "steps", "save_steps": 1}
    return Kind("GRPO").make(folder, tiny_llama(), environment_factory=Letters, options=base | options)


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(("checkpoint", ".")))


def test_a_half_written_checkpoint_is_never_picked_up_and_goes_with_the_next(tmp_path, monkeypatch):
    from envgrad.training import checkpoint

    trainer = make(tmp_path)
    calls = iter(range(9))

    def fails(state, folder):
        if next(calls) == 1:
            raise OSError("no space left")
        write_state(state, folder)

    monkeypatch.setattr(checkpoint, "write_state", fails)
    with pytest.raises(OSError, match="no space"):
        trainer.train()
    assert names(tmp_path) == [".saving-2", "checkpoint-1"]
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-1")
    again = make(tmp_path)
    again.train(resume_from_checkpoint=True)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]


def test_the_oldest_go_whole_and_the_newest_stays(tmp_path, monkeypatch):
    from envgrad.training import checkpoint

    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda *args, **kwargs: None)  # killed before it deletes
    make(tmp_path, save_total_limit=1, max_steps=2).train()
    assert names(tmp_path) == [".removing-1", "checkpoint-2"]
    monkeypatch.undo()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["checkpoint-2"]


def test_a_step_saved_again_replaces_its_checkpoint(tmp_path):
    trainer = make(tmp_path, max_steps=1)
    trainer.train()
    before = (tmp_path / "checkpoint-1" / "model.safetensors").read_bytes()
    with torch.no_grad():
        trainer.model.model.norm.weight.add_(1)
    trainer._save_checkpoint(trainer.model, None)
    assert names(tmp_path) == ["checkpoint-1"]
    assert (tmp_path / "checkpoint-1" / "model.safetensors").read_bytes() != before


def test_a_checkpoint_that_was_to_be_replaced_comes_back(tmp_path, monkeypatch):
    """Killed between the two renames: there is no ``checkpoint-1`` then, and the whole one lies beside."""
    from envgrad.training import checkpoint

    trainer = make(tmp_path, max_steps=1)
    trainer.train()
    before = (tmp_path / "checkpoint-1" / "model.safetensors").read_bytes()
    plain = os.replace

    def killed(source, target):
        if ".saving" in str(source):
            raise KeyboardInterrupt
        plain(source, target)

    monkeypatch.setattr(checkpoint.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        trainer._save_checkpoint(trainer.model, None)
    monkeypatch.undo()
    assert names(tmp_path) == [".replaced-1", ".saving-1"]
    shutil.copytree(tmp_path, tmp_path / "copy")
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["checkpoint-1"]
    assert (tmp_path / "checkpoint-1" / "model.safetensors").read_bytes() == before
    again = make(tmp_path / "copy", max_steps=2)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2 and names(tmp_path / "copy") == ["checkpoint-1", "checkpoint-2"]


@pytest.mark.parametrize("name", NAMES)
def test_no_file_of_a_resume_is_unpickled(name, tmp_path, monkeypatch):
    """Every ``torch.load`` of a resume is one of weights only; so a pickle that runs code is refused."""
    model = tiny_llama()
    model.generation_config = None
    options = {"max_steps": 1, "max_completion_length": 8, "save_strategy": "steps", "save_steps": 1}
    given = {"environment_factory": Letters, "options": options}
    Kind(name).make(tmp_path, model, **given).train()
    loaded, plain = [], torch.load

    def load(path, *args, weights_only=None, **kwargs):
        loaded.append((str(path).rpartition("/")[2], weights_only))
        return plain(path, *args, weights_only=weights_only, **kwargs)

    monkeypatch.setattr(torch, "load", load)
    given["options"] = options | {"max_steps": 2}
    trainer = Kind(name).make(tmp_path, model, **given)
    trainer.train(resume_from_checkpoint=True)
    assert {"optimizer.pt", "scheduler.pt", "rng_state.pth"} <= {file for file, _ in loaded}
    assert all(weights_only is True for _, weights_only in loaded) and trainer.state.global_step == 2
    (tmp_path / "checkpoint-2" / "optimizer.pt").write_bytes(pickle.dumps(Letters))
    given["options"] = options | {"max_steps": 3}
    with pytest.raises((pickle.UnpicklingError, RuntimeError)):
        Kind(name).make(tmp_path, model, **given).train(resume_from_checkpoint=True)
    assert len(flat(model))
