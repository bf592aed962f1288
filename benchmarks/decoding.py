"""The same decoding through the local sampler and through ``generate``: fixed lengths, no stop token."""

from __future__ import annotations

import asyncio

import torch
from transformers import PreTrainedModel

from envgrad.sampling.local import LocalSampler
from envgrad.sampling.sampler import SamplingParams, Session

PROMPT = 50


def _prompt(model: PreTrainedModel, row: int) -> list[int]:
    generator = torch.Generator().manual_seed(row)
    return torch.randint(0, model.config.vocab_size, (PROMPT,), generator=generator).tolist()


def decode_locally(model: PreTrainedModel, lengths: list[int]) -> None:
    sampler = LocalSampler(model, max_sessions=len(lengths), max_context=PROMPT + max(lengths) + 1)

    async def one(row: int, length: int) -> None:
        session = Session(key=str(row), group=str(row), order=(row, 0, 0))
        await sampler.sample(_prompt(model, row), SamplingParams(max_tokens=length, seed=row), session)
        sampler.end(session)

    async def every() -> None:
        for row in range(len(lengths)):
            sampler.begin(Session(key=str(row), group=str(row), order=(row, 0, 0)))
        await asyncio.gather(*(one(row, length) for row, length in enumerate(lengths)))

    try:
        asyncio.run(every())
    finally:
        sampler.close()


def decode_with_generate(model: PreTrainedModel, lengths: list[int]) -> None:
    """One batch that runs to the longest row, as ``generate`` does."""
    ids = torch.tensor([_prompt(model, row) for row in range(len(lengths))])
    with torch.no_grad():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=max(lengths),
            min_new_tokens=max(lengths),
            pad_token_id=0,
        )
