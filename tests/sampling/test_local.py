from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import Any

import pytest
import torch
from sampling_kit import NAMES, VOCABULARY, ask, build, plain_logprobs, prompt, run, session, shared

from envgrad.errors import ConfigurationError, SamplerFailure
from envgrad.sampling.local import LocalSampler
from envgrad.sampling.sampler import Completion, SamplingParams, Session


def make(name: str = "llama", **options: Any) -> LocalSampler:
    return LocalSampler(shared(name), **{"max_sessions": 8, "max_context": 128, **options})


def seeded(max_tokens: int = 12, seed: int = 0, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, **options)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_equals_generate(name: str) -> None:
    sampler = make(name)
    prompts = [prompt(length, seed=length) for length in (3, 9, 9, 17, 30)]
    params = seeded(max_tokens=15, temperature=0.0)
    answers = run(ask(sampler, [(session(task), ids, params) for task, ids in enumerate(prompts)]))
    sampler.close()
    for ids, answer in zip(prompts, answers, strict=True):
        generate: Any = shared(name).generate
        row = generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=15, do_sample=False)[
            0
        ].tolist()
        assert list(answer.token_ids) == row[len(ids) :]
        assert answer.logprobs == pytest.approx(plain_logprobs(shared(name), row, len(ids)), abs=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_turns_prefill_only_their_suffix_and_logprobs_are_the_plain_ones(name: str) -> None:
    """Siblings with one prompt, three turns each with suffixes of different lengths."""
    sampler = make(name)
    group, opening, turns = 5, prompt(20), 3
    forwarded = [0]

    async def episode(sibling: int) -> tuple[list[int], list[float], list[int]]:
        row, logprobs, mask = list(opening), [0.0] * len(opening), [0] * len(opening)
        for turn in range(turns):
            params = seeded(4 + sibling + turn, seed=100 * sibling + turn, temperature=0.7)
            answer = await sampler.sample(row, params, session(0, sibling))
            suffix = prompt(3 + 2 * sibling, seed=7 + turn + sibling)
            row += [*answer.token_ids, *suffix]
            logprobs += [*answer.logprobs, *([0.0] * len(suffix))]
            mask += [1] * len(answer.token_ids) + [0] * len(suffix)
            forwarded[0] += len(answer.token_ids) + (len(suffix) if turn < turns - 1 else 0)
        # the last sampled token of the last turn is never forwarded
        forwarded[0] -= 1
        return row, logprobs, mask

    async def all_siblings() -> Any:
        for sibling in range(group):
            sampler.begin(session(0, sibling))
        return await asyncio.gather(*(episode(sibling) for sibling in range(group)))

    episodes = run(all_siblings())
    sampler.close()
    assert sampler.stats.forwarded_tokens == len(opening) + forwarded[0]
    assert sampler.stats.copied_tokens == (group - 1) * len(opening)
    for row, logprobs, mask in episodes:
        reference = [0.0, *plain_logprobs(shared(name), row, 1, temperature=0.7)]
        for got, want, sampled in zip(logprobs, reference, mask, strict=True):
            assert not sampled or got == pytest.approx(want, abs=1e-4)


def test_samples_do_not_depend_on_the_batch_or_the_order_of_arrival() -> None:
    requests = [
        (session(task, sibling), prompt(5 + 3 * task, seed=task), seeded(10 + sibling, seed=31 * task + sibling))
        for task in range(4)
        for sibling in range(3)
    ]
    alone: list[Completion] = []
    for one in requests:
        sampler = make()
        alone += run(ask(sampler, [one]))
        sampler.close()
    assert len({answer.token_ids for answer in alone}) == len(alone)
    for shuffle, options in ((1, {}), (2, {"max_sessions": 3}), (3, {"deterministic": True})):
        order = list(range(len(requests)))
        random.Random(shuffle).shuffle(order)
        sampler = make(**options)
        together = run(ask(sampler, [requests[index] for index in order]))
        sampler.close()
        for index, answer in zip(order, together, strict=True):
            assert answer.token_ids == alone[index].token_ids
            assert answer.logprobs == pytest.approx(alone[index].logprobs, abs=1e-4)


def test_a_prompt_is_forwarded_once_for_siblings_that_come_together_later_or_after_the_first_has_ended() -> None:
    opening = prompt(40)
    for max_sessions in (8, 1):
        sampler = make(max_sessions=max_sessions)

        async def siblings(sampler: LocalSampler = sampler) -> list[Completion]:
            for sibling in range(4):
                sampler.begin(session(0, sibling))
            first = await sampler.sample(opening, seeded(6, seed=0), session(0, 0))
            sampler.end(session(0, 0))
            rest = await asyncio.gather(*(sampler.sample(opening, seeded(6, seed=n), session(0, n)) for n in (1, 2)))
            sampler.end(session(0, 1))
            return [first, *rest, await sampler.sample(opening, seeded(6, seed=3), session(0, 3))]

        answers = run(siblings())
        sampler.close()
        assert sampler.stats.prefill_tokens == 40
        assert sampler.stats.decode_tokens == 4 * 5
        for answer in answers:
            row = [*opening, *answer.token_ids]
            assert answer.logprobs == pytest.approx(plain_logprobs(shared("llama"), row, 40), abs=1e-4)


def test_prompts_that_differ_late_share_what_they_can() -> None:
    common = prompt(40)
    sampler = make()
    requests = [(session(0, n), [*common, n, n + 1], seeded(4, seed=n)) for n in range(4)]
    answers = run(ask(sampler, requests))
    sampler.close()
    assert sampler.stats.prefill_tokens == 40 + 4 * 2
    for (_, ids, _), answer in zip(requests, answers, strict=True):
        want = plain_logprobs(shared("llama"), [*ids, *answer.token_ids], len(ids))
        assert answer.logprobs == pytest.approx(want, abs=1e-4)


def test_long_prompts_go_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envgrad.sampling.engine.PREFILL_TOKENS", 16)
    sampler = make("gemma3")
    opening = prompt(50)
    requests = [(session(task, n), opening[task:], seeded(5, seed=n)) for task in range(2) for n in range(3)]
    answers = run(ask(sampler, requests))
    sampler.close()
    assert sampler.stats.prefill_tokens == 50 + 49
    for (_, ids, _), answer in zip(requests, answers, strict=True):
        want = plain_logprobs(shared("gemma3"), [*ids, *answer.token_ids], len(ids))
        assert answer.logprobs == pytest.approx(want, abs=1e-4)


async def _episode(
    sampler: LocalSampler, one: Session, opening: list[int], turns: int, pause: float
) -> list[Completion]:
    row, answers = list(opening), []
    for turn in range(turns):
        answer = await sampler.sample(row, seeded(5 + turn, seed=hash((one.order, turn))), one)
        answers.append(answer)
        row += [*answer.token_ids, 1, 2, 3]
        await asyncio.sleep(pause)
    sampler.end(one)
    return answers


async def _episodes(sampler: LocalSampler, count: int, turns: int, pause: Any) -> list[list[Completion]]:
    for n in range(count):
        sampler.begin(session(n))
    return await asyncio.gather(
        *(_episode(sampler, session(n), prompt(10 + n, seed=n), turns, pause()) for n in range(count))
    )


def test_more_sessions_than_slots_and_little_memory_give_the_same_answers() -> None:
    free = make(max_sessions=16)
    want = run(_episodes(free, 9, 3, lambda: 0.0))
    free.close()
    assert free.stats.evictions == 0
    for options in (
        {"max_sessions": 2},
        {"max_sessions": 16, "max_kv_tokens": 128},
        {"max_sessions": 16, "max_kv_tokens": 200},
    ):
        sampler = make(**options)
        got = run(_episodes(sampler, 9, 3, lambda: 0.002))
        sampler.close()
        for ours, theirs in zip(got, want, strict=True):
            assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]
        cache = sampler._engine.scheduler.cache
        assert cache.slots <= options["max_sessions"]
        assert cache.slots * cache.length <= options.get("max_kv_tokens", 2 * 128)


