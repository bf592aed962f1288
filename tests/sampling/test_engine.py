from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from sampling_kit import plain_logprobs, prompt, session, shared

from envgrad.sampling.compatibility import cached_forward_fault
from envgrad.sampling.engine import Engine
from envgrad.sampling.kv_cache import KVCache
from envgrad.sampling.requests import Request, SamplerStats
from envgrad.sampling.sampler import SamplingParams
from envgrad.sampling.scheduler import Scheduler


def make(max_sessions: int = 8, max_kv_tokens: int | None = None) -> Engine:
    assert cached_forward_fault(shared("llama")) is None
    scheduler = Scheduler(
        KVCache(), SamplerStats(), max_sessions=max_sessions, max_context=96, max_kv_tokens=max_kv_tokens
    )
    return Engine(shared("llama"), scheduler, stops=None, autocast=None)


def ask(task: int, sibling: int, row: list[int], max_tokens: int, seed: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens, seed=seed)
    return Request.of(row, params, session(task, sibling), max_context=96)


@cache
def alone(row: tuple[int, ...], max_tokens: int, seed: int) -> tuple[int, ...]:
    engine = make(1)
    engine.scheduler.begin(session(0))
    engine.scheduler.add(ask(0, 0, list(row), max_tokens, seed))
    done: list[Request] = []
    while not done:
        done = engine.step()
    engine.leave()
    return done[0].completion.token_ids


@pytest.mark.parametrize("seed", range(5))
def test_random_episodes_with_cancels_ends_and_little_memory_all_finish_with_their_own_tokens(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    if seed % 2:  # siblings attend to what they share together, however little it is
        monkeypatch.setattr("envgrad.sampling.decode_layout._WORTH_SPLITTING", 1)
    max_kv_tokens = chance.choice([None, 96, 150, 300])
    engine = make(chance.choice([1, 3, 8]), max_kv_tokens)
    scheduler = engine.scheduler
    rows: dict[tuple[int, int], list[int]] = {}
    asked: dict[str, tuple[tuple[int, int], Request]] = {}
    to_begin = [(task, sibling) for task in range(3) for sibling in range(3)]
    turns = dict.fromkeys(to_begin, 2)
    for _ in range(2000):
        if to_begin and chance.random() < 0.5:
            key = to_begin.pop(0)
            scheduler.begin(session(*key))
            rows[key] = prompt(10 + 8 * key[0], seed=key[0])
        for key, row in list(rows.items()):
            name = session(*key).key
            if name in asked:
                if chance.random() < 0.01:
                    scheduler.cancel(asked.pop(name)[1])
                continue
            if turns[key] == 0 or len(row) > 80:
                scheduler.end(session(*key))
                del rows[key]
            elif chance.random() < 0.7:
                request = ask(*key, row, chance.randint(1, 12), chance.randint(0, 3))
                asked[name] = (key, request)
                scheduler.add(request)
        for request in engine.step(patience=chance.choice([0.0, 1e9])):
            key, _ = asked.pop(request.session.key)
            answer = request.completion
            assert answer.token_ids == alone(tuple(rows[key]), request.params.max_tokens, request.params.seed)
            rows[key] = [*rows[key], *answer.token_ids, 1, 2, 3]
            turns[key] -= 1
        if max_kv_tokens is not None:
            assert scheduler.cache.slots * scheduler.cache.length <= max_kv_tokens
        if not rows and not to_begin:
            break
    assert not rows and not asked and not scheduler.has_work
    assert scheduler.requests() == []


def test_a_request_that_returns_while_memory_is_short_is_the_one_of_earliest_order() -> None:
    engine = make(max_sessions=4, max_kv_tokens=96)
    for task in range(3):
        engine.scheduler.begin(session(task))
        engine.scheduler.add(ask(task, 0, prompt(12, seed=task), 60, task))
    finished: list[Request] = []
    while len(finished) < 3:
        finished += engine.step()
    engine.leave()
    assert [one.session.order[0] for one in finished] == [0, 1, 2]
    assert engine.stats.evictions > 0
    for one in finished:
        want = plain_logprobs(shared("llama"), one.tokens, 12)
        assert one.logprobs == pytest.approx(want, abs=1e-4)


def test_a_follower_goes_on_alone_when_its_leader_is_given_up_in_the_middle_of_the_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("envgrad.sampling.engine.PREFILL_TOKENS", 10)
    engine = make()
    requests = [ask(0, n, prompt(35), 4, n) for n in range(3)]
    for n, request in enumerate(requests):
        engine.scheduler.begin(session(0, n))
        engine.scheduler.add(request)
    engine.step()
    engine.scheduler.cancel(requests[0])
    finished: list[Request] = []
    while engine.scheduler.has_work:
        finished += engine.step()
    engine.leave()
    assert {one.session.key for one in finished} == {"train/0/1", "train/0/2"}
    # what the leader had done is copied, not computed again
    assert engine.stats.prefill_tokens == 35
    for one in finished:
        assert one.completion.token_ids == alone(tuple(prompt(35)), 4, one.params.seed)


def test_autocast_runs_the_model_in_the_given_dtype() -> None:
    engine = make()
    engine._autocast = torch.bfloat16
    seen: list[torch.dtype] = []
    layer = shared("llama").get_submodule("model.layers.0.mlp.down_proj")
    handle = layer.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    engine.scheduler.begin(session(0))
    engine.scheduler.add(ask(0, 0, prompt(5), 3, 0))
    while engine.scheduler.has_work:
        engine.step()
    engine.leave()
    handle.remove()
    assert set(seen) == {torch.bfloat16}
    assert not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
