from __future__ import annotations

import asyncio
import threading
import time

import pytest

from envgrad.rollout.loop import RolloutLoop, gather_or_cancel


def test_results_and_errors_arrive_as_they_are():
    loop = RolloutLoop()

    async def fail():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        loop.run(fail())
    assert loop.run(asyncio.sleep(0, result=7)) == 7
    loop.close()
    loop.close()
    assert not any(thread.name == "envgrad-rollouts" for thread in threading.enumerate())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exit_raised_on_the_loop_reaches_the_caller_and_cleanup_still_runs():
    loop, cleaned = RolloutLoop(), []

    async def exits():
        try:
            raise SystemExit(3)
        finally:
            cleaned.append("inner")

    async def outer():
        try:
            await gather_or_cancel([exits(), asyncio.sleep(60)])
        finally:
            cleaned.append("outer")

    began = time.monotonic()
    with pytest.raises(SystemExit):
        loop.run(outer())
    assert time.monotonic() - began < 10 and cleaned == ["inner", "outer"]
    assert loop.run(asyncio.sleep(0, result=1)) == 1
    loop.close()


def test_gather_cancels_the_others_and_waits_for_them():
    ended = []

    async def waits(name):
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(name)

    async def fails():
        await asyncio.sleep(0.01)
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        asyncio.run(gather_or_cancel([waits("a"), fails(), waits("b")]))
    assert sorted(ended) == ["a", "b"]


def test_what_was_submitted_runs_beside_and_can_be_cancelled():
    loop = RolloutLoop()
    ended = threading.Event()

    async def waits():
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    waiting = loop.submit(waits())
    assert loop.submit(asyncio.sleep(0, result=3)).result(timeout=5) == 3
    waiting.cancel()
    assert ended.wait(5)
    loop.close()


def test_what_refuses_to_be_cancelled_is_left_behind_with_a_warning(monkeypatch, caplog):
    monkeypatch.setattr("envgrad.rollout.loop.CLOSE_SECONDS", 0.2)
    release = threading.Event()

    async def stubborn():
        while not release.is_set():
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue

    kept = []

    async def begin():
        kept.append(asyncio.ensure_future(stubborn()))

    loop = RolloutLoop()
    loop.run(begin())
    loop.run(asyncio.sleep(0))
    began = time.monotonic()
    loop.close()
    loop.close()
    assert time.monotonic() - began < 15 and "1 asynchronous calls go on" in caplog.text
    assert not loop._thread.is_alive()
