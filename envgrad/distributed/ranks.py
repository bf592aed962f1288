"""The processes of a run, and how they talk: bytes to all, tickets, words that stay until they are read.

All of it goes over the CPU (a gloo group and the process group's store), so that waiting for another rank's rollouts
neither occupies a GPU nor keeps signals away: who waits polls.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from envgrad.errors import RankFailed

_NUMBERS = itertools.count()
"""every rank makes its trainers in the same order"""
_FIRST_POLL, _LAST_POLL = 0.0005, 0.02
FAILED = "failed"
"""what a rank says that leaves with an error of its own"""


class Ranks(Protocol):
    """Who takes part, and who of them this process is."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def begin(self) -> None:
        """A run begins, on all ranks: words and tickets of earlier ones are not heard in it."""
        ...

    def exchange(self, data: bytes, while_waiting: Callable[[], None] | None = None) -> list[bytes]:
        """Every rank's ``data``, in the order of ranks. All ranks call it, in the same order of calls.

        Args:
            data: What this rank has to say.
            while_waiting: Called now and then until the others have come.

        Raises:
            RankFailed: a rank is gone, or has not come within the time limit.
        """
        ...

    async def exchange_async(self, data: bytes, while_waiting: Callable[[], None] | None = None) -> list[bytes]:
        """``exchange``, from an event loop."""
        ...

    def claim(self, name: str) -> int:
        """The next ticket of ``name``: 0, 1, 2, ..., each given to one rank only."""
        ...

    def forget(self, name: str) -> None:
        """No ticket of ``name`` will be claimed any more."""
        ...

    def say(self, name: str, text: str) -> None:
        """From now on every rank hears ``text`` under ``name``."""
        ...

    def heard(self, name: str) -> str | None:
        """What was said under ``name``, if anything; does not wait."""
        ...

    def leave(self, reason: str) -> None:
        """This rank goes, with an error that no other rank has: who waits for it need not."""
        ...


@dataclass(frozen=True, slots=True)
class Alone:
    """The only process.

    Example:
        >>> Alone().exchange(b"x")
        [b'x']
    """

    rank: int = 0
    size: int = 1

    def begin(self) -> None:
        """Nothing was said."""

    def exchange(self, data: bytes, while_waiting: Callable[[], None] | None = None) -> list[bytes]:
        return [data]

    async def exchange_async(self, data: bytes, while_waiting: Callable[[], None] | None = None) -> list[bytes]:
        return [data]

    def claim(self, name: str) -> int:
        raise AssertionError("a single process has no tickets")

    def forget(self, name: str) -> None:
        raise AssertionError("a single process has no tickets")

    def say(self, name: str, text: str) -> None:
        """Nobody hears it."""

    def heard(self, name: str) -> str | None:
        return None

    def leave(self, reason: str) -> None:
        """Nobody waits."""


