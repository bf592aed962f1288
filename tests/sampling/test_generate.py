from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
import torch
from sampling_kit import ask, build, plain_logprobs, prompt, run, session, shared

from envgrad.errors import ConfigurationError, SamplerFailure
from envgrad.sampling.generate import GenerateSampler
from envgrad.sampling.local import LocalSampler
from envgrad.sampling.sampler import SamplingParams


async def until(event: threading.Event) -> None:
    while not event.is_set():
        await asyncio.sleep(0.005)


def test_equals_the_local_sampler() -> None:
    model = shared("qwen3")
    requests = [
        (session(0, n), prompt(7 + n, seed=n), SamplingParams(max_tokens=9, seed=n, **options))
        for n, options in enumerate([{}, {"temperature": 0.0}, {"temperature": 0.6, "top_p": 0.8}, {"top_k": 3}])
    ]
    local = LocalSampler(model, max_sessions=4, max_context=64)
    want = run(ask(local, requests))
    local.close()
    slow = GenerateSampler(model, max_context=64)
    got = run(ask(slow, requests))
    slow.close()
    for (_, ids, params), ours, theirs in zip(requests, got, want, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        temperature = params.temperature or 1.0
        assert ours.logprobs == pytest.approx(
            plain_logprobs(model, [*ids, *ours.token_ids], len(ids), temperature), abs=1e-4
        )
    assert slow.stats.sampled_tokens == 36


def test_the_models_own_generation_settings_do_not_leak_in() -> None:
    model: Any = build("llama").train()
    own = model.generation_config
    own.repetition_penalty, own.suppress_tokens = 5.0, list(range(30))
    sampler = GenerateSampler(model, max_context=40)
    request = (session(0), prompt(6), SamplingParams(max_tokens=100, seed=2))
    answer = run(ask(sampler, [request]))[0]
    assert len(answer.token_ids) == 34 and answer.stop_reason == "length"
    assert min(answer.token_ids) < 30
    stop = answer.token_ids[5]
    request = (session(1), prompt(6), SamplingParams(max_tokens=100, seed=2, stop_token_ids=(stop,)))
    stopped = run(ask(sampler, [request]))[0]
    assert stopped.token_ids == answer.token_ids[: answer.token_ids.index(stop) + 1]
    assert stopped.stop_reason == "stop"
    assert model.generation_config is own and model.training
    sampler.close()


def test_weights_sessions_and_closing() -> None:
    before = threading.active_count()
    model = build("llama")
    sampler = GenerateSampler(model, max_context=150)
    with pytest.raises(ConfigurationError, match="has not begun"):
        run(sampler.sample([1], SamplingParams(max_tokens=1), session(0)))
    with pytest.raises(SamplerFailure, match="leaves no room"):
        run(ask(sampler, [(session(0), [1] * 150, SamplingParams(max_tokens=1))]))
    sampler.update_weights(4, {"lm_head.weight": torch.zeros_like(model.lm_head.weight)})
    answer = run(ask(sampler, [(session(1), [1], SamplingParams(max_tokens=2))]))[0]
    assert answer.policy_version == sampler.policy_version == 4
    assert answer.logprobs == pytest.approx([-4.110874] * 2, abs=1e-5)  # ln(1/61)

    begun = threading.Event()
    model.get_input_embeddings().register_forward_hook(lambda *_: begun.set() or time.sleep(0.1))

    async def work() -> None:
        for n in range(2):
            sampler.begin(session(2, n))
        tasks = [
            asyncio.create_task(sampler.sample([1], SamplingParams(max_tokens=149), session(2, n))) for n in range(2)
        ]
        await until(begun)
        await asyncio.get_running_loop().run_in_executor(None, sampler.close)
        for task in tasks:
            with pytest.raises(SamplerFailure, match="closed"):
                await task

    run(work())
    sampler.close()
    assert threading.active_count() <= before + 1  # the loop's own executor
    with pytest.raises(SamplerFailure, match="closed"):
        run(ask(sampler, [(session(3), [1], SamplingParams(max_tokens=1))]))


def test_new_weights_go_before_rows_that_wait_and_behind_the_one_in_hand() -> None:
    model = build("llama")
    sampler = GenerateSampler(model, max_context=150)
    flat_head = {"lm_head.weight": torch.zeros(61, 32)}
    begun, looked = threading.Event(), threading.Event()

    def slowly(*_: Any) -> None:
        begun.set()
        if sampler.policy_version == 0:
            time.sleep(0.02)
        else:
            looked.wait(20)

    model.get_input_embeddings().register_forward_hook(slowly)

    async def work() -> list[int]:
        for n in range(3):
            sampler.begin(session(0, n))
        params = SamplingParams(max_tokens=100)
        tasks = [asyncio.create_task(sampler.sample([1], params, session(0, n))) for n in range(3)]
        await until(begun)  # the first is in hand
        await asyncio.get_running_loop().run_in_executor(None, sampler.update_weights, 1, flat_head)
        assert not tasks[-1].done(), "it has not waited for all of them"
        looked.set()
        return [(await task).policy_version for task in tasks]

    assert run(work()) == [0, 1, 1]
    with pytest.raises(ConfigurationError, match="no tensor 'nothing'"):
        sampler.update_weights(2, {"nothing": torch.zeros(1)})
    assert sampler.policy_version == 1
    sampler.close()
    with pytest.raises(SamplerFailure, match="closed"):
        sampler.update_weights(3, None)


def test_new_weights_are_waited_for_as_long_as_was_said() -> None:
    model = build("llama")
    begun, release = threading.Event(), threading.Event()
    model.get_input_embeddings().register_forward_hook(lambda *_: (begun.set(), release.wait(20), None)[2])
    sampler = GenerateSampler(model, max_context=150, update_timeout=0.2)

    async def work() -> None:
        sampler.begin(session(0))
        task = asyncio.create_task(sampler.sample([1], SamplingParams(max_tokens=2), session(0)))
        await until(begun)
        with pytest.raises(SamplerFailure, match=r"version 1 were not taken over within 0\.2 s"):
            await asyncio.get_running_loop().run_in_executor(None, sampler.update_weights, 1, None)
        release.set()
        await task

    run(work())
    sampler.close()
