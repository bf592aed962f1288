"""Small models, a packed row for them, and what is learned from it."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from envgrad.attention import use_envgrad_attention
from envgrad.logprobs import policy_logprobs
from envgrad.packing import MicroBatch, pack
from envgrad.types import TrainingSample

COMMON = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
}  # fmt: skip


def model_of(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    use_envgrad_attention(model)
    return model.train()


def rows() -> MicroBatch:
    """Two siblings behind a prompt of 20 tokens; 9 of 24 and 1 of 5 own tokens are trained."""
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, 50, (20,), generator=generator).tolist()
    samples = []
    for own, trained in ((24, {0, 1, 2, 9, 10, 11, 20, 21, 22}), (5, {2})):
        ids = (*prompt, *torch.randint(0, 50, (own,), generator=generator).tolist())
        mask = (0,) * 20 + tuple(int(place in trained) for place in range(own))
        samples.append(
            TrainingSample(
                token_ids=ids, mask=mask, logprobs=(0.0,) * len(ids), versions=(0,) * len(ids),
                advantages=tuple(map(float, mask)), prompt_length=20, group="g",
            )
        )  # fmt: skip
    return pack(samples, [1.0, 1.0]).micro_batches[0]


def learned(model: PreTrainedModel, batch: MicroBatch) -> list[Tensor]:
    logprobs = policy_logprobs(model, batch).logprobs
    (logprobs * torch.arange(1.0, len(logprobs) + 1)).sum().backward()
    found = [logprobs.detach(), *(x.grad.clone() for x in model.parameters() if x.grad is not None)]
    model.zero_grad()
    return found


def assert_equal(ours: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(ours, expected, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max().clamp(min=1e-3)
