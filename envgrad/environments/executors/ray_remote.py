"""How the stand-in of an instance reaches it on a Ray cluster: by calls of its actor."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from typing import ClassVar

from envgrad.environments.boundary import Raised, guard
from envgrad.environments.executors.ray_actor import GONE
from envgrad.environments.executors.ray_fleet import Fleet, Seat
from envgrad.environments.remote.client import QUICK_SECONDS, Remote
from envgrad.environments.remote.stand_in import remote_class
from envgrad.environments.remote.wire import Closed, Message, decode, pack
from envgrad.errors import EnvironmentFailure


class OnRay(Remote):
    """The way to an actor and back."""

    fleet: ClassVar[Fleet]

    def __init__(self, seat: Seat | None = None) -> None:
        self._set_out()
        self._seat = self.fleet.open()[0] if seat is None else seat
        self._reply: Future[bytes] | None = None
        self._why = ""
        self.fleet.living.add(self)

    @property
    def process_lost(self) -> bool:
        return super().process_lost or self._seat.lost

    async def _send(self, loop: asyncio.AbstractEventLoop, frame: bytes) -> None:
        self._reply = self._called("ask", self._asked, frame)

    async def _receive(self, loop: asyncio.AbstractEventLoop) -> Message:
        if self._reply is None:
            raise AssertionError("nothing was asked")
        reply = asyncio.wrap_future(self._reply)
        try:
            await asyncio.wait({reply})
        finally:
            if not reply.done():
                reply.cancel()
        return self._told(guard(reply.result))

    def _begin_now(self, frame: bytes, seconds: float | None) -> None:
        self._reply = self._called("ask", self._asked, frame)

    def _answer_now(self, seconds: float | None) -> Message | None:
        if self._reply is None:
            raise AssertionError("nothing was asked")
        made = guard(self._reply.result, seconds)
        if isinstance(made, Raised) and isinstance(made.error, TimeoutError):
            if not self._reply.done():
                return None
            made = guard(self._reply.result, 0)  # it has come in this moment
        return self._told(made)

    def _called(self, method: str, *arguments: object) -> Future[bytes]:
        try:
            return self._seat.call(method, *arguments)
        except Closed as error:
            self._why = str(error)
            raise

    def _told(self, made: object) -> Message:
        if isinstance(made, Raised):
            error = self._seat.answer(made.error)
            self._why = str(error)
            raise error
        data: bytes = made.value  # type: ignore[attr-defined]
        if data == GONE:
            self._why = f"its process on {self._seat.post} has ended (killed, out of memory, or an exit)"
            raise Closed(self._why)
        return decode(data)

    def _signal(self) -> None:
        self._seat.tell("interrupt", self._asked)

    def _end(self) -> None:
        self._seat.leave()

    def _fork(self) -> Remote:
        frame = self._begin("fork", {})
        copy, made = self._seat.fork(), False

        def begin() -> None:
            self._reply = self._called("fork", self._asked, frame, copy.number)

        try:
            self._now("fork", QUICK_SECONDS, begin)
            made = True
        finally:
            if not made:
                copy.leave()
        return type(self)(copy)

    def _died(self, operation: str) -> EnvironmentFailure:
        self._kill(f"it died in {operation}: {self._why}")
        return EnvironmentFailure(f"the environment died in {operation}: {self._why}")

    def _packed(self, value: Mapping[str, object], what: str) -> Message:
        return pack(value, what)


def first_on_ray(fleet: Fleet, name: str, close_seconds: float | None) -> OnRay:
    """The first instance of ``fleet``, of a class made from what it says of itself.

    Raises:
        ConfigurationError, EnvironmentFailure, EnvironmentContractError: as ``Fleet.open``.
    """
    seat, greeting = fleet.open()
    way = type("OnRay", (OnRay,), {"fleet": fleet})
    made = remote_class(None, greeting["described"], name, close_seconds, way)
    if not issubclass(made, OnRay):
        raise AssertionError(made)
    return made(seat)
