from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest

from envgrad.environments.boundary import Ok, Raised, TimedOut, WorkerPool, call_user, guard
from envgrad.errors import ConfigurationError, EnvironmentFailure, EpisodeDone

LIMIT = 10.0


def run(coroutine):
    async def bounded():
        return await asyncio.wait_for(coroutine, LIMIT)

    return asyncio.run(bounded())


@pytest.fixture
def workers():
    pool = WorkerPool(max_threads=64)
    yield pool
    pool.close()


@pytest.fixture
def gate():
    """An event that hung calls wait for; set at the end, so that no thread outlives its test."""
    event = threading.Event()
    yield event
    event.set()


def test_guard_returns_or_catches_and_lets_an_interrupt_through():
    assert guard(max, 1, 2).value == 2
    assert isinstance(guard(int, "x").error, ValueError)

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guard(interrupt)


def test_sync_calls_run_in_daemon_threads_and_async_ones_on_the_loop(workers):
    def sync(a, b):
        return (threading.current_thread(), a + b)

    async def on_loop(a, b):
        return (threading.current_thread(), a + b)

    async def both():
        return [await call_user("w", f, 1, workers=workers, timeout=5.0, arguments={"b": 2}) for f in (sync, on_loop)]

    (sync_thread, sync_sum), (loop_thread, loop_sum) = (outcome.value for outcome in run(both()))
    assert (sync_sum, loop_sum) == (3, 3)
    assert sync_thread.daemon and sync_thread is not threading.current_thread()
    assert loop_thread is threading.current_thread()


def test_a_tools_parameter_may_be_called_timeout(workers):
    outcome = run(call_user("w", lambda timeout, workers: (timeout, workers), workers=workers, timeout=1.0,
                            arguments={"timeout": 7, "workers": 8}))  # fmt: skip
    assert outcome.value == (7, 8)


def test_a_sync_function_that_returns_an_awaitable_is_awaited(workers):
    async def later():
        await asyncio.sleep(0.001)
        return "x"

    assert run(call_user("w", lambda: later(), workers=workers, timeout=1.0)).value == "x"


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (ValueError("v"), ValueError),
        (EpisodeDone("won"), EpisodeDone),
        (StopIteration(3), (StopIteration, RuntimeError)),
        (asyncio.CancelledError(), RuntimeError),
        (TimeoutError("mine"), TimeoutError),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_errors_come_back_as_data(workers, error, seen, is_async):
    def raises():
        raise error

    async def raises_async():
        raise error

    outcome = run(call_user("env.tool", raises_async if is_async else raises, workers=workers, timeout=1.0))
    assert isinstance(outcome, Raised) and isinstance(outcome.error, seen)
    if not isinstance(error, EpisodeDone):
        assert outcome.error.__notes__ == ["raised in env.tool"]


def test_exit_in_a_sync_tool_is_the_tools_error(workers):
    outcome = run(call_user("w", sys.exit, 3, workers=workers, timeout=1.0))
    assert isinstance(outcome.error, RuntimeError) and "SystemExit(3)" in str(outcome.error)
    assert run(workers.run(max, 1, 2, timeout=1.0)) == 2


def test_wrong_arguments_are_the_callees_error(workers):
    async def one(a): ...

    for function in (one, lambda a: a):
        outcome = run(call_user("w", function, workers=workers, timeout=1.0, arguments={"b": 1}))
        assert isinstance(outcome.error, TypeError)


def test_a_hung_async_call_is_cancelled(workers):
    cleaned = []

    async def hang():
        try:
            await asyncio.sleep(3600)
        finally:
            cleaned.append(True)

    start = time.perf_counter()
    outcome = run(call_user("w", hang, workers=workers, timeout=0.05))
    assert isinstance(outcome, TimedOut) and outcome.killable and cleaned == [True]
    assert time.perf_counter() - start < 4.0 and workers.hung == 0


def test_an_async_call_that_refuses_to_die_is_left_behind(workers, monkeypatch):
    monkeypatch.setattr("envgrad.environments.boundary.CANCEL_LOOKS", 1)
    stop = False

    async def stubborn():
        while not stop:
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue

    async def play():
        nonlocal stop
        outcome = await call_user("w", stubborn, workers=workers, timeout=0.05)
        stop = True
        await asyncio.sleep(0.03)
        return outcome

    outcome = run(play())
    assert isinstance(outcome, TimedOut) and outcome.seconds >= 0.05 and not outcome.killable


def test_a_cancellation_of_ours_propagates_and_cleans_up(workers, gate):
    cleaned = []

    async def hang():
        try:
            await asyncio.sleep(3600)
        finally:
            cleaned.append(True)

    async def cancel(function):
        task = asyncio.create_task(call_user("w", function, workers=workers, timeout=None))
        await asyncio.sleep(0.02)
        task.cancel()
        await task

    for function in (hang, gate.wait):
        with pytest.raises(asyncio.CancelledError):
            run(cancel(function))
    assert cleaned == [True]


