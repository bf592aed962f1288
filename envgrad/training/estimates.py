"""What a run will take, told before it starts: estimates from the model's sizes, not measurements of the run.

Memory of one device, in bytes. A layer of width ``d``, ``H`` heads and ``K`` key-value heads of size ``h``, and an MLP
of size ``f`` keeps for its backward, per token, about ``5 d + 2 H h + 2 K h + 4 f`` values: the inputs of its norms,
projections and products. With ``activation_checkpointing`` it keeps ``d``, and one layer at a time keeps it all. The
head's logits come in chunks, and are left out, as are fragments, temporary copies, and what the process takes anyway.

Time is the floor of ``flops`` at the measured rate, with every episode as long as it may be.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from envgrad.config import RolloutConfig, round_size
from envgrad.packing import TOKENS_ON_CPU
from envgrad.sampling.limits import text_config
from envgrad.training.flops import ModelCost, RowWork, Work

_STATE_BYTES = {
    "adamw_torch": 8.0,
    "adamw_torch_fused": 8.0,
    "adamw_torch_8bit": 2.0,
    "adamw_bnb_8bit": 2.0,
    "adamw_8bit": 2.0,
    "paged_adamw_32bit": 8.0,
    "paged_adamw_8bit": 2.0,
    "sgd": 0.0,
    "adagrad": 4.0,
    "rmsprop": 4.0,
    "lion_32bit": 4.0,
    "lion_8bit": 1.0,
}
"""of an optimizer's state for each trained weight in float32"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryItem:
    """One use of memory."""

    name: str
    size: int | None
    """bytes; None if it is not known"""
    of: str
    """what it is made of"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The least that a step's model work can take, were every episode as long as it may be."""

    rate: float
    """operations per second"""
    sampled: int
    """tokens sampled for one optimizer step, at most"""
    sampling: float
    """seconds"""
    training: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """An episode in tokens."""

    prompt: int
    """of the first task"""
    completion: int
    """at most, tool results included"""

    @property
    def row(self) -> int:
        return self.prompt + self.completion


def lengths_of(config: RolloutConfig, prompt: int, max_context: int | None) -> Lengths:
    """The longest episode behind a prompt of so many tokens.

    Example:
        >>> from envgrad.config import GRPOConfig
        >>> lengths_of(GRPOConfig(output_dir="runs/doc", max_completion_length=100), 30, 64)
        Lengths(prompt=30, completion=34)
    """
    contexts = [one for one in (config.max_context, max_context) if one is not None]
    room = min(contexts) - prompt if contexts else config.max_completion_length
    return Lengths(prompt=prompt, completion=max(1, min(config.max_completion_length, room)))


def estimate_memory(
    model: PreTrainedModel, config: RolloutConfig, lengths: Lengths, *, in_flight: int, references: int
) -> list[MemoryItem]:
    """Uses of memory on the device that trains, the largest that each can become.

    Args:
        model: The policy; it may be without weights (on torch's meta device).
        config: The run's.
        lengths: Of an episode.
        in_flight: Episodes played at once.
        references: Frozen copies of the policy beside it.
    """
    weights = sum(one.numel() * one.element_size() for one in model.parameters())
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    gradients = sum(one.numel() * one.element_size() for one in model.parameters() if one.requires_grad)
    copies = references + _sampler_copies(config)
    items = [
        MemoryItem(name="weights", size=weights, of=f"{model.num_parameters():,} parameters"),
        MemoryItem(name="gradients", size=gradients, of=f"{trained:,} trained"),
        _optimizer(config, trained),
    ]
    if copies:
        of = f"{copies} more {'copy' if copies == 1 else 'copies'}: the reference, or what the sampler reads"
        items.append(MemoryItem(name="other weights", size=copies * weights, of=of))
    return [*items, _kv_cache(model, config, lengths, in_flight), _activations(model, config, lengths)]


def _sampler_copies(config: RolloutConfig) -> int:
    if config.sampler == "process":
        return config.sampler_processes
    return int(config.sampler == "local" and config.asynchronous)


