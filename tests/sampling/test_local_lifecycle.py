"""How a local sampler fails, closes, is cancelled, gets new weights and shares its module."""

from __future__ import annotations

import asyncio

import pytest
import torch
from sampling_kit import ask, build, make_local, plain_logprobs, prompt, run, seeded, session, shared

from envgrad.errors import ConfigurationError, SamplerFailure
from envgrad.sampling.local import LocalSampler
from envgrad.sampling.sampler import Completion
from helpers.threads import sampler_threads


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_sessions": 0}, "max_sessions must be at least 1, got 0"),
        ({"max_context": 161}, "from 2 to the model's 160 tokens, got 161"),
        ({"max_kv_tokens": 100}, "max_kv_tokens=100 cannot hold one row of max_context=128"),
    ],
)
def test_bad_options_are_named(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_local(**options)


def test_close_ends_the_thread_and_open_requests_and_is_idempotent() -> None:
    before = sampler_threads()
    sampler = make_local(deterministic=True)
    assert len(sampler_threads() - before) == 1

    async def work() -> None:
        sampler.begin(session(0))
        sampler.begin(session(1))  # never asks: the first waits for it
        waiting = asyncio.create_task(sampler.sample([1], seeded(), session(0)))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        sampler.close()
        with pytest.raises(SamplerFailure, match="closed"):
            await waiting
        with pytest.raises(SamplerFailure, match="closed"):
            await sampler.sample([1], seeded(), session(1))
        sampler.end(session(0))

    run(work())
    sampler.close()
    assert not sampler_threads() - before


def test_a_failing_model_fails_every_waiter_and_later_caller_with_the_original_error() -> None:
    model = build("llama")
    sampler = LocalSampler(model, max_sessions=2, max_context=64)
    error = MemoryError("no more memory")

    def fail(*_: object) -> None:
        raise error

    model.get_input_embeddings().register_forward_hook(fail)

    async def work() -> None:
        for n in range(4):
            sampler.begin(session(n))
        waiters = [sampler.sample([1, n], seeded(), session(n)) for n in range(4)]
        assert await asyncio.gather(*waiters, return_exceptions=True) == [error] * 4
        with pytest.raises(MemoryError):
            await sampler.sample([1], seeded(), session(0))

    run(work())
    with pytest.raises(MemoryError):
        sampler.update_weights(1, None)
    sampler.close()
    model.train()
    assert model.training


def test_diverged_weights_are_named() -> None:
    model = build("llama")
    sampler = LocalSampler(model, max_sessions=2, max_context=64)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="diverged"):
        run(ask(sampler, [(session(0), [1], seeded())]))
    sampler.close()


def test_weights_are_served_from_the_next_step_and_old_keys_are_forgotten() -> None:
    model = build("llama")
    other = build("qwen2").state_dict()
    sampler = LocalSampler(model, max_sessions=2, max_context=64)
    opening = prompt(12)

    async def turns() -> list[Completion]:
        sampler.begin(session(0))
        first = await sampler.sample(opening, seeded(4), session(0))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.3)
        sampler.update_weights(1, None)
        row = [*opening, *first.token_ids, 5]
        second = await sampler.sample(row, seeded(4), session(0))
        sampler.end(session(0))
        return [first, second]

    first, second = run(turns())
    assert (first.policy_version, second.policy_version, sampler.policy_version) == (0, 1, 1)
    row = [*opening, *first.token_ids, 5, *second.token_ids]
    assert second.logprobs == pytest.approx(plain_logprobs(model, row, 17), abs=1e-4)
    weights = {name: tensor for name, tensor in other.items() if name in model.state_dict()}
    sampler.update_weights(2, weights)
    third = run(ask(sampler, [(session(1), opening, seeded(6))]))[0]
    assert torch.equal(model.state_dict()["lm_head.weight"], other["lm_head.weight"])
    assert third.logprobs == pytest.approx(plain_logprobs(model, [*opening, *third.token_ids], 12), abs=1e-4)
    with pytest.raises(ConfigurationError, match="no tensor 'nothing'"):
        sampler.update_weights(3, {"nothing": torch.zeros(1)})
    with pytest.raises(ConfigurationError, match="wants"):
        sampler.update_weights(3, {"lm_head.weight": torch.zeros(1)})
    assert sampler.policy_version == 2
    run(ask(sampler, [(session(2), opening, seeded(6))]))
    sampler.close()


@pytest.mark.usefixtures("slow_steps")
def test_weights_that_change_during_an_answer_recompute_its_row() -> None:
    model = build("llama")
    sampler = LocalSampler(model, max_sessions=2, max_context=160)
    same = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    async def work() -> Completion:
        sampler.begin(session(0))
        task = asyncio.create_task(sampler.sample([1, 2], seeded(150), session(0)))
        while sampler.stats.sampled_tokens < 3:
            await asyncio.sleep(0)
        sampler.update_weights(7, same)
        return await task

    answer = run(work())
    assert answer.policy_version == 0 and len(answer.token_ids) == 150
    assert answer.logprobs == pytest.approx(plain_logprobs(model, [1, 2, *answer.token_ids], 2), abs=1e-4)
    assert sampler.stats.prefill_tokens > 4
    sampler.close()


def test_module_is_in_eval_mode_only_while_requests_are_open() -> None:
    model = build("llama").train()
    model.model.layers[0].eval()  # a frozen part stays so
    modes: list[bool] = []
    model.lm_head.register_forward_hook(lambda *_: modes.append(model.training or torch.is_grad_enabled()))
    sampler = LocalSampler(model, max_sessions=2, max_context=64)

    async def work() -> bool:
        sampler.begin(session(0))
        await sampler.sample([1], seeded(3), session(0))
        # already when the answer arrives, although the session is still open
        return model.training and model.model.layers[1].training and not model.model.layers[0].training

    assert run(work())
    sampler.close()
    assert modes and not any(modes)


@pytest.mark.usefixtures("slow_steps")
def test_a_cancelled_request_frees_its_slot_and_its_siblings_go_on() -> None:
    sampler = make_local(max_sessions=1, max_context=128)
    opening = prompt(60)

    async def work() -> tuple[Completion, Completion]:
        for n in range(3):
            sampler.begin(session(0, n))
        slow = asyncio.create_task(sampler.sample(opening, seeded(60), session(0, 0)))
        next_one = asyncio.create_task(sampler.sample(opening, seeded(6, seed=1), session(0, 1)))
        while sampler.stats.sampled_tokens < 2:
            await asyncio.sleep(0)
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        sampler.end(session(0, 0))
        # a session may ask again after a request that was given up
        given_up = asyncio.create_task(sampler.sample(opening, seeded(60), session(0, 2)))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait([given_up])
        return await next_one, await sampler.sample(opening, seeded(6, seed=2), session(0, 2))

    for answer in run(work()):
        want = plain_logprobs(shared("llama"), [*opening, *answer.token_ids], 60)
        assert answer.logprobs == pytest.approx(want, abs=1e-4)
    sampler.close()
