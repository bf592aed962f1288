from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch
from sampling_kit import ask, build, plain_logprobs, prompt, run, session, shared

from envgrad.errors import ConfigurationError, SamplerFailure
from envgrad.sampling.generate import GenerateSampler
from envgrad.sampling.local import LocalSampler
from envgrad.sampling.sampler import SamplingParams


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

    async def work() -> None:
        for n in range(2):
            sampler.begin(session(2, n))
        tasks = [
            asyncio.create_task(sampler.sample([1], SamplingParams(max_tokens=149), session(2, n))) for n in range(2)
        ]
        await asyncio.sleep(0.02)
        await asyncio.get_running_loop().run_in_executor(None, sampler.close)
        for task in tasks:
            with pytest.raises(SamplerFailure, match="closed"):
                await task

    run(work())
    sampler.close()
    assert threading.active_count() <= before + 1  # the loop's own executor
    with pytest.raises(SamplerFailure, match="closed"):
        run(ask(sampler, [(session(3), [1], SamplingParams(max_tokens=1))]))
