"""Logged episodes as a dataset, and a supervised warm start from them.

::

    episodes = export_episodes("runs/first", min_reward=1.0)     # a datasets.Dataset
    warm_start(trainer, episodes)                                # imitate them
    trainer.train()                                              # and go on from there

What is imitated is what was sampled: the exact token ids that the log holds, never a chat rendered anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from envgrad.episodes.reader import EpisodeReader
from envgrad.episodes.records import EpisodeFilter, EpisodeRecord
from envgrad.errors import ConfigurationError
from envgrad.logprobs import policy_logprobs
from envgrad.packing import Batch, StepTotals, pack
from envgrad.types import TrainingSample

if TYPE_CHECKING:
    from datasets import Dataset

    from envgrad.training.trainer import RolloutTrainer


def export_episodes(
    run: str | Path,
    *,
    min_reward: float | None = None,
    split: str = "train",
    environment: str | None = None,
    from_step: int = 0,
) -> Dataset:
    """The episodes that a run has logged, as a ``datasets.Dataset``.

    Columns: ``prompt`` and ``completion`` (messages before and after the first answer; the arguments of tool calls as
    JSON text), ``reward``, ``rewards`` (components, as JSON text), ``advantage``, ``environment``, ``step``,
    ``stop_reason``, ``group_id``, ``sibling``, and the exact tokens: ``token_ids``, ``mask``, ``prompt_length``.

    Args:
        run: A run's ``output_dir``.
        min_reward: Leaves out episodes that earned less, and those without a reward.
        split: ``train`` or ``eval``.
        environment: Only episodes of this one.
        from_step: Leaves out episodes that were played before this optimizer step.

    Raises:
        ConfigurationError: no episode was logged, or none is left.
    """
    from datasets import Dataset

    chosen = EpisodeFilter(
        split=split, environment=environment, first_step=from_step, min_reward=min_reward, failed=False
    )
    with EpisodeReader(run) as reader:
        numbers = [row.number for row in reader.rows(chosen, order="oldest", limit=None)]
        rows = [_row(record) for record in reader.episodes(numbers)]
    if not rows:
        raise ConfigurationError(
            f"none of the episodes of {run} is left with split={split!r}, min_reward={min_reward}, "
            f"environment={environment!r}, from_step={from_step}; ask for less"
        )
    return Dataset.from_list(rows)


def _row(record: EpisodeRecord) -> dict[str, Any]:
    messages = [_message(message) for message in record.messages]
    summary, tokens = record.summary, record.rows[0]
    return {
        "prompt": messages[: record.opening],
        "completion": messages[record.opening :],
        "rewards": json.dumps(dict(summary.rewards)),
        "prompt_length": tokens.prompt_length,
        "reward": summary.reward,
        "advantage": summary.advantage,
        "environment": summary.environment,
        "step": summary.step,
        "stop_reason": summary.stop_reason,
        "group_id": summary.group_id,
        "sibling": summary.sibling,
        "token_ids": list(tokens.token_ids),
        "mask": list(tokens.mask),
    }


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose shape does not depend on which tool was called, as columns need it."""
    calls = [
        {
            "id": call.get("id"),
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in message.get("tool_calls", ())
    ]
    content = message["content"]
    return {
        "role": message["role"],
        "content": content if isinstance(content, str) else "".join(block["text"] for block in content or ()),
        "reasoning_content": message.get("reasoning_content"),
        "tool_calls": calls or None,
        "tool_call_id": message.get("tool_call_id"),
        "name": message.get("name"),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """What a warm start did: the mean negative log-likelihood of the imitated tokens, per optimizer step."""

    losses: tuple[float, ...]
    episodes: int


def warm_start(
    trainer: RolloutTrainer,
    episodes: Dataset | str | Path | Iterable[Mapping[str, Any]],
    *,
    epochs: int = 1,
    learning_rate: float = 1e-4,
    batch_size: int = 32,
    max_grad_norm: float = 1.0,
) -> WarmStart:
    """Imitate ``episodes`` before reinforcement begins: next-token loss on the tokens that the policy sampled in them.

    ::

        loss = - (1 / M) * sum over the step's M sampled tokens of log p(token | all before it)

    Uses AdamW at a constant rate and leaves the trainer's own optimizer, schedule and step count as they were.

    Args:
        trainer: Its policy is changed.
        episodes: From ``export_episodes``, or a run's folder (all its training episodes).
        epochs: Passes over them, each in an order of its own.
        learning_rate: Of AdamW.
        batch_size: Episodes per optimizer step.
        max_grad_norm: Gradients are clipped to it.

    Raises:
        ConfigurationError: no episode, one without tokens, or token ids that the policy does not have.
    """
    rows = export_episodes(episodes) if isinstance(episodes, (str, Path)) else episodes
    samples = [_sample(row, number) for number, row in enumerate(rows)]
    if not samples or epochs < 1 or batch_size < 1:
        raise ConfigurationError(f"{len(samples)} episodes, epochs={epochs}, batch_size={batch_size}: all must be >= 1")
    _check_vocabulary(trainer, samples)
    model = trainer.model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=learning_rate)
    generator = torch.Generator().manual_seed(trainer.user_args.seed)
    losses = []
    training = model.training
    model.train()
    try:
        for _ in range(epochs):
            order = torch.randperm(len(samples), generator=generator).tolist()
            for begin in range(0, len(order), batch_size):
                chosen = [samples[index] for index in order[begin : begin + batch_size]]
                losses.append(_step(trainer, model, optimizer, chosen, max_grad_norm))
    finally:
        model.train(training)
    return WarmStart(losses=tuple(losses), episodes=len(samples))


def _step(
    trainer: RolloutTrainer,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    samples: Sequence[TrainingSample],
    max_grad_norm: float,
) -> float:
    tokens = sum(sample.num_trained_tokens for sample in samples)
    batch: Batch = pack(
        samples,
        [1.0 / tokens] * len(samples),
        totals=StepTotals(num_samples=len(samples), num_tokens=tokens),
        max_tokens=trainer.user_args.max_tokens_per_microbatch,
        mode=trainer.pack_mode,
    )
    total = 0.0
    for packed in batch.micro_batches:
        moved = packed.to(trainer.args.device)
        with trainer.compute_loss_context_manager():
            outputs = policy_logprobs(model, moved)
            loss = -(moved.weights * outputs.logprobs).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


def _sample(row: Mapping[str, Any], number: int) -> TrainingSample:
    missing = [name for name in ("token_ids", "mask", "prompt_length") if row.get(name) is None]
    if missing or not any(row["mask"]):
        raise ConfigurationError(
            f"episode {number} has no {missing or 'sampled token'}; give episodes from export_episodes()"
        )
    size = len(row["token_ids"])
    return TrainingSample(
        token_ids=tuple(row["token_ids"]),
        mask=tuple(row["mask"]),
        logprobs=(0.0,) * size,
        versions=(0,) * size,
        advantages=tuple(float(value) for value in row["mask"]),
        prompt_length=row["prompt_length"],
        group=str(row.get("group_id", number)),
    )


def _check_vocabulary(trainer: RolloutTrainer, samples: Sequence[TrainingSample]) -> None:
    size = trainer.rollouts.policy.base.get_input_embeddings().weight.shape[0]
    largest = max(max(sample.token_ids) for sample in samples)
    if largest >= size:
        raise ConfigurationError(
            f"the episodes hold token id {largest}, but the policy has {size} tokens: they were played with another "
            "tokenizer; play new ones with this model"
        )
