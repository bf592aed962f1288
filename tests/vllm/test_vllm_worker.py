"""What runs in vLLM's process: the worker extension and the guard, without vLLM."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from envgrad.vllm import EXTENSION_PATH, GUARD, WORKER_EXTENSION
from envgrad.vllm.envgrad_vllm_guard import Guard
from envgrad.vllm.envgrad_vllm_worker import Group, WeightSync, digest


class Plain(WeightSync):
    """A worker of a vLLM without ``reload_weights``."""

    def __init__(self, model: Any) -> None:
        self.rank = 0
        self.model_runner = SimpleNamespace(model=model)


class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def load_weights(self, tensors: Any) -> None:
        for _, tensor in tensors:
            self.weight.data.copy_(tensor)


def test_the_folder_needs_nothing_of_envgrad_and_nothing_else_of_its_environment() -> None:
    names = [WORKER_EXTENSION.rpartition(".")[0], GUARD.rpartition(".")[0]]
    code = f"import sys, {', '.join(names)}; print(sorted(m for m in sys.modules if m.split('.')[0] in "
    code += "('envgrad', 'transformers', 'httpx2')))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(EXTENSION_PATH)}, cwd="/", capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr
    # Nothing there has a name that a library has.
    assert {path.stem for path in EXTENSION_PATH.glob("*.py")} == {*names, "__init__"}


def test_a_file_is_applied_whole_or_not_at_all(tmp_path: Path) -> None:
    worker, path = Plain(Kept()), tmp_path / "w.safetensors"
    save_file({"weight": torch.tensor([1.0, 2.0])}, path)
    good = digest(path)
    assert worker.envgrad_load_file(str(path), 5, good) == {"rank": 0, "version": 5}
    assert worker.model_runner.model.weight.tolist() == [1.0, 2.0]
    save_file({"weight": torch.tensor([3.0, 4.0])}, path)
    said = worker.envgrad_load_file(str(path), 6, good)
    assert said["version"] == 5 and "is torn or corrupt" in said["error"]
    raw = path.read_bytes()
    path.write_bytes(b"\xff" * len(raw))  # right checksum, no safetensors
    said = worker.envgrad_load_file(str(path), 6, digest(path))
    assert said["version"] == 5 and "SafetensorError" in said["error"]
    assert worker.model_runner.model.weight.tolist() == [1.0, 2.0]
    save_file({}, path)
    assert "holds no tensor" in worker.envgrad_load_file(str(path), 6, digest(path))["error"]


def test_weights_that_went_in_half_way_have_no_version(tmp_path: Path) -> None:
    worker, path = Plain(Kept()), tmp_path / "w.safetensors"
    save_file({"weight": torch.zeros(3)}, path)  # does not fit
    with pytest.raises(RuntimeError):
        worker.envgrad_load_file(str(path), 1, digest(path))
    assert worker._envgrad_version is None and not worker._envgrad_whole


def test_vllms_own_way_is_taken_where_it_takes_tensors(tmp_path: Path) -> None:
    path, seen = tmp_path / "w.safetensors", []

    class Reloading(Plain):
        def reload_weights(self, weights_iterator: Any) -> None:
            seen.extend(name for name, _ in weights_iterator)

    def reload_weights(weights_iterator: Any = None) -> None: ...

    worker = Reloading(Kept())
    worker.model_runner.reload_weights = reload_weights
    save_file({"weight": torch.ones(2)}, path)
    worker.envgrad_load_file(str(path), 1, digest(path))
    assert seen == ["weight"] and worker._envgrad_version == 1
    assert worker.model_runner.model.weight.tolist() == [0.0, 0.0]


def test_a_packed_copy_of_a_tied_weight_is_made_anew(tmp_path: Path) -> None:
    class Packing:
        def process_weights_after_loading(self, layer: nn.Module) -> None:
            layer.cpu_linear = layer.weight.detach().clone()

    class Tied(Kept):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.other = nn.Module(), nn.Module()
            self.head.weight = self.weight
            self.other.weight = nn.Parameter(torch.zeros(2))
            for layer in (self.head, self.other):
                layer.quant_method = Packing()
                layer.quant_method.process_weights_after_loading(layer)

    worker, path = Plain(Tied()), tmp_path / "w.safetensors"
    save_file({"weight": torch.ones(2)}, path)
    worker.model_runner.model.other.weight.data.fill_(9.0)
    worker.envgrad_load_file(str(path), 1, digest(path))
    assert worker.model_runner.model.head.cpu_linear.tolist() == [1.0, 1.0]
    assert worker.model_runner.model.other.cpu_linear.tolist() == [0.0, 0.0]  # vLLM's own affair


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="backend='mpi' must be nccl or gloo"):
        Group("mpi", None, 0, 1, torch.device("cpu"), 1.0)


def status_of(path: str, headers: list[tuple[bytes, bytes]], kind: str = "http") -> Any:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sent.append("let in")

    async def send(message: Any) -> None:
        sent.append(message.get("status", message["type"]))

    asyncio.run(Guard(app)({"type": kind, "path": path, "headers": headers}, None, send))
    return sent[0]


def test_the_guard_asks_for_the_key_everywhere_but_for_health(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "hush")
    right, wrong = (b"authorization", b"Bearer hush"), (b"authorization", b"Bearer hus")
    assert status_of("/collective_rpc", []) == status_of("/collective_rpc", [wrong]) == 401
    assert status_of("/collective_rpc", [right]) == status_of("/health", []) == "let in"
    assert status_of("/v1/realtime", [], "websocket") == "websocket.close"
    assert status_of("", [], "lifespan") == "let in"
    monkeypatch.delenv("VLLM_API_KEY")
    assert status_of("/collective_rpc", []) == "let in"