def test_a_session_in_a_slow_tool_is_evicted_for_one_that_waits_and_recomputes() -> None:
    sampler = make(max_sessions=1)
    opening = prompt(12)

    async def work() -> Completion:
        sampler.begin(session(0))
        sampler.begin(session(1))
        first = await sampler.sample(opening, seeded(4), session(0))
        await sampler.sample(prompt(8, seed=5), seeded(4), session(1))
        return await sampler.sample([*opening, *first.token_ids, 1], seeded(4), session(0))

    run(work())
    sampler.close()
    assert sampler.stats.evictions == 2
    # 12 prompt tokens and 3 forwarded answer tokens again
    assert sampler.stats.recomputed_tokens == 15
    assert sampler.stats.prefill_tokens == 12 + 8 + 17


def test_deterministic_mode_gives_equal_bits_under_random_delays() -> None:
    results, steps = [], []
    for trial in range(3):
        sampler = make(deterministic=True, max_sessions=4)
        delays = random.Random(trial)
        results.append(run(_episodes(sampler, 6, 3, lambda delays=delays: delays.random() * 0.004)))
        steps.append((sampler.stats.steps, sampler.stats.prefill_tokens, sampler.stats.copied_tokens))
        sampler.close()
    assert results[0] == results[1] == results[2]
    assert len(set(steps)) == 1