def _optimizer(config: RolloutConfig, trained: int) -> MemoryItem:
    name = str(getattr(config.optim, "value", config.optim))
    size = _STATE_BYTES.get(name)
    if size is None:
        return MemoryItem(name="optimizer", size=None, of=f"the state of {name} is not known here")
    return MemoryItem(name="optimizer", size=int(size * trained), of=f"{name}: {size:g} bytes for each trained weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    layers: int
    width: int
    heads: int
    kv_heads: int
    head: int
    mlp: int


def _sizes(model: PreTrainedModel) -> _Sizes | None:
    """None where the configuration does not tell; configurations are open sets of attributes."""
    config = text_config(model)
    layers, heads, width = (
        getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    if not (isinstance(layers, int) and isinstance(heads, int) and heads and isinstance(width, int)):
        return None
    return _Sizes(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head=getattr(config, "head_dim", None) or width // heads,
        mlp=getattr(config, "intermediate_size", None) or 4 * width,
    )


def _computed_bytes(model: PreTrainedModel, config: RolloutConfig) -> int:
    """Of one number as it is computed."""
    return 2 if config.bf16 or config.fp16 else next(model.parameters()).element_size()


def _kv_cache(model: PreTrainedModel, config: RolloutConfig, lengths: Lengths, in_flight: int) -> MemoryItem:
    sizes = _sizes(model)
    if config.sampler == "vllm":
        return MemoryItem(name="KV cache", size=0, of="on the vLLM server")
    if sizes is None:
        return MemoryItem(name="KV cache", size=None, of="the model's configuration does not tell its sizes")
    tokens = in_flight * lengths.row
    capped = config.max_kv_tokens is not None and config.max_kv_tokens < tokens
    tokens = min(tokens, config.max_kv_tokens or tokens)
    each = 2 * sizes.layers * sizes.kv_heads * sizes.head * _computed_bytes(model, config)
    of = "max_kv_tokens" if capped else f"{in_flight} episodes of {lengths.row:,} tokens"
    return MemoryItem(name="KV cache", size=tokens * each, of=f"{of}, {each:,} bytes a token")


def microbatch_tokens(config: RolloutConfig, lengths: Lengths) -> int:
    """Tokens of the largest forward that is trained: whole groups that share their prompt, up to the budget.

    Example: groups of 8 episodes of 100 tokens behind a prompt of 30; a CPU gathers groups up to 2048 tokens.
        >>> from envgrad.config import GRPOConfig
        >>> config = GRPOConfig(output_dir="runs/doc", per_device_train_batch_size=8, use_cpu=True)
        >>> microbatch_tokens(config, Lengths(prompt=30, completion=100))
        830
    """
    group = lengths.prompt + config.num_generations * lengths.completion
    step = max(1, config.episodes_per_step // config.num_generations) * group
    gathered = max(group, TOKENS_ON_CPU) if config.device.type == "cpu" else step
    budget = config.max_tokens_per_microbatch or step
    return max(lengths.row, min(step, gathered, budget))


def _activations(model: PreTrainedModel, config: RolloutConfig, lengths: Lengths) -> MemoryItem:
    sizes, tokens = _sizes(model), microbatch_tokens(config, lengths)
    if sizes is None:
        return MemoryItem(name="activations", size=None, of="the model's configuration does not tell its sizes")
    layer = 5 * sizes.width + 2 * (sizes.heads + sizes.kv_heads) * sizes.head + 4 * sizes.mlp
    values = sizes.layers * (sizes.width if config.activation_checkpointing else layer)
    values += layer if config.activation_checkpointing else 0
    size = tokens * values * _computed_bytes(model, config)
    return MemoryItem(name="activations", size=size, of=f"one micro-batch of {tokens:,} tokens")


def estimate_step(model: PreTrainedModel, config: RolloutConfig, lengths: Lengths, rate: float) -> StepTime | None:
    """The floor of an optimizer step's model work at ``rate``; None where the model's operations are not known."""
    cost = ModelCost.of(model)
    if cost is None:
        return None
    siblings = config.num_generations
    work = Work.of_rows(
        RowWork(episode // siblings, lengths.prompt, lengths.row - 1, lengths.completion)
        for episode in range(config.episodes_per_step)
    )
    passes = config.num_iterations
    return StepTime(
        rate=rate,
        sampled=config.episodes_per_step * lengths.completion,
        sampling=cost.forward(work) / rate / passes,
        training=cost.training(work) / rate,
    )


def round_episodes(config: RolloutConfig, in_flight: int) -> int:
    """Episodes of a round that are played at once."""
    return min(in_flight, round_size(config))


def compute_dtype(model: PreTrainedModel, config: RolloutConfig) -> torch.dtype:
    """What the model's products are computed in."""
    if config.bf16 or config.fp16:
        return torch.bfloat16 if config.bf16 else torch.float16
    dtype: torch.dtype = next(model.parameters()).dtype
    return dtype
