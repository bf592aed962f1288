"""The simulated sampler against hand-computed times, and against the library's own engine token by token."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

import pytest

from envgrad.scaling.costs import SamplerCosts
from envgrad.scaling.sampler_model import SimulatedGroup, SimulatedSampler, SimulatedSession

simpy = pytest.importorskip("simpy")

COSTS = SamplerCosts(step=1.0, row=0.1, prefill=0.01)


def play(
    costs: SamplerCosts, plans: list[tuple[float, list[int]]], *, prompt: int, result: int, wait: float, siblings: int,
    lingers: bool = False,
) -> tuple[list[float], SimulatedSampler]:  # fmt: skip
    """Each plan begins at its time; returns when each ended."""
    env = simpy.Environment()
    sampler = SimulatedSampler(env, costs, lingers=lingers)
    groups: dict[int, SimulatedGroup] = {}
    ended = [0.0] * len(plans)

    def episode(number: int, start: float, turns: list[int]) -> Generator[Any, Any, None]:
        group = groups.setdefault(number // siblings, SimulatedGroup(prompt=prompt))
        session = SimulatedSession(key=str(number), group=group, context=prompt)
        yield env.timeout(start)
        sampler.begin(session)
        for turn, tokens in enumerate(turns):
            if turn:
                yield env.timeout(wait)
                session.context += result
            yield sampler.ask(session, tokens)
        sampler.end(session)
        ended[number] = env.now

    for number, (start, turns) in enumerate(plans):
        env.process(episode(number, start, turns))
    env.run(until=10_000)
    return ended, sampler


def test_one_answer() -> None:
    ended, sampler = play(COSTS, [(0.0, [5])], prompt=10, result=0, wait=0.0, siblings=1)
    # a step that reads 10 tokens and samples one, and four that sample one
    assert ended == [pytest.approx(5 * 1.1 + 0.1)]
    assert (sampler.busy.steps, sampler.busy.sampled, sampler.busy.prefill_tokens) == (5, 5, 10)


def test_siblings_read_their_prompt_once() -> None:
    ended, sampler = play(COSTS, [(0.0, [5])] * 4, prompt=10, result=0, wait=0.0, siblings=4)
    assert ended == [pytest.approx(5 * 1.4 + 0.1)] * 4
    assert sampler.busy.prefill_tokens == 10


def test_a_late_sibling_joins_at_the_next_step() -> None:
    ended, _ = play(COSTS, [(0.0, [5]), (1.5, [2])], prompt=10, result=0, wait=0.0, siblings=2)
    # step 1 ends at 1.2, step 2 at 2.3; then two rows for two steps, and one for the last
    assert ended == [pytest.approx(2.3 + 2 * 1.2 + 1.1), pytest.approx(2.3 + 2 * 1.2)]


def test_a_second_answer_reads_the_last_token_and_the_result() -> None:
    ended, sampler = play(COSTS, [(0.0, [2, 3])], prompt=10, result=7, wait=4.0, siblings=1)
    assert sampler.busy.prefill_tokens == 10 + 8
    assert ended == [pytest.approx(2 * 1.1 + 0.1 + 4.0 + 3 * 1.1 + 0.08)]


def test_long_prompts_take_several_steps_and_others_decode_meanwhile() -> None:
    costs = SamplerCosts(step=1.0, prefill=0.01, prefill_budget=100)
    ended, sampler = play(costs, [(0.0, [8]), (0.5, [1])], prompt=250, result=0, wait=0.0, siblings=1)
    assert sampler.busy.prefill_tokens == 500
    # five steps of 100 tokens; in the third the first prompt is read and its row gets a token, as in the next two
    assert ended == [pytest.approx(5 * 2.0 + 5), pytest.approx(5 * 2.0)]


def test_places_are_given_to_those_that_wait_and_their_rows_are_read_again() -> None:
    costs = SamplerCosts(step=1.0, prefill=0.01, max_rows=1)
    ended, sampler = play(costs, [(0.0, [2, 2]), (0.0, [2])], prompt=10, result=5, wait=1.0, siblings=1)
    # the first is in its environment from 2.1 to 3.1; the second takes its place, and the first reads 17 tokens again
    assert ended[1] == pytest.approx(4.2)
    assert ended[0] == pytest.approx(4.2 + 2 + 0.17)
    assert sampler.busy.prefill_tokens == 10 + 10 + 17


def test_new_weights_make_rows_be_read_again_and_a_group_reads_its_prompt_once() -> None:
    env = simpy.Environment()
    sampler = SimulatedSampler(env, COSTS, lingers=False)
    group = SimulatedGroup(prompt=10)
    sessions = [SimulatedSession(key=str(number), group=group, context=10) for number in range(3)]

    def publish() -> Generator[Any, Any, None]:
        yield env.timeout(3.0)
        sampler.pause()
        yield env.timeout(5.0)
        sampler.update(1)

    for one in sessions:
        sampler.ask(one, 6)
    env.process(publish())
    env.run(until=100)
    # 1.4 + 1.3 + 1.3 until 4.0, where each row has 13 tokens; the pause ends at 8.0; 13 + 3 + 3 tokens are read again
    assert sampler.busy.prefill_tokens == 10 + 13 + 3 + 3
    assert [one.oldest for one in sessions] == [0, 0, 0]
    assert sampler.busy.sampled == 18


def test_a_step_with_other_rows_takes_longer() -> None:
    costs = SamplerCosts(step=1.0, change=0.5)
    ended, sampler = play(costs, [(0.0, [6]), (2.5, [2])], prompt=1, result=0, wait=0.0, siblings=1)
    # 1.5 and 1.0 alone; from 2.5 on 1.5 and 1.0 together; 1.5 and 1.0 alone again
    assert ended == [pytest.approx(7.5), pytest.approx(5.0)]
    assert (sampler.busy.changes, sampler.busy.decode_steps) == (3, 6)


def test_a_groups_prompt_is_read_once_where_rows_share_it() -> None:
    alone, shared = SamplerCosts(step=0.0, context=1.0), SamplerCosts(step=0.0, context=1.0, shares_prompts=True)
    # a step that reads the prompt, and one over two rows of 12 tokens
    apart, _ = play(alone, [(0.0, [2])] * 2, prompt=10, result=0, wait=0.0, siblings=2)
    together, _ = play(shared, [(0.0, [2])] * 2, prompt=10, result=0, wait=0.0, siblings=2)
    assert apart[0] - together[0] == pytest.approx(2 * 10)


def test_a_sampler_beside_training_is_slower_from_the_next_step_on() -> None:
    env = simpy.Environment()
    sampler = SimulatedSampler(env, SamplerCosts(step=1.0), beside=2.0, lingers=False)
    session = SimulatedSession(key="a", group=SimulatedGroup(prompt=1), context=1)
    answered = sampler.ask(session, 6)

    def train() -> Generator[Any, Any, None]:
        yield env.timeout(2.5)
        sampler.set_training(True)
        yield env.timeout(4.0)
        sampler.set_training(False)

    env.process(train())
    env.run(until=answered)
    # three steps of 1 s until 3.0; two of 2 s until 7.0; one of 1 s
    assert env.now == pytest.approx(8.0)


def test_the_engine_forwards_the_same_tokens() -> None:
    """Prompts, results and decoded tokens of a group, counted by the local engine and by the simulated one."""
    from envgrad.sampling.local import LocalSampler
    from envgrad.sampling.sampler import SamplingParams, Session
    from helpers.models import tiny_llama

    prompt, result, turns = list(range(1, 21)), [3, 4, 5, 6, 7], [4, 6, 3]
    model = tiny_llama()
    real = LocalSampler(model, max_sessions=8, max_context=200)

    async def episode(sibling: int) -> None:
        session = Session(key=f"0/{sibling}", group="0", order=(0, sibling, 0))
        real.begin(session)
        row = list(prompt)
        for turn, tokens in enumerate(turns):
            if turn:
                row += result
            answer = await real.sample(row, SamplingParams(max_tokens=tokens, seed=sibling), session)
            row += answer.token_ids
        real.end(session)

    async def all_of_them() -> None:
        await asyncio.gather(*(episode(sibling) for sibling in range(4)))

    try:
        asyncio.run(all_of_them())
        counted = real.stats
    finally:
        real.close()
    _, simulated = play(
        COSTS, [(0.0, turns)] * 4, prompt=len(prompt), result=len(result), wait=0.001, siblings=4, lingers=True
    )
    assert counted.sampled_tokens == simulated.busy.sampled == 4 * sum(turns)
    assert counted.prefill_tokens == simulated.busy.prefill_tokens
