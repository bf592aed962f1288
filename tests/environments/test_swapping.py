from __future__ import annotations

import asyncio
import random
import threading

import pytest

from envgrad.environments import swapping
from envgrad.environments.boundary import Ok, Raised, TimedOut, WorkerPool, call_user
from envgrad.environments.generator_lock import GeneratorLock
from envgrad.environments.isolation import Stream, use
from envgrad.errors import EnvironmentFailure


@pytest.fixture
def workers():
    pool = WorkerPool()
    yield pool
    pool.close()


@pytest.fixture
def lock(monkeypatch):
    lock = GeneratorLock(grace=0.05)
    monkeypatch.setattr(swapping, "GENERATORS", lock)
    return lock


def alone(seed: int, count: int) -> list[float]:
    generator = random.Random(seed)
    return [generator.random() for _ in range(count)]


def sync_draw() -> float:
    return random.random()


async def async_draws(count: int, pause: float = 0.0) -> list[float]:
    found = []
    for _ in range(count):
        found.append(random.random())
        await asyncio.sleep(pause)
    return found


async def called(stream, function, *args, workers, timeout=5.0):
    with use(stream):
        return await call_user("Game.act", function, *args, workers=workers, timeout=timeout)


def test_sync_calls_of_many_instances_keep_their_streams(workers, lock):
    async def run():
        streams = [Stream(seed) for seed in range(8)]
        rounds = [await asyncio.gather(*(called(s, sync_draw, workers=workers) for s in streams)) for _ in range(5)]
        return list(zip(*rounds, strict=True))

    before = random.getstate()
    for seed, outcomes in enumerate(asyncio.run(run())):
        assert [outcome.value for outcome in outcomes] == alone(seed, 5)
    assert random.getstate() == before


def test_async_calls_are_swapped_at_every_step_and_the_process_draws_between(workers, lock):
    async def run():
        random.seed(99)
        calls = [asyncio.ensure_future(called(Stream(s), async_draws, 5, 0.001, workers=workers)) for s in range(4)]
        ours = await async_draws(5, 0.001)  # not swapped
        return await asyncio.gather(*calls), ours

    outcomes, ours = asyncio.run(run())
    assert [outcome.value for outcome in outcomes] == [alone(seed, 5) for seed in range(4)]
    assert ours == alone(99, 5)


def test_sync_and_async_calls_share_the_lock(workers, lock):
    async def run():
        streams = [Stream(seed) for seed in range(6)]
        calls = [
            called(s, async_draws, 3, 0.001, workers=workers) if i % 2 else called(s, sync_draw, workers=workers)
            for i, s in enumerate(streams)
        ]
        return await asyncio.gather(*calls)

    for seed, outcome in enumerate(asyncio.run(run())):
        assert outcome.value == (alone(seed, 3) if seed % 2 else alone(seed, 1)[0])


def test_tasks_that_a_call_starts_are_taken_along_and_ours_are_not(workers, lock):
    async def nested():
        async def grandchild():
            await asyncio.sleep(0)
            return random.random()

        first = random.random()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(grandchild())
        return [first, task.result(), *(await asyncio.gather(async_draws(1), async_draws(1)))]

    async def run():
        random.seed(99)
        outcome = await called(Stream(7), nested, workers=workers)
        return outcome, await asyncio.ensure_future(async_draws(2))

    outcome, ours = asyncio.run(run())
    first, second, *others = outcome.value
    assert [first, second, *(other[0] for other in others)] == alone(7, 4)
    assert ours == alone(99, 2)


def test_a_sync_function_that_returns_an_awaitable_is_swapped_in_both_parts(workers, lock):
    def half():
        first = random.random()

        async def rest():
            return [first, random.random()]

        return rest()

    outcome = asyncio.run(called(Stream(3), half, workers=workers))
    assert outcome.value == alone(3, 2)


def test_exceptions_and_timeouts_are_what_they_are_without_a_stream(workers, lock):
    async def fails():
        await asyncio.sleep(0)
        raise OSError("broken")

    async def catches():
        try:
            await asyncio.wait_for(asyncio.sleep(30), 0.01)
        except TimeoutError:
            return random.random()

    seen = []

    async def hangs():
        try:
            await asyncio.sleep(30)
        finally:
            seen.append(random.random())

    async def run():
        return [
            await called(Stream(1), fails, workers=workers),
            await called(Stream(2), catches, workers=workers),
            await called(Stream(3), hangs, workers=workers, timeout=0.02),
            await called(Stream(4), sync_draw, workers=workers),
        ]

    failed, caught, hung, after = asyncio.run(run())
    assert isinstance(failed, Raised) and str(failed.error) == "broken"
    assert isinstance(caught, Ok) and caught.value == alone(2, 1)[0]
    assert isinstance(hung, TimedOut) and hung.killable and seen == alone(3, 1)
    assert after.value == alone(4, 1)[0]


def test_a_sync_call_past_its_timeout_fails_others_by_name_and_does_not_deadlock(workers, lock):
    blocker = threading.Event()

    async def run():
        hung = await called(Stream(1), blocker.wait, workers=workers, timeout=0.05)
        failed = [
            await asyncio.wait_for(called(Stream(2), function, workers=workers), 5)
            for function in (sync_draw, async_draws_once)
        ]
        blocker.set()
        while lock._holder is not None:
            await asyncio.sleep(0.005)
        return hung, failed, await called(Stream(3), sync_draw, workers=workers)

    async def async_draws_once():
        return random.random()

    before = random.getstate()
    hung, failed, after = asyncio.run(run())
    assert isinstance(hung, TimedOut) and not hung.killable
    for outcome in failed:
        assert isinstance(outcome, Raised) and isinstance(outcome.error, EnvironmentFailure)
        assert "ran past its timeout and still holds the process-global random generators" in str(outcome.error)
    assert after.value == alone(3, 1)[0]
    assert random.getstate() == before


def test_waiting_for_the_generators_does_not_count_as_a_sync_calls_own_time(workers, lock):
    lock.grace = 30.0

    async def run():
        slow = asyncio.ensure_future(called(Stream(1), lambda: threading.Event().wait(2.0), workers=workers))
        await asyncio.sleep(0.02)
        return await called(Stream(2), sync_draw, workers=workers, timeout=1.0), await slow

    quick, slow = asyncio.run(run())
    assert isinstance(quick, Ok) and isinstance(slow, Ok)


def test_an_async_call_that_is_cancelled_while_it_waits_is_closed(workers, lock):
    async def run():
        begun, go, closed = asyncio.Event(), asyncio.Event(), []

        async def acts():
            begun.set()
            try:
                await go.wait()
                pytest.fail("it went on")
            finally:
                closed.append(True)

        task = asyncio.ensure_future(called(Stream(1), acts, workers=workers))
        await begun.wait()
        hold = await lock.acquire("other")
        go.set()
        await asyncio.sleep(0.01)  # its second step is in line now
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert closed and task.cancelled()
        hold.leave()
        (await asyncio.wait_for(lock.acquire("next"), 1)).leave()

    asyncio.run(run())
