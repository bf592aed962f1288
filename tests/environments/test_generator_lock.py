from __future__ import annotations

import asyncio
import threading

import pytest

from envgrad.environments.generator_lock import GeneratorLock
from envgrad.errors import EnvironmentFailure


def test_holds_come_in_order_of_arrival():
    async def run():
        lock, order = GeneratorLock(), []

        async def use(number):
            hold = await lock.acquire(str(number))
            await asyncio.sleep(0.001 * (5 - number))
            hold.run(lambda: order.append(number))

        await asyncio.gather(*(use(number) for number in range(5)))
        return order

    assert asyncio.run(run()) == [0, 1, 2, 3, 4]


def test_a_hold_that_ends_in_a_thread_wakes_the_next():
    async def run():
        lock, inside, peak = GeneratorLock(), [0], [0]

        def work():
            inside[0] += 1
            peak[0] = max(peak[0], inside[0])
            threading.Event().wait(0.002)
            inside[0] -= 1

        async def use():
            hold = await lock.acquire("call")
            try:
                await asyncio.to_thread(hold.run, work)
            finally:
                hold.leave()

        await asyncio.wait_for(asyncio.gather(*(use() for _ in range(8))), 10)
        return peak[0]

    assert asyncio.run(run()) == 1


def test_a_call_that_raises_gives_the_generators_back():
    async def run():
        lock = GeneratorLock()
        with pytest.raises(ZeroDivisionError):
            (await lock.acquire("first")).run(lambda: 1 / 0)
        return (await asyncio.wait_for(lock.acquire("second"), 10)).run(lambda: "ran")

    assert asyncio.run(run()) == "ran"


def test_a_call_that_is_left_before_it_began_never_runs():
    async def run():
        lock = GeneratorLock()
        hold = await lock.acquire("first")
        hold.leave()
        (await asyncio.wait_for(lock.acquire("second"), 10)).leave()
        with pytest.raises(EnvironmentFailure, match="first was not started"):
            hold.run(lambda: pytest.fail("it ran"))

    asyncio.run(run())


@pytest.mark.parametrize("moment", ["queued", "handed over"])
def test_a_cancelled_waiter_loses_nothing(moment):
    async def run():
        lock = GeneratorLock()
        first = await lock.acquire("first")
        waiter = asyncio.ensure_future(lock.acquire("cancelled"))
        third = asyncio.ensure_future(lock.acquire("third"))
        await asyncio.sleep(0)
        if moment == "handed over":
            first.leave()  # its turn is on the way, and the cancellation overtakes it
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        assert waiter.cancelled()
        if moment == "queued":
            first.leave()
        (await asyncio.wait_for(third, 10)).leave()
        (await asyncio.wait_for(lock.acquire("fourth"), 10)).leave()

    asyncio.run(run())


async def begun(hold, blocker):
    """A call in a thread that has the generators until ``blocker`` is set."""
    started = threading.Event()
    thread = asyncio.ensure_future(asyncio.to_thread(hold.run, lambda: started.set() or blocker.wait(60)))
    await asyncio.to_thread(started.wait, 60)
    return thread


def test_a_call_left_behind_fails_what_waits_and_what_comes_and_frees_them_when_it_returns():
    async def run():
        lock, blocker = GeneratorLock(grace=0.05), threading.Event()
        hold = await lock.acquire("Game.stuck")
        thread = await begun(hold, blocker)
        waiting = [asyncio.ensure_future(lock.acquire(f"Game.guess {i}")) for i in range(2)]
        await asyncio.sleep(0.02)
        assert not any(waiter.done() for waiter in waiting)
        hold.leave()  # its timeout has passed
        failures = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10)
        for number, failure in enumerate(failures):
            assert isinstance(failure, EnvironmentFailure)
            assert f"Game.guess {number} cannot run: Game.stuck ran past its timeout" in str(failure)
        with pytest.raises(EnvironmentFailure, match=r"Game\.reset cannot run: Game\.stuck"):
            await asyncio.wait_for(lock.acquire("Game.reset"), 10)
        blocker.set()
        await thread
        (await asyncio.wait_for(lock.acquire("Game.reset"), 10)).leave()

    asyncio.run(run())


def test_a_late_call_that_returns_within_the_grace_fails_nobody():
    async def run():
        lock, blocker = GeneratorLock(grace=30.0), threading.Event()
        hold = await lock.acquire("late")
        thread = await begun(hold, blocker)
        hold.leave()
        waiter = asyncio.ensure_future(lock.acquire("next"))
        await asyncio.sleep(0.02)
        blocker.set()
        (await asyncio.wait_for(waiter, 10)).leave()
        await thread

    asyncio.run(run())


def test_a_waiter_whose_loop_is_gone_is_passed_over():
    lock = GeneratorLock()

    async def wait_and_leave_the_loop():
        asyncio.ensure_future(lock.acquire("gone"))  # noqa: RUF006
        await asyncio.sleep(0)

    async def run():
        hold = await lock.acquire("first")
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=lambda: loop.run_until_complete(wait_and_leave_the_loop()))
        thread.start()
        thread.join()
        loop.close()
        waiter = asyncio.ensure_future(lock.acquire("second"))
        await asyncio.sleep(0)
        hold.leave()
        (await asyncio.wait_for(waiter, 10)).leave()

    asyncio.run(run())
