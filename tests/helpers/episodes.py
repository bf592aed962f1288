"""Episodes and groups made by hand, and the tiny model that trains them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from envgrad.algorithms.base import Algorithm, ReferenceLogprobs
from envgrad.attention import use_envgrad_attention
from envgrad.logprobs import install_policy_forward, policy_logprobs
from envgrad.losses import LossInputs, merge_metrics
from envgrad.packing import pack
from envgrad.types import Episode, Group, StopReason, Task, TrainingSample, Turn


def task_at(position: int) -> Task:
    return Task(position=position, split="train", environment="e", group_id=position, seed=position)


def episode(
    position: int,
    sibling: int,
    reward: float | None,
    *,
    turns: Sequence[float | None] = (None,),
    tokens: int = 2,
    rewards: Mapping[str, float | None] | None = None,
    truncated: bool = False,
) -> Episode:
    """A prompt of 4 ids, then per turn ``tokens`` sampled ids and one of the environment's."""
    own = (tokens + 1) * len(turns)
    generator = torch.Generator().manual_seed(10 * position + sibling)
    ids = torch.randint(5, 40, (own,), generator=generator).tolist()
    mask = (0,) * 4 + ((1,) * tokens + (0,)) * len(turns)
    return Episode(
        task=task_at(position), sibling=sibling, token_ids=(1, 2, 3, 4 + position, *ids), mask=mask,
        logprobs=tuple((-1.0 - 0.1 * at) * trained for at, trained in enumerate(mask)), versions=(0,) * (4 + own),
        prompt_length=4, messages=(), reward=reward, rewards=rewards or {},
        stop_reason=StopReason.MAX_TURNS if truncated else StopReason.ANSWER,
        turns=tuple(
            Turn(start=4 + (tokens + 1) * number, num_tokens=tokens, policy_version=0, message={}, reward=paid)
            for number, paid in enumerate(turns)
        ),
    )  # fmt: skip


def group_of(*episodes: Episode) -> Group:
    return Group(task=episodes[0].task, episodes=episodes)


def tiny(seed: int = 0) -> PreTrainedModel:
    """Two layers on 40 ids, as a policy."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    )
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    use_envgrad_attention(model)
    install_policy_forward(model)
    return model


def reference_of(groups: Sequence[Group], *, lower: float = 0.25) -> ReferenceLogprobs:
    """A reference that finds each sampled token less likely by ``lower`` nats."""
    return {
        (one.task.key, one.sibling): tuple(
            logprob - lower for logprob, trained in zip(one.logprobs, one.mask, strict=True) if trained
        )
        for group in groups
        for one in group.episodes
    }


def step(
    model: PreTrainedModel, algorithm: Algorithm, samples: list[TrainingSample], max_tokens: int | None, pads: int = 0
) -> tuple[float, dict[str, float], torch.Tensor]:
    """Loss, metrics and gradient of one optimizer step whose old policy was another."""
    batch = pack(samples, algorithm.weights(samples), max_tokens=max_tokens, totals=algorithm.totals(samples))
    loss, parts = 0.0, []
    for packed in batch.padded_to(len(batch) + pads).micro_batches:
        outputs = policy_logprobs(model, packed, entropy=algorithm.entropy)
        old = outputs.logprobs.detach() * 0.97
        result = algorithm.loss(LossInputs.of(replace(packed, old_logprobs=old), outputs))
        result.loss.backward()
        loss += result.loss.item()
        parts.append(result.metrics)
    gradient = torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten().clone() for p in model.parameters()]
    )
    model.zero_grad()
    return loss, merge_metrics(parts), gradient
