"""Weights broadcast to the servers' workers through a process group: no file, no copy on the host."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from envgrad.errors import ConfigurationError, EnvgradError, WeightTransferError, first_line
from envgrad.sampling.vllm_http import Json
from envgrad.sampling.vllm_server import VLLMServer
from envgrad.sampling.vllm_sync import outcomes
from envgrad.vllm.envgrad_vllm_worker import DTYPES, Group, dist

if TYPE_CHECKING:
    import torch


WORD_SECONDS = 3.0
"""that a server may take to say why a broadcast failed"""


class GroupTransport:
    """A process group of the trainer (rank 0) and all workers of all servers.

    While the servers receive, the trainer's broadcast runs in a thread of its own. A server that answers with an error,
    or no more, ends the update at once; the group is then broken, and so is every later update.

    Args:
        device: Where the trainer's tensors lie.
        port: Where the ranks meet, on the trainer's machine.
        backend: ``nccl``; ``gloo`` for tensors on the CPU.
        timeout: Seconds that one version may take.
    """

    stops_sampling = True

    def __init__(
        self, device: torch.device, *, port: int, timeout: float, backend: Literal["nccl", "gloo"] = "nccl"
    ) -> None:
        if backend == "nccl" and device.type != "cuda":
            raise ConfigurationError(
                f"vllm_sync='nccl' needs the trainer's model on a GPU, and it is on {device}; use vllm_sync='file'"
            )
        self._device = device
        self._port = port
        self._backend = backend
        self._timeout = timeout
        self._group: Group | None = None
        self._members: tuple[VLLMServer, ...] = ()
        self._tensors: Mapping[str, torch.Tensor] = {}

    async def connect(self, servers: Sequence[VLLMServer]) -> None:
        world_size = 1 + sum(server.facts.num_workers for server in servers)
        limit = timedelta(seconds=self._timeout)
        towards = {server: address_towards(server.url) for server in servers}
        try:
            store = _store_at(set(towards.values()), self._port, world_size, limit)
        except (RuntimeError, OSError) as error:
            raise ConfigurationError(
                f"vllm_group_port={self._port} cannot be listened on ({first_line(error)}); give a free one"
            ) from error

        def join() -> None:
            self._group = Group(self._backend, store, 0, world_size, self._device, self._timeout)

        calls, rank = [], 1
        for server in servers:
            arguments = {
                "host": towards[server], "port": store.port, "first_rank": rank, "world_size": world_size,
                "backend": self._backend, "timeout": self._timeout,
            }  # fmt: skip
            calls.append(self._tell(server, "envgrad_open_group", arguments))
            rank += server.facts.num_workers
        failed = [error for error in await self._both(join, calls) if error is not None]
        if failed:
            raise ConfigurationError(f"no process group with the vLLM servers: {failed[0]}") from failed[0]
        self._members = tuple(servers)

    async def _tell(self, server: VLLMServer, method: str, arguments: Mapping[str, Json]) -> None:
        await server.tell_workers(method, arguments, timeout=self._timeout)

    def prepare(self, version: int, named_tensors: Mapping[str, torch.Tensor]) -> None:
        unknown = [name for name, tensor in named_tensors.items() if tensor.dtype not in DTYPES.values()]
        if unknown:
            raise WeightTransferError(f"tensor {unknown[0]!r} is of {named_tensors[unknown[0]].dtype}; convert it")
        self._tensors = named_tensors

    async def send(self, servers: Sequence[VLLMServer], version: int) -> list[EnvgradError | None]:
        group = self._group
        if group is None or set(servers) != set(self._members):
            gone = sorted(server.url for server in set(self._members) - set(servers))
            raise WeightTransferError(
                f"the process group with the vLLM servers is broken ({', '.join(gone) or 'an update failed'}); start "
                "the run again from its checkpoint"
            )
        tensors = self._tensors
        facts = [
            [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()
        ]

        async def receive(server: VLLMServer) -> None:
            arguments = {"version": version, "tensors": facts}
            server.took(version, await server.tell_workers("envgrad_receive", arguments, timeout=self._timeout))

        return await self._both(lambda: group.send(tensors.values()), [receive(server) for server in servers])

    async def _both(self, here: Callable[[], None], there: Sequence[Any]) -> list[EnvgradError | None]:
        """Run ``here`` in a thread while the servers do their part; the first failure of either ends the wait."""
        done = in_thread(here)
        calls = [asyncio.ensure_future(call) for call in there]
        waiting: set[asyncio.Future[None]] = {done, *calls}
        try:
            async with asyncio.timeout(self._timeout):
                while waiting:
                    finished, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    failures = [failure for one in finished if (failure := one.exception()) is not None]
                    if failures:
                        raise await _the_servers_word(failures[0], calls)
        except TimeoutError as error:
            self._group = None
            raise WeightTransferError(f"the broadcast to the vLLM servers took over {self._timeout:.3g} s") from error
        except RuntimeError as error:  # of a peer that is gone; ours are runtime errors too
            self._group = None
            if isinstance(error, EnvgradError):
                raise
            raise WeightTransferError(f"the broadcast to the vLLM servers failed: {first_line(error)}") from error
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        return await outcomes(calls)

    def finish(self) -> None:
        self._tensors = {}

    def close(self) -> None:
        self._group = None


def _store_at(addresses: set[str], port: int, world_size: int, limit: timedelta) -> Any:
    """Where the ranks meet: it listens at the one address that all servers know, and at every one where they differ.

    The store itself would listen at every address, whatever host it is given.
    """
    host = next(iter(addresses)) if len(addresses) == 1 else ""
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host or "127.0.0.1", port, world_size, True, timeout=limit, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


async def _the_servers_word(failure: BaseException, calls: Sequence[asyncio.Future[None]]) -> BaseException:
    """What a server says of the failure, where one does: here it shows as a lost connection only."""
    if not isinstance(failure, EnvgradError):
        await asyncio.wait(calls, timeout=WORD_SECONDS)
    said = [call.exception() for call in calls if call.done() and not call.cancelled()]
    return next((error for error in said if isinstance(error, EnvgradError)), failure)


def in_thread(work: Callable[[], None]) -> asyncio.Future[None]:
    """A future of ``work`` in a daemon thread: a broadcast that never ends keeps nobody."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        failure: BaseException | None = None
        try:
            work()
        except (RuntimeError, ValueError, OSError) as error:
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, failure)

    threading.Thread(target=run, name="envgrad-broadcast", daemon=True).start()
    return done


def address_towards(url: str) -> str:
    """This machine's address as the server at ``url`` sees it.

    Example:
        >>> address_towards("http://127.0.0.1:8000")
        '127.0.0.1'
    """
    parts = urlsplit(url)
    family, kind, _, _, address = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # of a datagram socket: finds the way, sends nothing
        return str(probe.getsockname()[0])
