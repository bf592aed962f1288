from __future__ import annotations

import asyncio
import threading
import time

import pytest

from envgrad.environments.boundary import WorkerPool
from envgrad.environments.contract import inspect_environment
from envgrad.environments.pool import InstancePool
from envgrad.environments.spec import Elsewhere
from envgrad.errors import ConfigurationError, EnvironmentContractError, EnvironmentFailure

LIMIT = 10.0


class World:
    """Counts how often its environments are opened and closed."""

    def __init__(self):
        self.opened: list[object] = []
        self.closed: list[object] = []
        self.broken = False
        self.building = False
        """whether a second instance has been asked for"""
        self.forks: list[object] = []
        """what `fork()` returns instead of new instances"""
        self.slow_build = threading.Event()
        self.slow_build.set()

    def factory(self):
        if self.opened:
            self.building = True
            self.slow_build.wait(LIMIT)
        if self.broken:
            raise OSError("no container left")
        instance = Env(self)
        self.opened.append(instance)
        return instance

    def pool(self, limit=4, close_timeout=2.0):
        spec, probe = inspect_environment("env", self.factory)
        return InstancePool(spec, probe, limit=limit, workers=WorkerPool(), close_timeout=close_timeout)

    def check_all_closed_once(self):
        assert sorted(map(id, self.closed)) == sorted(map(id, self.opened))


class Env:
    def __init__(self, world):
        self.world = world

    def reset(self):
        return "x"

    def fork(self):
        return self.world.forks.pop(0) if self.world.forks else self.world.factory()

    def close(self):
        self.world.closed.append(self)


def run(coroutine):
    async def bounded():
        return await asyncio.wait_for(coroutine, LIMIT)

    return asyncio.run(bounded())


def test_instances_are_reused_and_each_is_closed_once():
    world = World()

    async def play():
        pool = world.pool()
        first = await pool.acquire()
        assert first is world.opened[0]  # the probe
        pool.release(first)
        assert await pool.acquire() is first
        second = await pool.acquire()
        assert second is not first and pool.size == 2
        await pool.close()  # both are still out
        pool.release(first)  # harmless: it is closed
        await pool.discard(second)
        await asyncio.gather(pool.close(), pool.close())
        pool.close_now()
        assert (pool.size, pool.num_free, pool.close_errors) == (0, 0, [])
        with pytest.raises(EnvironmentFailure, match="closed"):
            await pool.acquire()

    run(play())
    assert len(world.opened) == 2
    world.check_all_closed_once()


def test_the_limit_holds_and_waiters_are_served_in_order():
    world, order = World(), []

    async def episode(pool, number):
        instance = await pool.acquire()
        order.append(number)
        await asyncio.sleep(0.005)
        pool.release(instance)

    async def play():
        pool = world.pool(limit=2)
        await asyncio.gather(*(episode(pool, number) for number in range(8)))
        assert pool.num_free == pool.size == 2
        await pool.close()

    run(play())
    waited = [number for number in order if number > 1]  # the first two build their instances, side by side
    assert len(world.opened) == 2 and len(order) == 8 and waited == sorted(waited)
    world.check_all_closed_once()


def test_a_discarded_instance_is_closed_and_its_place_is_free():
    world = World()

    async def play():
        pool = world.pool(limit=1)
        first = await pool.acquire()
        waiting = asyncio.create_task(pool.acquire())
        await asyncio.sleep(0)
        await pool.discard(first)
        assert world.closed == [first]
        assert await waiting is world.opened[1]
        await pool.close()

    run(play())
    world.check_all_closed_once()


def test_an_instance_that_comes_too_late_is_closed_and_its_place_is_free():
    world = World()

    async def play():
        spec, probe = inspect_environment("env", world.factory)
        pool = InstancePool(spec, probe, limit=2, workers=WorkerPool(), close_timeout=2.0, build_timeout=1.0)
        first = await pool.acquire()
        world.slow_build.clear()
        with pytest.raises(EnvironmentFailure, match=r"the factory did not return in [\d.]+ s"):
            await pool.acquire()
        world.slow_build.set()
        second = await pool.acquire()
        deadline = time.monotonic() + LIMIT
        while len(world.closed) < 1 and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert len(world.opened) == 3 and world.closed[0] not in (first, second) and pool.size == 2
        await pool.close()

    run(play())
    world.check_all_closed_once()