def test_a_hung_thread_is_counted_replaced_and_forgotten_when_it_returns(gate):
    pool = WorkerPool(max_threads=1)

    async def play():
        outcome = await call_user("w", gate.wait, workers=pool, timeout=0.05)
        assert isinstance(outcome, TimedOut) and not outcome.killable
        assert (pool.hung, pool.num_threads) == (1, 0)
        assert await pool.run(max, 1, 2, timeout=1.0) == 2  # a thread in its place
        assert pool.num_threads == 1
        gate.set()
        while pool.hung:
            await asyncio.sleep(0.005)
        assert await pool.run(max, 1, 3, timeout=1.0) == 3 and pool.num_threads == 1

    run(play())
    pool.close()


def test_waiting_for_a_thread_does_not_use_up_the_timeout(gate):
    pool = WorkerPool(max_threads=1)

    async def play():
        first = asyncio.create_task(call_user("w", gate.wait, workers=pool, timeout=None))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(1.5, gate.set)
        others = (call_user("w", max, i, 2, workers=pool, timeout=1.0) for i in range(3))
        return await asyncio.gather(first, *others)

    assert [type(outcome) for outcome in run(play())] == [Ok] * 4
    pool.close()


def test_too_many_hung_calls_refuse_more_work_also_what_waits(gate):
    pool = WorkerPool(max_threads=2, max_hung=2)

    async def play():
        return await asyncio.gather(*(call_user("w", gate.wait, workers=pool, timeout=0.05) for _ in range(5)))

    outcomes = run(play())
    assert [type(outcome) for outcome in outcomes[:2]] == [TimedOut, TimedOut]  # a third may have taken their place
    assert all(isinstance(outcome.error, EnvironmentFailure) for outcome in outcomes[3:])
    with pytest.raises(EnvironmentFailure, match=r"[23] environment calls hang past their timeout"):
        run(pool.run(max, 1, 2))
    pool.close()


def test_slow_calls_overlap(workers):
    barrier = threading.Barrier(32)

    async def play():
        return await asyncio.gather(*(workers.run(barrier.wait, 60.0) for _ in range(32)))

    assert sorted(run(play())) == list(range(32))
    assert workers.num_threads <= 64


def test_microsecond_calls_need_few_threads_and_are_quick(workers):
    async def play():
        start = time.perf_counter()
        for _ in range(20):
            await asyncio.gather(*(workers.run(max, i, 2, timeout=5.0) for i in range(100)))
        return time.perf_counter() - start

    assert run(play()) < 20.0  # 2,000 calls
    assert workers.num_threads <= 16


def test_one_pool_serves_one_loop_after_another():
    pool = WorkerPool(max_threads=8)

    async def overlap():
        barrier = threading.Barrier(4)
        return await asyncio.gather(*(pool.run(barrier.wait, 5.0) for _ in range(4)))

    assert sorted(run(overlap())) == sorted(run(overlap())) == [0, 1, 2, 3]
    pool.close()


def test_an_idle_thread_keeps_no_instance_alive(workers):
    class Thing:
        def use(self):
            return 1

    thing = Thing()
    seen = weakref.ref(thing)
    assert run(workers.run(thing.use)) == 1
    del thing
    for _ in range(100):
        gc.collect()
        if seen() is None:
            return
        time.sleep(0.01)
    pytest.fail("the instance is still referenced")


def test_run_raises_what_the_call_raised(workers, gate):
    with pytest.raises(ValueError, match="invalid literal"):
        run(workers.run(int, "x"))
    with pytest.raises(TimeoutError, match=r"past its limit of 0\.02 s"):
        run(workers.run(gate.wait, timeout=0.02))


def test_close_never_waits_and_returns_what_was_not_started(gate):
    pool, begun = WorkerPool(max_threads=1), threading.Event()

    def wait():
        begun.set()
        gate.wait()

    async def play():
        calls = [asyncio.create_task(call_user("w", wait, workers=pool, timeout=None)) for _ in range(3)]
        while not begun.is_set():
            await asyncio.sleep(0.005)
        pool.close()
        outcomes = await asyncio.gather(*calls[1:])
        assert all(isinstance(outcome.error, EnvironmentFailure) for outcome in outcomes)
        gate.set()
        assert isinstance(await calls[0], Ok)
        with pytest.raises(RuntimeError, match="closed"):
            await pool.run(max, 1, 2)

    run(play())


def test_pool_sizes_are_checked():
    with pytest.raises(ConfigurationError, match="at least 1, got 0"):
        WorkerPool(0)


def test_a_hung_thread_does_not_keep_the_process_alive():
    code = (
        "import asyncio, time\n"
        "from envgrad.environments.boundary import WorkerPool, call_user\n"
        "print(asyncio.run(call_user('w', time.sleep, 3600, workers=WorkerPool(), timeout=0.05)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert "killable=False" in done.stdout
