"""What the tests of the vLLM sampler share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from envgrad.sampling.sampler import Completion, SamplingParams, Session
from envgrad.sampling.vllm import VLLMSampler
from envgrad.sampling.vllm_files import WeightFolder
from envgrad.sampling.vllm_options import VLLMOptions
from envgrad.sampling.vllm_sync import FileTransport
from helpers.models import tiny_llama
from helpers.vllm_server import FakeVLLM, fake_vllm


def session(name: str, group: str = "g") -> Session:
    return Session(key=name, group=group, order=(0,))


@contextlib.contextmanager
def sampler_of(*fakes: FakeVLLM, folder: Path, **options: Any) -> Iterator[VLLMSampler]:
    defaults = {"server_timeout": 5.0, "request_timeout": 5.0, "retry_timeout": 1.0}
    made = VLLMSampler(
        VLLMOptions(base_urls=tuple(fake.url for fake in fakes), **(defaults | options)),
        lambda servers: FileTransport(WeightFolder(folder), timeout=5.0),
    )
    try:
        yield made
    finally:
        made.close()
        assert not any(folder.iterdir())  # nothing is left, whatever happened


@contextlib.contextmanager
def two_servers(folder: Path) -> Iterator[tuple[FakeVLLM, FakeVLLM, VLLMSampler]]:
    with (
        fake_vllm(tiny_llama()) as one,
        fake_vllm(tiny_llama()) as two,
        sampler_of(one, two, folder=folder) as sampler,
    ):
        yield one, two, sampler


def ask(
    sampler: VLLMSampler, prompts: Sequence[tuple[Session, list[int]]], params: SamplingParams | None = None
) -> list[Completion]:
    async def all_at_once() -> list[Completion]:
        return list(await asyncio.gather(*(sampler.sample(ids, chosen, one) for one, ids in prompts)))

    chosen = params or SamplingParams(max_tokens=6, seed=3)
    for one, _ in prompts:
        sampler.begin(one)
    try:
        return asyncio.run(all_at_once())
    finally:
        for one, _ in prompts:
            sampler.end(one)


def logprobs_of(model: torch.nn.Module, prompt: list[int], answer: Completion, temperature: float = 1.0) -> list[float]:
    ids = torch.tensor([[*prompt, *answer.token_ids]])
    with torch.no_grad():
        found = (model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature).log_softmax(-1)
    return found.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0].tolist()


def changed(model: torch.nn.Module, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: weight.detach() + 0.3 * torch.randn(weight.shape, generator=generator)
        for name, weight in model.named_parameters()
    }
