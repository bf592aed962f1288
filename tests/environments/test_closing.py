from __future__ import annotations

import threading
import time

from envgrad.environments.boundary import Ok, Raised, TimedOut
from envgrad.environments.closing import call_all_now


def test_calls_run_at_once_and_a_hung_one_holds_up_nobody():
    never = threading.Event()

    async def later():
        return "async"

    def broken():
        raise SystemExit(3)

    start = time.perf_counter()
    outcomes = call_all_now([lambda: "sync", later, broken, never.wait, never.wait], timeout=3.0)
    assert time.perf_counter() - start < 20
    assert [type(outcome) for outcome in outcomes] == [Ok, Ok, Raised, TimedOut, TimedOut]
    assert [outcome.value for outcome in outcomes[:2]] == ["sync", "async"]
    assert "SystemExit(3)" in str(outcomes[2].error)
    never.set()
