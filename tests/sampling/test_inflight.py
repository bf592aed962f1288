"""Weights that change while answers are sampled: each token says whose it is, and old keys and values are not used."""

from __future__ import annotations

import asyncio
import copy

import pytest
import sampling_kit as kit
import torch
from decoder_kit import DECODERS

from envgrad.sampling.local import LocalSampler
from envgrad.sampling.sampler import SamplingParams, Session
from helpers.models import tiny_llama

pytestmark = pytest.mark.usefixtures("slow_steps")

LENGTH = 450


async def _sample(sampler, prompts, params, weights):
    sessions = [Session(key=f"t/{n}", group="t", order=(0, n, 0)) for n in range(len(prompts))]
    for session in sessions:
        sampler.begin(session)
    asked = [
        asyncio.ensure_future(sampler.sample(prompt, params(number), session))
        for number, (prompt, session) in enumerate(zip(prompts, sessions, strict=True))
    ]
    while sampler.stats.sampled_tokens < 10 * len(prompts):
        await asyncio.sleep(0)
    await asyncio.to_thread(sampler.update_weights, 1, weights)
    async with asyncio.timeout(60):
        answers = await asyncio.gather(*asked)
    for session in sessions:
        sampler.end(session)
    return answers


def _changed(model):
    generator = torch.Generator().manual_seed(5)
    return {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in model.state_dict().items()
    }


@pytest.mark.parametrize("alike", [True, False])
def test_each_token_has_the_log_prob_of_its_own_versions_weights(alike, kind):
    """Siblings that are alike so far (one seed) share a forward when they start over; others do not."""
    model, old, new = tiny_llama(), tiny_llama(), tiny_llama()
    weights = _changed(old)
    new.load_state_dict(weights)
    prompts = [[5, 6, 7, 8]] * 3 if alike else [[5, 6, 7, 8 + n] for n in range(3)]
    sampler = LocalSampler(model, max_sessions=4, max_context=512)
    try:
        answers = asyncio.run(
            _sample(sampler, prompts, lambda n: SamplingParams(max_tokens=LENGTH, seed=0 if alike else n), weights)
        )
    finally:
        sampler.close()
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.versions is not None and len(answer.versions) == len(answer.token_ids) == LENGTH
        assert list(answer.versions) == sorted(answer.versions) and set(answer.versions) == {0, 1}
        assert answer.policy_version == 0
        row = torch.tensor([[*prompt, *answer.token_ids]])
        for version, reference in ((0, old), (1, new)):
            with torch.no_grad():
                logs = reference.eval()(input_ids=row).logits[0].log_softmax(-1)
            for number, (token, own) in enumerate(zip(answer.token_ids, answer.versions, strict=True)):
                if own == version:
                    at = len(prompt) + number - 1
                    assert logs[at, token].item() == pytest.approx(answer.logprobs[number], abs=1e-4)
    if alike:
        assert len({answer.token_ids for answer in answers}) == 1, "one seed, one answer, updates or not"


def test_an_answer_of_one_version_says_so_in_short():
    sampler = LocalSampler(tiny_llama(), max_sessions=1, max_context=64)
    session = Session(key="t/0", group="t", order=(0, 0, 0))
    sampler.begin(session)
    answer = asyncio.run(sampler.sample([5, 6], SamplingParams(max_tokens=4), session))
    sampler.close()
    assert answer.versions is None and answer.policy_version == 0


@pytest.mark.parametrize("own_copy", [False, True])
def test_weights_that_a_fused_optimizer_writes_in_place_leave_no_stale_copy(own_copy, kind):
    """Such an optimizer leaves no trace in the parameters' counters, and the sampler computes from copies of them."""
    model = kit.build("llama").train()
    sampled = copy.deepcopy(model) if own_copy else model
    sampler = LocalSampler(sampled, max_sessions=2, max_context=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    answers = []
    try:
        for version in range(3):
            sampler.update_weights(version, dict(model.state_dict()) if own_copy else None)
            answer = kit.run(kit.ask(sampler, [(kit.session(version), kit.prompt(6), kit.seeded(6, seed=1))]))[0]
            assert isinstance(sampler._engine._fast, DECODERS[kind]), "it is the fast forward that is tested"
            row = [*kit.prompt(6), *answer.token_ids]
            assert answer.logprobs == pytest.approx(kit.plain_logprobs(model.eval(), row, 6), abs=1e-3)
            answers.append(answer)
            model.train()
            model(input_ids=torch.tensor([row])).logits.logsumexp(-1).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        sampler.close()
    assert len({answer.logprobs for answer in answers}) == 3, "the weights did move"