def test_stop_tokens_length_and_context_end_an_answer() -> None:
    sampler = make(max_context=40)
    long = run(ask(sampler, [(session(0), prompt(10), seeded(100))]))[0]
    assert len(long.token_ids) == 30 and long.stop_reason == "length"
    stop = long.token_ids[7]
    first = long.token_ids.index(stop)
    stopped = run(ask(sampler, [(session(1), prompt(10), seeded(100, stop_token_ids=(stop,)))]))[0]
    assert stopped.token_ids == long.token_ids[: first + 1] and stopped.stop_reason == "stop"
    assert len(stopped.logprobs) == first + 1
    last = run(ask(sampler, [(session(2), prompt(10), seeded(first + 1, stop_token_ids=(stop,)))]))[0]
    assert last.stop_reason == "stop"
    sampler.close()


class Letters:
    """Decodes ids to two letters each."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + one % 26) + str(one // 26) for one in ids)


def test_stop_strings_across_tokens() -> None:
    tokenizer: Any = Letters()
    sampler = make(tokenizer=tokenizer)
    long = run(ask(sampler, [(session(0), prompt(10), seeded(30))]))[0]
    text = tokenizer.decode(list(long.token_ids))
    needle = text[9:12]
    tokens = (text.index(needle) + 3 + 1) // 2
    got = run(ask(sampler, [(session(1), prompt(10), seeded(30, stop_strings=("zzz", needle)))]))[0]
    sampler.close()
    assert got.token_ids == long.token_ids[:tokens] and got.stop_reason == "stop"
    plain = make()
    with pytest.raises(ConfigurationError, match="tokenizer="):
        run(ask(plain, [(session(0), [1], seeded(stop_strings=("a",)))]))
    plain.close()


def test_bad_requests_fail_alone() -> None:
    sampler = make(max_context=16)
    with pytest.raises(SamplerFailure, match="prompt of 16 tokens leaves no room"):
        run(ask(sampler, [(session(0), prompt(16), seeded())]))
    with pytest.raises(SamplerFailure, match=f"token id {VOCABULARY}"):
        run(ask(sampler, [(session(1), [1, VOCABULARY], seeded())]))
    with pytest.raises(SamplerFailure, match="empty"):
        run(ask(sampler, [(session(2), [], seeded())]))
    with pytest.raises(ConfigurationError, match="top_p must be"):
        run(ask(sampler, [(session(3), [1], seeded(top_p=0.0))]))
    with pytest.raises(ConfigurationError, match="has not begun"):
        run(sampler.sample([1], seeded(), session(9)))
    assert len(run(ask(sampler, [(session(4), [1, 2], seeded(3))]))[0].token_ids) == 3
    sampler.close()


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
        make(**options)


def test_close_ends_the_thread_and_open_requests_and_is_idempotent() -> None:
    before = threading.active_count()
    sampler = make(deterministic=True)
    assert threading.active_count() == before + 1

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
    assert threading.active_count() == before


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


def test_a_cancelled_request_frees_its_slot_and_its_siblings_go_on() -> None:
    sampler = make(max_sessions=1, max_context=128)
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


def test_rows_that_come_back_at_once_are_waited_for() -> None:
    """Eight sessions with instant tools decode together in every turn, not in two alternating halves."""
    sampler = make(max_sessions=8)
    turns, tokens = 6, 5

    async def episode(n: int) -> None:
        row = prompt(6, seed=n)
        for turn in range(turns):
            answer = await sampler.sample(row, seeded(tokens, seed=n + turn), session(n))
            row += [*answer.token_ids, 3]

    async def work() -> None:
        for n in range(8):
            sampler.begin(session(n))
        await asyncio.gather(*(episode(n) for n in range(8)))

    run(work())
    sampler.close()
    assert sampler.stats.steps <= turns * tokens + 6


def test_a_slow_tool_delays_nobody() -> None:
    sampler = make(max_sessions=4)

    async def slow() -> None:
        await sampler.sample(prompt(5), seeded(2), session(0))
        await asyncio.sleep(0.5)
        await sampler.sample(prompt(5), seeded(2), session(0))

    async def quick() -> float:
        row, start = prompt(6), time.perf_counter()
        for turn in range(6):
            answer = await sampler.sample(row, seeded(4, seed=turn), session(1))
            row += [*answer.token_ids, 3]
        return time.perf_counter() - start

    async def work() -> float:
        sampler.begin(session(0))
        sampler.begin(session(1))
        other = asyncio.create_task(slow())
        await asyncio.sleep(0.05)
        seconds = await quick()
        await other
        return seconds

    assert run(work()) < 0.4
    sampler.close()
