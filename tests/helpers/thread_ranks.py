"""Ranks that are threads of one process, for tests of what they share."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

SECONDS = 60.0


@dataclass
class Meeting:
    """What ``size`` threads share."""

    size: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    tickets: Counter[str] = field(default_factory=Counter)
    words: dict[str, str] = field(default_factory=dict)
    slots: dict[int, dict[int, bytes]] = field(default_factory=dict)
    forgotten: list[str] = field(default_factory=list)


class ThreadRanks:
    """``distributed.ranks.Ranks`` for one of the threads."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank = rank
        self.size = meeting.size
        self._meeting = meeting
        self._turn = 0

    def begin(self) -> None:
        """The tests' runs are one each."""

    def _put(self, data: bytes) -> dict[int, bytes]:
        with self._meeting.lock:
            slot = self._meeting.slots.setdefault(self._turn, {})
            slot[self.rank] = data
        self._turn += 1
        return slot

    def exchange(self, data: bytes, while_waiting: Callable[[], None] | None = None) -> list[bytes]:
        return asyncio.run(self.exchange_async(data, while_waiting))

    async def exchange_async(self, data: bytes, while_waiting: Callable[[], None] | None = None) -> list[bytes]:
        slot = self._put(data)
        waited = 0.0
        while len(slot) < self.size:
            await asyncio.sleep(0.001)
            if while_waiting is not None:
                while_waiting()
            waited += 0.001
            assert waited < SECONDS, f"rank {self.rank} waits for {set(range(self.size)) - set(slot)}"
        return [slot[rank] for rank in range(self.size)]

    def claim(self, name: str) -> int:
        with self._meeting.lock:
            self._meeting.tickets[name] += 1
            return self._meeting.tickets[name] - 1

    def forget(self, name: str) -> None:
        self._meeting.forgotten.append(name)

    def say(self, name: str, text: str) -> None:
        self._meeting.words[name] = text

    def heard(self, name: str) -> str | None:
        return self._meeting.words.get(name)

    def leave(self, reason: str) -> None:
        self.say("failed", reason)


def on_threads(size: int, function: Callable[[ThreadRanks], T]) -> list[T]:
    """``function`` for every rank, each in a thread; an error of one is raised here."""
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(function, ThreadRanks(meeting, rank)) for rank in range(size)]
        return [future.result(timeout=SECONDS) for future in futures]
