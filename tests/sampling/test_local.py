from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch
from sampling_kit import NAMES, VOCABULARY, ask, make_local, plain_logprobs, prompt, run, seeded, session, shared

from envgrad.errors import ConfigurationError, SamplerFailure
from envgrad.sampling.local import LocalSampler
from envgrad.sampling.sampler import Completion, Session


@pytest.mark.parametrize("name", NAMES)
def test_greedy_equals_generate(name: str) -> None:
    sampler = make_local(name)
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
    sampler = make_local(name)
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
        sampler = make_local()
        alone += run(ask(sampler, [one]))
        sampler.close()
    assert len({answer.token_ids for answer in alone}) == len(alone)
    for shuffle, options in ((1, {}), (2, {"max_sessions": 3}), (3, {"deterministic": True})):
        order = list(range(len(requests)))
        random.Random(shuffle).shuffle(order)
        sampler = make_local(**options)
        together = run(ask(sampler, [requests[index] for index in order]))
        sampler.close()
        for index, answer in zip(order, together, strict=True):
            assert answer.token_ids == alone[index].token_ids
            assert answer.logprobs == pytest.approx(alone[index].logprobs, abs=1e-4)


def test_a_prompt_is_forwarded_once_for_siblings_that_come_together_later_or_after_the_first_has_ended() -> None:
    opening = prompt(40)
    for max_sessions in (8, 1):
        sampler = make_local(max_sessions=max_sessions)

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
    sampler = make_local()
    requests = [(session(0, n), [*common, n, n + 1], seeded(4, seed=n)) for n in range(4)]
    answers = run(ask(sampler, requests))
    sampler.close()
    assert sampler.stats.prefill_tokens == 40 + 4 * 2
    for (_, ids, _), answer in zip(requests, answers, strict=True):
        want = plain_logprobs(shared("llama"), [*ids, *answer.token_ids], len(ids))
        assert answer.logprobs == pytest.approx(want, abs=1e-4)


def test_long_prompts_go_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envgrad.sampling.engine.PREFILL_TOKENS", 16)
    sampler = make_local("gemma3")
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
    free = make_local(max_sessions=16)
    want = run(_episodes(free, 9, 3, lambda: 0.0))
    free.close()
    assert free.stats.evictions == 0
    for options in (
        {"max_sessions": 2},
        {"max_sessions": 16, "max_kv_tokens": 128},
        {"max_sessions": 16, "max_kv_tokens": 200},
    ):
        sampler = make_local(**options)
        got = run(_episodes(sampler, 9, 3, lambda: 0.002))
        sampler.close()
        for ours, theirs in zip(got, want, strict=True):
            assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]
        cache = sampler._engine.scheduler.cache
        assert cache.slots <= options["max_sessions"]
        assert cache.slots * cache.length <= options.get("max_kv_tokens", 2 * 128)


def test_a_session_in_a_slow_tool_is_evicted_for_one_that_waits_and_recomputes() -> None:
    sampler = make_local(max_sessions=1)
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
        sampler = make_local(deterministic=True, max_sessions=4)
        delays = random.Random(trial)
        results.append(run(_episodes(sampler, 6, 3, lambda delays=delays: delays.random() * 0.004)))
        steps.append((sampler.stats.steps, sampler.stats.prefill_tokens, sampler.stats.copied_tokens))
        sampler.close()
    assert results[0] == results[1] == results[2]
    assert len(set(steps)) == 1


def test_stop_tokens_length_and_context_end_an_answer() -> None:
    sampler = make_local(max_context=40)
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
    sampler = make_local(tokenizer=tokenizer)
    long = run(ask(sampler, [(session(0), prompt(10), seeded(30))]))[0]
    text = tokenizer.decode(list(long.token_ids))
    needle = text[9:12]
    tokens = (text.index(needle) + 3 + 1) // 2
    got = run(ask(sampler, [(session(1), prompt(10), seeded(30, stop_strings=("zzz", needle)))]))[0]
    sampler.close()
    assert got.token_ids == long.token_ids[:tokens] and got.stop_reason == "stop"
    plain = make_local()
    with pytest.raises(ConfigurationError, match="tokenizer="):
        run(ask(plain, [(session(0), [1], seeded(stop_strings=("a",)))]))
    plain.close()


def test_bad_requests_fail_alone() -> None:
    sampler = make_local(max_context=16)
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


def test_rows_that_come_back_at_once_are_waited_for() -> None:
    """Eight sessions with instant tools decode together in every turn, not in two alternating halves."""
    sampler = make_local(max_sessions=8)
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
    sampler = make_local(max_sessions=4)
    waits, others_ended = asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        await sampler.sample(prompt(5), seeded(2), session(0))
        waits.set()
        await others_ended.wait()
        await sampler.sample(prompt(5), seeded(2), session(0))

    async def quick() -> None:
        row = prompt(6)
        for turn in range(6):
            answer = await sampler.sample(row, seeded(4, seed=turn), session(1))
            row += [*answer.token_ids, 3]

    async def work() -> None:
        sampler.begin(session(0))
        sampler.begin(session(1))
        other = asyncio.create_task(slow())
        await waits.wait()
        await quick()
        others_ended.set()
        await other

    run(work())
    sampler.close()
