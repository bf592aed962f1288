from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest

from envgrad.errors import ConfigurationError, SamplerFailure
from envgrad.sampling.sampler import Completion, SamplingParams, Session
from envgrad.sampling.scripted import Script, ScriptedSampler

PARAMS = SamplingParams(max_tokens=4, stop_token_ids=(2,))


def session(sibling: int = 0) -> Session:
    return Session(key=f"train/0/{sibling}", group="train/0", order=(0, sibling, 0))


def play(script: Script, turns: int, params: SamplingParams = PARAMS) -> list[Completion]:
    sampler = ScriptedSampler(script)
    sampler.begin(session())

    async def run() -> list[Completion]:
        return [await sampler.sample([1, 3], params, session()) for _ in range(turns)]

    return asyncio.run(run())


def test_each_session_plays_the_list_from_its_start() -> None:
    sampler = ScriptedSampler([[5, 2], [6, 2]])
    sampler.begin(session(0))
    sampler.begin(session(1))
    assert sampler.open_sessions == {"train/0/0", "train/0/1"}

    async def run() -> list[tuple[int, ...]]:
        order = [session(0), session(0), session(1), session(1)]
        return [(await sampler.sample([1, i], PARAMS, s)).token_ids for i, s in enumerate(order)]

    assert asyncio.run(run()) == [(5, 2), (6, 2), (5, 2), (6, 2)]
    assert [(r.session.key, r.turn, r.prompt_ids) for r in sampler.requests][2] == ("train/0/1", 0, (1, 2))
    sampler.end(session(0))
    sampler.end(session(0))
    assert sampler.open_sessions == {"train/0/1"}


def test_answers_by_session_key_and_by_function() -> None:
    sampler = ScriptedSampler({"train/0/1": [([8, 2], [-0.5, -1.5])]})
    sampler.begin(session(1))
    answer = asyncio.run(sampler.sample([1], PARAMS, session(1)))
    assert answer == Completion(token_ids=(8, 2), logprobs=(-0.5, -1.5), stop_reason="stop", policy_version=0)
    echo = play(lambda prompt, params, _: [*prompt, params.max_tokens], 1)
    assert echo[0].token_ids == (1, 3, 4) and echo[0].logprobs == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("ids", "kept", "reason"),
    [
        ([5, 6, 7, 8, 9], (5, 6, 7, 8), "length"),
        ([5, 6, 7, 8], (5, 6, 7, 8), "length"),
        ([5, 6, 7, 2], (5, 6, 7, 2), "stop"),
        ([5, 6, 7, 8, 2], (5, 6, 7, 8), "length"),
        ([5], (5,), "stop"),
    ],
)
def test_answers_are_cut_to_max_tokens(ids: list[int], kept: tuple[int, ...], reason: str) -> None:
    answer = play([ids], 1)[0]
    assert (answer.token_ids, answer.stop_reason, len(answer.logprobs)) == (kept, reason, len(kept))


@pytest.mark.parametrize(
    ("script", "turns", "message"),
    [
        ([[5, 2]], 2, "answer 1 of session 'train/0/0' was asked for, but the script has 1"),
        ([[]], 1, "0 token ids"),
        ([([5, 2], [0.0])], 1, "2 token ids and 1 log-probs"),
        ([[2, 5]], 1, "goes on after stop token 2 at index 0"),
    ],
)
def test_bad_scripts_are_named(script: Script, turns: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        play(script, turns)


def test_sessions_closing_versions_and_context() -> None:
    sampler = ScriptedSampler([[5, 6, 2]], max_context=4)
    with pytest.raises(ConfigurationError, match="has not begun"):
        asyncio.run(sampler.sample([1], PARAMS, session()))
    sampler.begin(session())
    with pytest.raises(ConfigurationError, match="begun already"):
        sampler.begin(session())
    with pytest.raises(SamplerFailure, match="4 tokens leaves no room"):
        asyncio.run(sampler.sample([1] * 4, PARAMS, session()))
    sampler.update_weights(3, None)
    answer = asyncio.run(sampler.sample([1] * 2, PARAMS, session()))
    assert (answer.token_ids, answer.stop_reason, answer.policy_version) == ((5, 6), "length", 3)
    sampler.close()
    sampler.close()
    with pytest.raises(SamplerFailure, match="closed"):
        asyncio.run(sampler.sample([1], PARAMS, session()))


def test_latency_overlaps_between_sessions() -> None:
    sampler = ScriptedSampler([[5, 2]], latency=lambda s: 0.3)
    sessions = [session(i) for i in range(20)]
    for one in sessions:
        sampler.begin(one)

    async def run() -> None:
        await asyncio.gather(*(sampler.sample([1], PARAMS, one) for one in sessions))

    start = time.perf_counter()
    asyncio.run(run())
    assert 0.3 <= time.perf_counter() - start < 5, "one after the other they take 6 seconds"


def test_importing_the_protocol_and_the_script_needs_no_torch() -> None:
    code = "import sys, envgrad.sampling.scripted; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
