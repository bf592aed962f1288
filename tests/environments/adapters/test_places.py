"""Places at a server: in order of asking, none lost by who gives up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from envgrad.environments.adapters.places import Places
from envgrad.errors import EnvironmentFailure


def test_places_go_in_order_and_none_is_lost() -> None:
    async def run() -> None:
        places: Places[str] = Places(2)
        assert await places.take(1.0, "s") is None and await places.take(1.0, "s") is None
        order: list[int] = []

        async def wait(number: int) -> Any:
            got = await places.take(5.0, "s")
            order.append(number)
            return got

        waiting = [asyncio.ensure_future(wait(number)) for number in range(3)]
        await asyncio.sleep(0)
        waiting[1].cancel()
        await asyncio.sleep(0)
        places.give("kept")
        places.give()
        assert await waiting[0] == "kept" and await waiting[2] is None
        assert order == [0, 2] and places.taken == 2 and places.drain() == []
        with pytest.raises(EnvironmentFailure, match="s: all 2"):
            await places.take(0.01, "s")
        # Given to somebody who is cancelled before he knows: it goes on to the next.
        first, second = asyncio.ensure_future(wait(3)), asyncio.ensure_future(wait(4))
        await asyncio.sleep(0)
        places.give()
        first.cancel()
        await second
        assert places.taken == 2
        places.give()
        places.give()
        assert places.taken == 0

    asyncio.run(run())


def test_without_a_limit_nobody_waits() -> None:
    async def run() -> None:
        places: Places[str] = Places()
        assert [await places.take(0.0, "s") for _ in range(50)] == [None] * 50 and places.taken == 50

    asyncio.run(run())