def test_a_failing_factory_is_the_environments_failure_and_frees_its_place():
    world = World()

    async def play():
        pool = world.pool(limit=2)
        await pool.acquire()
        world.broken = True
        with pytest.raises(EnvironmentFailure, match="the factory raised OSError: no container left") as caught:
            await pool.acquire()
        assert isinstance(caught.value.__cause__, OSError)
        world.broken = False
        assert await pool.acquire() is world.opened[1]
        await pool.close()

    run(play())
    world.check_all_closed_once()


def test_a_factory_that_hands_out_one_object_twice_is_an_error():
    instance = Env(World())
    spec, probe = inspect_environment("env", lambda: instance)

    async def play():
        pool = InstancePool(spec, probe, limit=2, workers=WorkerPool(), close_timeout=1.0)
        await pool.acquire()
        with pytest.raises(EnvironmentContractError, match=r"the same instance twice.*build a new one"):
            await pool.acquire()
        await pool.close()

    run(play())
    assert instance.world.closed == [instance]


def test_a_cancelled_acquire_loses_no_instance():
    world = World()

    async def play():
        pool = world.pool(limit=2)
        await pool.acquire()
        world.slow_build.clear()
        waiting = asyncio.create_task(pool.acquire())
        await asyncio.sleep(0.02)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        world.slow_build.set()
        assert await pool.acquire() is world.opened[1]  # built all the same, and used
        await pool.close()

    run(play())
    assert len(world.opened) == 2
    world.check_all_closed_once()


def test_a_cancelled_waiter_passes_its_place_on():
    world = World()

    async def play():
        pool = world.pool(limit=1)
        instance = await pool.acquire()
        first, second = asyncio.create_task(pool.acquire()), asyncio.create_task(pool.acquire())
        await asyncio.sleep(0)
        pool.release(instance)  # wakes the first ...
        first.cancel()  # ... which is cancelled before it runs
        assert await second is instance
        await pool.close()

    run(play())
    world.check_all_closed_once()


def test_an_instance_that_is_built_while_the_pool_closes_is_closed_too():
    world = World()

    async def play():
        pool = world.pool(limit=2, close_timeout=0.05)
        await pool.acquire()
        world.slow_build.clear()
        building = asyncio.create_task(pool.acquire())
        await asyncio.sleep(0.02)
        await pool.close()
        world.slow_build.set()
        with pytest.raises(EnvironmentFailure, match="closed"):
            await building

    run(play())
    assert len(world.opened) == 2
    world.check_all_closed_once()


def test_waiters_learn_that_the_pool_is_closed():
    world = World()

    async def play():
        pool = world.pool(limit=1)
        await pool.acquire()
        waiting = [asyncio.create_task(pool.acquire()) for _ in range(3)]
        await asyncio.sleep(0)
        await pool.close()
        assert all(
            isinstance(error, EnvironmentFailure) for error in await asyncio.gather(*waiting, return_exceptions=True)
        )

    run(play())
    world.check_all_closed_once()


def test_forks_count_to_the_limit_and_are_closed():
    world = World()

    async def play():
        pool = world.pool(limit=2)
        first = await pool.acquire()
        fork = await pool.fork(first, timeout=LIMIT)
        world.forks.append(fork)
        with pytest.raises(EnvironmentContractError, match=r"fork\(\) returned the same instance twice"):
            await pool.fork(first, timeout=LIMIT)
        waiting = asyncio.create_task(pool.acquire())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        pool.release(fork)
        assert await waiting is fork
        await pool.close()
        with pytest.raises(EnvironmentFailure, match="closed"):
            await pool.fork(first, timeout=LIMIT)
        while len(world.closed) < 3:
            await asyncio.sleep(0.005)

    run(play())
    world.check_all_closed_once()


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_fork_that_comes_too_late_is_closed(cancelled):
    world = World()

    async def play():
        pool = world.pool()
        first = await pool.acquire()
        world.slow_build.clear()
        forking = asyncio.create_task(pool.fork(first, timeout=None if cancelled else 0.05))
        while cancelled and not world.building:
            await asyncio.sleep(0.005)
        if cancelled:
            forking.cancel()
        with pytest.raises(asyncio.CancelledError if cancelled else EnvironmentFailure):
            await forking
        assert pool.size == 1
        world.slow_build.set()
        while len(world.closed) < 1:
            await asyncio.sleep(0.005)
        await pool.close()

    run(play())
    assert len(world.opened) == 2
    world.check_all_closed_once()


