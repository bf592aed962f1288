"""Tiny random models, sessions, and a plain reference, shared by the tests of this folder."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from envgrad.sampling.local import LocalSampler
from envgrad.sampling.sampler import Completion, Sampler, SamplingParams, Session

VOCABULARY = 61
NAMES = ("llama", "qwen2", "qwen3", "gemma3", "gpt2")
_SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 160, "initializer_range": 0.3,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_GPT2_SHAPE = {
    "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 160, "initializer_range": 0.3,
    "bos_token_id": None, "eos_token_id": None, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip


def build(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if name == "llama":
        model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**_SHAPE))
    elif name == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**_SHAPE))
    elif name == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**_SHAPE, head_dim=8))
    elif name == "gemma3":
        layers = ["sliding_attention", "full_attention"]
        model = Gemma3ForCausalLM(Gemma3TextConfig(**_SHAPE, head_dim=8, sliding_window=8, layer_types=layers))
    else:
        model = GPT2LMHeadModel(GPT2Config(**_GPT2_SHAPE))
    return model.eval()


@cache
def shared(name: str) -> PreTrainedModel:
    """One model per name for the tests that do not change it."""
    return build(name)


def session(task: int, sibling: int = 0) -> Session:
    return Session(key=f"train/{task}/{sibling}", group=f"train/{task}", order=(task, sibling, 0))


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()


def plain_logprobs(model: PreTrainedModel, row: Sequence[int], start: int, temperature: float = 1.0) -> list[float]:
    """Log-probs of ``row[start:]`` under one plain forward."""
    with torch.no_grad():
        output: Any = model(input_ids=torch.tensor([list(row)]), use_cache=False)
    logits: Tensor = output.logits[0, start - 1 : -1].double() / temperature
    targets = torch.tensor(list(row[start:])).unsqueeze(1)
    found: list[float] = torch.log_softmax(logits, -1).gather(1, targets).squeeze(1).tolist()
    return found


def run(work: Coroutine[Any, Any, Any], seconds: float = 20.0) -> Any:
    """Run to the end, or fail: nothing here may hang."""

    async def limited() -> Any:
        return await asyncio.wait_for(work, seconds)

    return asyncio.run(limited())


async def ask(sampler: Sampler, requests: Sequence[tuple[Session, Sequence[int], SamplingParams]]) -> list[Completion]:
    """All requests at once; each session ends with its answer."""

    async def one_answer(one: Session, ids: Sequence[int], params: SamplingParams) -> Completion:
        try:
            return await sampler.sample(ids, params, one)
        finally:
            sampler.end(one)

    for one, _, _ in requests:
        sampler.begin(one)
    return list(await asyncio.gather(*(one_answer(*request) for request in requests)))


def make_local(name: str = "llama", **options: Any) -> LocalSampler:
    return LocalSampler(shared(name), **{"max_sessions": 8, "max_context": 128, **options})


def seeded(max_tokens: int = 12, seed: int = 0, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, **options)
