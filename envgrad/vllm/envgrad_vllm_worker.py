"""The trainer's hand in vLLM's workers: new weights from a file or a process group, checked before they are applied.

Runs in vLLM's process and environment: imports torch and safetensors, and no other file of envgrad. vLLM mixes
``WeightSync`` into its worker class (``--worker-extension-cls``); its methods are called over ``/collective_rpc`` and
answer with plain dictionaries, one per worker.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from safetensors import SafetensorError, safe_open

PROTOCOL = 1
"""goes up when the methods change; the trainer compares it"""

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8)
}
"""as they are named in the messages"""

_CHUNK = 1 << 24

dist: Any = torch.distributed
"""not typed: it exports stores and backends by a way that type checkers do not follow"""


class WeightSync:
    """Methods for vLLM's worker. ``version`` is None until weights were applied, and while they are not ``whole``."""

    # vLLM's worker has these
    rank: int
    device: torch.device
    vllm_config: Any
    model_runner: Any

    _envgrad_version: int | None = None
    _envgrad_whole: bool = True
    _envgrad_group: Any = None

    def envgrad_status(self) -> dict[str, Any]:
        """What the trainer has to know of this worker."""
        config, text = self.vllm_config.model_config, self.vllm_config.model_config.hf_text_config
        shape = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        parallel = self.vllm_config.parallel_config
        return {
            "protocol": PROTOCOL,
            "version": self._envgrad_version,
            "whole": self._envgrad_whole,
            "rank": self.rank,
            "world_size": parallel.world_size,
            "data_parallel_size": parallel.data_parallel_size,
            "dtype": str(config.dtype).removeprefix("torch."),
            "logprobs_mode": str(config.logprobs_mode),
            "max_model_len": config.max_model_len,
            "lora": self.vllm_config.lora_config is not None,
            "shape": {name: getattr(text, name) for name in shape if isinstance(getattr(text, name, None), int)},
        }

    def envgrad_digest(self, path: str) -> dict[str, Any]:
        """The SHA-256 of a file as this worker sees it."""
        try:
            return self._envgrad_answer(sha256=digest(path))
        except OSError as error:
            return self._envgrad_answer(error=f"{type(error).__name__}: {error}")

    def envgrad_load_file(self, path: str, version: int, sha256: str) -> dict[str, Any]:
        """Apply a safetensors file whose names are those of the Hugging Face model. What differs from its checksum
        is refused whole: the weights and their version stay as they are."""
        try:
            found = digest(path)
            if found != sha256:
                size = Path(path).stat().st_size
                raise ValueError(f"{path} is torn or corrupt: SHA-256 {found} of {size} bytes, expected {sha256}")
            with safe_open(path, framework="pt") as file:
                if not list(file.keys()):
                    raise ValueError(f"{path} holds no tensor")
        except (OSError, ValueError, SafetensorError) as error:
            return self._envgrad_answer(error=f"{type(error).__name__}: {error}")
        with closing(_tensors_of(path)) as tensors:
            self._envgrad_apply(version, tensors)
        return self._envgrad_answer()

    def envgrad_open_group(
        self, host: str, port: int, first_rank: int, world_size: int, backend: str, timeout: float
    ) -> dict[str, Any]:
        """Join the trainer's process group as rank ``first_rank`` + the worker's own."""
        store = dist.TCPStore(host, port, world_size, is_master=False, timeout=timedelta(seconds=timeout))
        device = torch.device("cpu") if backend == "gloo" else self.device
        self._envgrad_group = Group(backend, store, first_rank + self.rank, world_size, device, timeout)
        return self._envgrad_answer()

    def envgrad_receive(self, version: int, tensors: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """Apply what the trainer broadcasts next: ``tensors`` names it as ``[name, dtype, shape]``, in order."""
        group = self._envgrad_group
        if group is None:
            return self._envgrad_answer(error="this worker has joined no process group; was the server restarted?")
        received = group.receive(tensors)
        try:
            self._envgrad_apply(version, received)
        finally:
            for _ in received:  # the trainer sends all of them, whatever became of the first
                pass
        return self._envgrad_answer()

    def envgrad_close_group(self) -> dict[str, Any]:
        self._envgrad_group = None
        return self._envgrad_answer()

    def _envgrad_apply(self, version: int, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        # Until all are in: a failure half way leaves no version.
        self._envgrad_version, self._envgrad_whole = None, False
        reload_weights = getattr(self.model_runner, "reload_weights", None)
        if reload_weights is not None and "weights_iterator" in inspect.signature(reload_weights).parameters:
            # vLLM's own way: also for weights that it keeps in another layout than the checkpoint's
            worker: Any = self
            worker.reload_weights(weights_iterator=tensors)
        else:
            self.model_runner.model.load_weights(tensors)
        _pack_tied_again(self.model_runner.model)
        self._envgrad_version, self._envgrad_whole = version, True

    def _envgrad_answer(self, **more: Any) -> dict[str, Any]:
        return {"rank": self.rank, "version": self._envgrad_version, **more}


class Group:
    """A process group of the trainer (rank 0) and all workers, beside those that either has already.

    Args:
        backend: ``nccl``, or ``gloo`` for tensors on the CPU.
        store: Where the ranks meet.
        rank: This process's.
        world_size: The trainer and the workers of all servers.
        device: Where tensors are sent from and received.
        timeout: Seconds that one broadcast may take.
    """

    def __init__(
        self, backend: str, store: Any, rank: int, world_size: int, device: torch.device, timeout: float
    ) -> None:
        if backend not in ("nccl", "gloo"):
            raise ValueError(f"backend={backend!r} must be nccl or gloo")
        limit = timedelta(seconds=timeout)
        store = dist.PrefixStore("envgrad", store)
        self._store = store  # must live as long as the group
        self._device = device
        self._limit = limit
        self._group: Any
        if backend == "gloo":
            self._group = dist.ProcessGroupGloo(store, rank, world_size, limit)
        else:
            torch.cuda.set_device(device)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group = dist.ProcessGroupNCCL(store, rank, world_size, options)

    def send(self, tensors: Iterable[torch.Tensor]) -> None:
        """Broadcast each, as rank 0."""
        for tensor in tensors:
            self._broadcast(tensor.detach().to(self._device).contiguous())
        self._settle()

    def receive(self, tensors: Sequence[Sequence[Any]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor as ``send`` broadcasts it; ``tensors`` holds ``[name, dtype, shape]``."""
        for name, dtype, shape in tensors:
            tensor = torch.empty(tuple(shape), dtype=DTYPES[dtype], device=self._device)
            self._broadcast(tensor)
            self._settle()
            yield name, tensor

    def _broadcast(self, tensor: torch.Tensor) -> None:
        self._group.broadcast(tensor, 0).wait(self._limit)

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def digest(path: str | Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()


def _pack_tied_again(model: torch.nn.Module) -> None:
    """On a CPU, vLLM multiplies with a packed copy of a layer's weight, and makes it anew for layers that are loaded.
    An output head that shares its weight with the embedding is never loaded itself, so that its copy would stay old."""
    owners: dict[int, list[torch.nn.Module]] = {}
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is not None:
            owners.setdefault(id(weight), []).append(layer)
    for layers in owners.values():
        for layer in layers if len(layers) > 1 else ():
            if hasattr(layer, "cpu_linear"):
                method: Any = layer.quant_method
                method.process_weights_after_loading(layer)


def _tensors_of(path: str) -> Generator[tuple[str, torch.Tensor], None, None]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            yield name, file.get_tensor(name)
