"""Weights as files: whole or not there, checked, and gone afterwards."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import shutil
from collections import namedtuple
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.multiprocessing.reductions import StorageWeakRef

from envgrad.errors import ConfigurationError, WeightTransferError
from envgrad.sampling import vllm_files
from envgrad.sampling.vllm_files import WeightFolder
from envgrad.training.weights import LazyWeights


def test_what_is_written_is_what_safetensors_reads(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(6.0).reshape(2, 3).t(),  # not contiguous
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "none": torch.zeros(0, 4),
    }
    folder = WeightFolder(tmp_path)
    ready = folder.write(tensors, version=7)
    assert ready.path.name == "weights-7.safetensors" and ready.size == ready.path.stat().st_size
    assert ready.sha256 == hashlib.sha256(ready.path.read_bytes()).hexdigest()
    found = load_file(ready.path)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    folder.close()
    assert not any(tmp_path.iterdir())
    folder.close()


def test_a_full_disk_is_said_before_and_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = WeightFolder(tmp_path)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000, 900, 100))
    with pytest.raises(WeightTransferError, match=r"version 3 .* 0\.0 MB left; make room there, or give another"):
        folder.write({"a": torch.zeros(1000)}, version=3)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 40, 0, 1 << 40))
    calls = []

    def full(file: object, part: bytes) -> None:
        calls.append(len(part))
        if len(calls) == 2:  # the head was written
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(vllm_files, "write_all", full)
    with pytest.raises(WeightTransferError, match=r"cannot be written to .*No space left on device"):
        folder.write({"a": torch.zeros(1000)}, version=3)
    assert [path.name for path in folder.path.iterdir()] == ["lock"]
    folder.close()


def test_no_name_before_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, seen = WeightFolder(tmp_path), []

    def write(file: object, part: bytes) -> None:
        seen.append(sorted(path.name for path in folder.path.iterdir()))

    monkeypatch.setattr(vllm_files, "write_all", write)
    folder.write({"a": torch.zeros(2), "b": torch.zeros(2)}, version=1)
    assert seen == [[".weights-1.safetensors.unfinished", "lock"]] * 3
    folder.close()


def test_folders_of_killed_runs_are_swept_and_those_of_live_ones_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_files, "SHARED_MEMORY", tmp_path)
    dead, live = tmp_path / "envgrad-weights-dead", tmp_path / "envgrad-weights-live"
    for folder in (dead, live):
        folder.mkdir()
        (folder / "lock").touch()
        (folder / "weights-1.safetensors").write_bytes(b"x")
    with open(live / "lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        own = WeightFolder()
        assert own.path.parent == tmp_path and own.path.stat().st_mode & 0o777 == 0o700
        assert not dead.exists() and live.exists()
    own.close()


def test_what_cannot_be_sent_or_written_to(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"vllm_sync_dir=.*nowhere.* cannot be written to"):
        WeightFolder(tmp_path / "nowhere")
    folder = WeightFolder(tmp_path)
    with pytest.raises(WeightTransferError, match=r"'c' is of torch\.complex64"):
        folder.write({"c": torch.zeros(1, dtype=torch.complex64)}, version=1)
    folder.close()


def test_tensors_that_are_made_as_they_are_read_are_never_all_there(tmp_path: Path) -> None:
    alive: list[int] = []
    made: list[StorageWeakRef] = []

    def make(number: int) -> torch.Tensor:
        alive.append(sum(not one.expired() for one in made))
        tensor = torch.full((64, 64), float(number))
        made.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    weights = LazyWeights({f"w{number}": partial(make, number) for number in range(12)})
    folder = WeightFolder(tmp_path)
    ready = folder.write(weights, version=1)
    assert torch.equal(load_file(ready.path)["w7"], torch.full((64, 64), 7.0))
    folder.close()
    assert len(made) >= 24 and max(alive) <= 2
