"""Sampler and trainer agree: the importance ratio of an unchanged policy is 1 on every token of every episode."""

from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import PreTrainedModel

from envgrad.chat.renderer import ChatRenderer
from envgrad.logprobs import check_packed_forward, install_policy_forward, policy_logprobs
from envgrad.packing import pack
from envgrad.rollout.row import TokenRow
from envgrad.sampling.local import make_local_sampler
from envgrad.sampling.sampler import Sampler, SamplingParams, Session
from envgrad.types import TrainingSample
from helpers.chat_templates import CASES, TOOLS
from helpers.models import zoo

TEMPERATURE = 0.6
OPENING = [{"role": "user", "content": "Do what you can."}]


async def episode(sampler: Sampler, renderer: ChatRenderer, sibling: int, turns: int = 3) -> TrainingSample:
    """Turns of random tokens with a tool's result behind each, as the rollout appends them."""
    session = Session(key=f"0/{sibling}", group="0", order=(0, sibling, 0))
    row = TokenRow(renderer.open(OPENING, TOOLS))
    sampler.begin(session)
    for turn in range(turns):
        params = SamplingParams(
            max_tokens=6 + sibling,
            temperature=TEMPERATURE,
            stop_token_ids=renderer.stop_token_ids,
            seed=10 * sibling + turn,
        )
        answer = await sampler.sample(row.token_ids, params, session)
        row.add_sampled(answer.token_ids, answer.logprobs, version=answer.policy_version)
        result = {"role": "tool", "name": "inc", "tool_call_id": "call00000", "content": f"now {turn}"}
        row.add_given(renderer.suffix(answer.token_ids, [result], TOOLS))
    sampler.end(session)
    return TrainingSample(
        token_ids=tuple(row.token_ids),
        mask=tuple(row.mask),
        logprobs=tuple(row.logprobs),
        versions=tuple(row.versions),
        advantages=tuple(float(trained) for trained in row.mask),
        prompt_length=row.prompt_length,
        group="0",
    )


def largest_error(model: PreTrainedModel, renderer: ChatRenderer) -> float:
    mode = "shared" if check_packed_forward(model) is None else "single"
    sampler = make_local_sampler(model, max_sessions=3, max_context=1024)
    install_policy_forward(model)

    async def play() -> list[TrainingSample]:
        return list(await asyncio.gather(*(episode(sampler, renderer, sibling) for sibling in range(3))))

    samples = asyncio.run(play())
    sampler.close()
    batch = pack(samples, [1.0] * 3, mode=mode)
    assert batch.num_tokens == sum(sum(sample.mask) for sample in samples) > 20
    errors = []
    with torch.no_grad():
        for packed in batch.micro_batches:
            found = policy_logprobs(model.eval(), packed, temperature=TEMPERATURE, entropy="none").logprobs
            errors.append(float(((found - packed.sampler_logprobs).exp() - 1).abs().max()))
    return max(errors)


@pytest.mark.parametrize("name", sorted(CASES))
def test_on_every_template(name):
    renderer = CASES[name].renderer()
    assert largest_error(zoo("llama", len(renderer.tokenizer)), renderer) < 1e-4


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma3", "gpt2", "gemma2", "bloom"])
def test_on_every_model(name):
    """Gemma 2 (soft-capping) and Bloom (ALiBi) go through the fallbacks: `generate` and one row per forward."""
    renderer = CASES["chatml"].renderer()
    assert largest_error(zoo(name, len(renderer.tokenizer)), renderer) < 1e-4