class ProcessRanks:
    """The processes of ``torch.distributed``'s default group, which must be there.

    Args:
        timeout: Seconds that one rank waits for another, at most.
    """

    def __init__(self, timeout: float) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._timeout = timeout
        self._group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        store = dist.distributed_c10d._get_default_store()
        place = f"envgrad/{next(_NUMBERS)}"
        self._stores = (dist.distributed_c10d.PrefixStore(f"{place}/{run}", store) for run in itertools.count())
        self._store: Any = next(self._stores)

    def begin(self) -> None:
        """``Ranks.begin``."""
        self._store = next(self._stores)

    def exchange(self, data: bytes, while_waiting: Callable[[], None] | None = None) -> list[bytes]:
        """``Ranks.exchange``."""
        waiting, pause = self._exchange(data), _FIRST_POLL
        while True:
            try:
                next(waiting)
            except StopIteration as found:
                return list(found.value)
            time.sleep(pause)  # signals are handled here, not inside a collective
            if while_waiting is not None:
                while_waiting()
            pause = min(2 * pause, _LAST_POLL)

    async def exchange_async(self, data: bytes, while_waiting: Callable[[], None] | None = None) -> list[bytes]:
        """``Ranks.exchange_async``."""
        waiting, pause = self._exchange(data), _FIRST_POLL
        while True:
            try:
                next(waiting)
            except StopIteration as found:
                return list(found.value)
            await asyncio.sleep(pause)
            if while_waiting is not None:
                while_waiting()
            pause = min(2 * pause, _LAST_POLL)

    def _exchange(self, data: bytes) -> Generator[None, None, list[bytes]]:
        """Yields while it waits."""
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        sizes = yield from self._gather(torch.tensor([len(data)]))
        counts = [int(one) for one in sizes]
        width = max(counts)
        if not width:
            return [b""] * self.size
        padded = torch.zeros(width, dtype=torch.uint8)
        padded[: len(own)] = own
        parts = yield from self._gather(padded)
        return [part[:count].numpy().tobytes() for part, count in zip(parts, counts, strict=True)]

    def _gather(self, tensor: Tensor) -> Generator[None, None, list[Tensor]]:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        deadline = time.monotonic() + self._timeout
        try:
            work = dist.all_gather(parts, tensor, group=self._group, async_op=True)
            while not work.is_completed():
                if time.monotonic() > deadline:
                    break
                yield
            work.wait(timedelta(milliseconds=1) if time.monotonic() > deadline else timedelta(seconds=self._timeout))
        except RuntimeError as error:
            raise self.failure(error) from error
        return parts

    def failure(self, error: BaseException) -> RankFailed:
        """What a collective's ``error`` means: in the words of the rank that left, if it left any."""
        said: str | None = None
        try:
            said = self.heard(FAILED)
        except RuntimeError:  # the store went with its rank
            said = None
        if said is not None:
            return RankFailed(said)
        return RankFailed(
            f"rank {self.rank} of {self.size} waited for the others, and one of them is gone or did not come within "
            f"{self._timeout:.0f} s (ddp_timeout): {str(error).splitlines()[0]}. Its own output says why"
        )

    def claim(self, name: str) -> int:
        """``Ranks.claim``."""
        return int(self._store.add(name, 1)) - 1

    def forget(self, name: str) -> None:
        """``Ranks.forget``."""
        self._store.delete_key(name)

    def say(self, name: str, text: str) -> None:
        """``Ranks.say``."""
        self._store.set(name, text)

    def heard(self, name: str) -> str | None:
        """``Ranks.heard``."""
        if not self._store.check([name]):
            return None
        return bytes(self._store.get(name)).decode()

    def leave(self, reason: str) -> None:
        """``Ranks.leave``."""
        try:
            if self.heard(FAILED) is None:
                self.say(FAILED, reason)
        except RuntimeError:
            return  # the store is gone, and with it the rank that held it


def ranks_of(world_size: int, timeout: float) -> Ranks:
    """The ranks of a run with ``world_size`` processes, whose process group is there."""
    return Alone() if world_size == 1 else ProcessRanks(timeout)


class Leaving:
    """A context of a run. An error that leaves it is told to ranks that wait for this one; where a collective failed
    because another rank has left, that is what is raised.

    Example:
        >>> with Leaving(Alone()):
        ...     pass
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def __enter__(self) -> Leaving:
        self._ranks.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None or self._ranks.size == 1 or isinstance(error, RankFailed):
            return
        if isinstance(self._ranks, ProcessRanks) and _is_of_collective(error):
            raise self._ranks.failure(error) from error
        self._ranks.leave(f"rank {self._ranks.rank} failed: {type(error).__name__}: {error}")


def _is_of_collective(error: BaseException) -> bool:
    """Whether torch says by it that another process did not take part."""
    words = ("connection closed by peer", "connection reset", "gloo", "nccl", "timed out waiting", "broken pipe")
    text = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in text for word in words)
    )