@pytest.mark.parametrize("now", [False, True])
def test_a_close_that_raises_or_hangs_does_not_stop_the_others(now):
    gate, closed = threading.Event(), []

    class Odd:
        made = 0

        def __init__(self):
            Odd.made += 1
            self.number = Odd.made

        def reset(self): ...

        def close(self):
            if self.number == 1:
                raise OSError("gone")
            if self.number == 2:
                gate.wait(LIMIT)
            closed.append(self.number)

    async def play():
        spec, probe = inspect_environment("odd", Odd)
        pool = InstancePool(spec, probe, limit=4, workers=WorkerPool(), close_timeout=3.0)
        for _ in range(4):
            await pool.acquire()
        start = time.perf_counter()
        if now:
            pool.close_now()
        await pool.close()
        assert time.perf_counter() - start < LIMIT
        return pool

    pool = run(play())
    assert sorted(closed) == [3, 4]
    assert {type(error) for error in pool.close_errors} == {OSError, EnvironmentFailure} and len(pool.close_errors) == 2
    assert any("close() did not return in" in str(error) for error in pool.close_errors)
    gate.set()


@pytest.mark.parametrize("now", [False, True])
def test_close_may_be_async(now):
    closed = []

    class Client:
        def reset(self): ...

        async def close(self):
            await asyncio.sleep(0.001)
            closed.append(self)

    async def play():
        spec, probe = inspect_environment("client", Client)
        pool = InstancePool(spec, probe, limit=3, workers=WorkerPool(), close_timeout=1.0)
        made = [await pool.acquire() for _ in range(3)]
        if now:
            pool.close_now()
        await pool.close()
        return made

    made = run(play())
    assert sorted(map(id, made)) == sorted(map(id, closed))


def test_an_interrupt_of_close_does_not_stop_it():
    world = World()

    async def play():
        pool = world.pool()
        for _ in range(3):
            await pool.acquire()
        closing = asyncio.create_task(pool.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await pool.close()

    run(play())
    world.check_all_closed_once()


def test_environments_without_close_need_none():
    class Plain:
        def reset(self): ...

    async def play():
        spec, probe = inspect_environment("plain", Plain)
        pool = InstancePool(spec, probe, limit=1, workers=WorkerPool(), close_timeout=1.0)
        await pool.discard(await pool.acquire())
        assert await pool.acquire() is not probe
        await pool.close()
        assert pool.size == 0

    run(play())


def test_wrong_use_is_named():
    world = World()

    async def play():
        pool = world.pool()
        instance = await pool.acquire()
        pool.release(instance)
        for wrong in (instance, object()):
            with pytest.raises(ValueError, match="not an instance that was handed out"):
                pool.release(wrong)
        with pytest.raises(ValueError, match="handed out"):
            await pool.discard(instance)
        await pool.close()

    run(play())
    with pytest.raises(ConfigurationError, match="got a limit of 0"):
        World().pool(limit=0)


def test_who_waits_for_a_new_instance_takes_one_that_is_released_meanwhile():
    """A cluster that is full builds late, or never; the one that comes in the end is a free one."""
    world = World()

    async def main():
        pool = world.pool(limit=3)
        one = await pool.acquire()
        world.slow_build.clear()
        waiting = [asyncio.ensure_future(pool.acquire()) for _ in range(2)]
        await asyncio.sleep(0.02)
        pool.release(one)
        assert await waiting[0] is one
        waiting[1].cancel()
        world.slow_build.set()
        while pool.size < 3 or pool.num_free < 2:
            await asyncio.sleep(0.001)
        await pool.close()

    run(main())
    assert len(world.opened) == 3
    world.check_all_closed_once()


def test_an_instance_whose_process_died_while_it_waited_is_not_handed_out():
    class Far(Elsewhere, Env):
        dead = False

        @property
        def process_lost(self):
            return self.dead

    world = World()
    made = []

    def factory():
        made.append(Far(world))
        return made[-1]

    async def main():
        spec, probe = inspect_environment("env", factory)
        pool = InstancePool(spec, probe, limit=2, workers=WorkerPool(), close_timeout=2.0)
        probe.dead = True
        assert await pool.acquire() is made[1]
        assert world.closed == [probe]
        await pool.close()

    run(main())
    assert world.closed == made
