"""How a new policy gets to the servers: as a file, through a process group, or as an adapter.

A transport first makes ready what it can while the servers still sample (``prepare``, in the trainer's thread), then
hands it over (``send``, on the sampler's loop), then cleans up (``finish``, always).
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from envgrad.errors import ConfigurationError, EnvgradError, WeightTransferError
from envgrad.sampling.vllm_files import Published, WeightFolder
from envgrad.sampling.vllm_http import Json, Trouble
from envgrad.sampling.vllm_server import VLLMServer

if TYPE_CHECKING:
    from torch import Tensor

ADAPTER_FILE = "adapter_model.safetensors"


class Transport(Protocol):
    """Brings weights to servers."""

    @property
    def stops_sampling(self) -> bool:
        """Whether the servers may answer nothing while they take the weights over."""
        ...

    async def connect(self, servers: Sequence[VLLMServer]) -> None:
        """Called once, before the first update.

        Raises:
            ConfigurationError: these servers cannot be reached this way.
        """
        ...

    def prepare(self, version: int, named_tensors: Mapping[str, Tensor]) -> None:
        """
        Raises:
            WeightTransferError: it could not be made ready; nothing has changed.
        """
        ...

    async def send(self, servers: Sequence[VLLMServer], version: int) -> list[EnvgradError | None]:
        """Hand over what was prepared; for each server None, or why it has not taken it."""
        ...

    def finish(self) -> None:
        """Drop what was prepared, whether it arrived or not."""
        ...

    def close(self) -> None: ...


async def outcomes(requests: Sequence[asyncio.Future[None]]) -> list[EnvgradError | None]:
    """Wait for all; errors of ours are results, others go on when all are done."""
    found: list[EnvgradError | None] = []
    for result in await asyncio.gather(*requests, return_exceptions=True):
        if result is not None and not isinstance(result, EnvgradError):
            raise result
        found.append(result)
    return found


class FileTransport:
    """Safetensors in a folder that trainer and servers share.

    Args:
        folder: This run's own folder in it.
        timeout: Seconds that the servers may take to load one version.
    """

    stops_sampling = True

    def __init__(self, folder: WeightFolder, *, timeout: float) -> None:
        self._folder = folder
        self._timeout = timeout
        self._ready: Published | None = None

    async def connect(self, servers: Sequence[VLLMServer]) -> None:
        await see_folder(self._folder, servers)

    def prepare(self, version: int, named_tensors: Mapping[str, Tensor]) -> None:
        self._ready = self._folder.write(named_tensors, version)

    async def send(self, servers: Sequence[VLLMServer], version: int) -> list[EnvgradError | None]:
        return await outcomes([asyncio.ensure_future(self._load(server, version)) for server in servers])

    async def _load(self, server: VLLMServer, version: int) -> None:
        if self._ready is None:
            raise AssertionError("prepare comes before send")
        arguments = {"path": str(self._ready.path), "version": version, "sha256": self._ready.sha256}
        server.took(version, await server.tell_workers("envgrad_load_file", arguments, timeout=self._timeout))

    def finish(self) -> None:
        if self._ready is not None:
            self._folder.remove(self._ready.path)
            self._ready = None

    def close(self) -> None:
        self._folder.close()


class AdapterTransport:
    """LoRA weights as adapters, in a folder that trainer and servers share; the servers keep their base weights.

    Each version is an adapter of its own name: requests that are under way end on theirs, and keys and values of one
    version are never used for another.

    Args:
        folder: This run's own folder in it.
        config: Of the adapter, as peft saves it.
        timeout: Seconds that the servers may take to load one version.
    """

    stops_sampling = False

    def __init__(self, folder: WeightFolder, config: Mapping[str, Json], *, timeout: float) -> None:
        self._folder = folder
        self._config = dict(config)
        self._timeout = timeout
        self._run = secrets.token_hex(4)
        self._ready: Published | None = None
        self._served: dict[str, Published] = {}
        """by adapter: vLLM may read an adapter again while it serves it"""
        self._unloading: set[asyncio.Task[None]] = set()

    async def connect(self, servers: Sequence[VLLMServer]) -> None:
        await see_folder(self._folder, servers)
        without = [server.url for server in servers if not server.facts.has_lora]
        if without:
            raise ConfigurationError(
                f"{', '.join(without)} takes no adapters; start it with --enable-lora --max-lora-rank N, or sync "
                "merged weights"
            )

    def prepare(self, version: int, named_tensors: Mapping[str, Tensor]) -> None:
        folder = self._folder.path / self._name(version)
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps(self._config))
        self._ready = self._folder.write(named_tensors, version, name=f"{folder.name}/{ADAPTER_FILE}")

    def _name(self, version: int) -> str:
        return f"envgrad-{self._run}-{version}"

    async def send(self, servers: Sequence[VLLMServer], version: int) -> list[EnvgradError | None]:
        if self._ready is None:
            raise AssertionError("prepare comes before send")
        old = {server: server.model for server in servers}
        found = await outcomes([asyncio.ensure_future(self._load(server, version, self._ready)) for server in servers])
        if not all(found):
            self._served[self._name(version)] = self._ready
            self._ready = None
        for server, error in zip(servers, found, strict=True):
            if error is None and old[server] not in (server.facts.model, server.model):
                self._later(self._unload(server, old[server]))
        for name in set(self._served) - {server.model for server in servers} - set(old.values()):
            self._folder.remove(self._served.pop(name).path.parent)
        return found

    async def _load(self, server: VLLMServer, version: int, ready: Published) -> None:
        if server.model == self._name(version):
            return
        seen = await server.tell_workers("envgrad_digest", {"path": str(ready.path)}, timeout=self._timeout)
        wrong = [answer.get("sha256") for answer in seen if answer.get("sha256") != ready.sha256]
        if wrong:
            raise WeightTransferError(
                f"{server.url}: {ready.path} is torn or corrupt: SHA-256 {wrong[0]}, expected {ready.sha256}"
            )
        body = {"lora_name": self._name(version), "lora_path": str(ready.path.parent)}
        outcome = await server.http.ask("/v1/load_lora_adapter", body, timeout=self._timeout)
        if isinstance(outcome, Trouble):
            if outcome.lost:
                server.lost(outcome.why)
            raise WeightTransferError(f"{server.url}: {outcome.why}") from outcome.cause
        server.serve(version, self._name(version))

    def _later(self, request: Coroutine[object, object, None]) -> None:
        task = asyncio.ensure_future(request)
        self._unloading.add(task)
        task.add_done_callback(self._unloading.discard)

    async def _unload(self, server: VLLMServer, name: str) -> None:
        await server.nobody_uses(name)
        await server.http.ask("/v1/unload_lora_adapter", {"lora_name": name}, timeout=self._timeout)

    def finish(self) -> None:
        if self._ready is not None:
            self._folder.remove(self._ready.path.parent)
            self._ready = None

    def close(self) -> None:
        self._folder.close()


async def see_folder(folder: WeightFolder, servers: Sequence[VLLMServer]) -> None:
    """
    Raises:
        ConfigurationError: a server does not see what is written to ``folder``.
    """
    probe = folder.probe()
    try:
        for server in servers:
            outcome = await server.http.call_workers("envgrad_digest", {"path": str(probe.path)}, timeout=60.0)
            if isinstance(outcome, Trouble):
                raise ConfigurationError(f"{server.url} does not answer: {outcome.why}") from outcome.cause
            for answer in outcome:
                if answer.get("sha256") != probe.sha256:
                    raise ConfigurationError(
                        f"{server.url} does not see the folder {folder.path} ({answer.get('error', 'another file')}); "
                        "give a folder that trainer and servers share under one path (vllm_sync_dir), or "
                        "vllm_sync='nccl'"
                    )
    finally:
        folder.remove(probe.path)
