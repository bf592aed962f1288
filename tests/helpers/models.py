"""Tiny models and environments that the trainer tests train in milliseconds."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from envgrad.config import GRPOConfig
from envgrad.environments.contract import StepResult
from helpers.tokenizers import CHATML, bpe_tokenizer


def tiny_llama(seed: int = 0, **changes: object) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    tokenizer = tokenizer_of()
    options = {
        "vocab_size": len(tokenizer),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    model = LlamaForCausalLM(LlamaConfig(**(options | changes)))
    # Random models seldom say one given token: here a fifth of the vocabulary ends a turn.
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(10, len(tokenizer), 5)]
    return model


def tokenizer_of() -> PreTrainedTokenizerFast:
    return bpe_tokenizer(CHATML)


class Letters:
    """One free-text turn, paid by its share of even characters: any model earns rewards that differ."""

    def reset(self, seed: int) -> str:
        return f"Write {random.Random(seed).randrange(100)}."

    def step(self, message: str) -> StepResult:
        even = sum(ord(letter) % 2 == 0 for letter in message)
        return StepResult("ok", reward=even / max(1, len(message)), done=True)


class Constant(Letters):
    """Pays the same for anything."""

    def step(self, message: str) -> StepResult:
        return StepResult("ok", done=True)

    def get_reward(self) -> float:
        return 1.0


def config(tmp_path: Path, **changes: object) -> GRPOConfig:
    options: dict[str, object] = {
        "output_dir": str(tmp_path),
        "max_steps": 2,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 12,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return GRPOConfig(**(options | changes))  # type: ignore[arg-type]


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


def zoo(name: str, vocabulary: int) -> PreTrainedModel:
    """A tiny random model of a family, on a vocabulary of this size."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": vocabulary, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.3,
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    if name == "gpt2":
        shape = {"vocab_size": vocabulary, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 2048}
        quiet = {"bos_token_id": None, "eos_token_id": None, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(GPT2Config(**shape, **quiet, initializer_range=0.3))
    if name == "bloom":
        shape = {"vocab_size": vocabulary, "hidden_size": 32, "n_layer": 2, "n_head": 4}
        return BloomForCausalLM(BloomConfig(**shape, bos_token_id=None, eos_token_id=None))
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "head_dim": 8}
    families: dict[str, tuple[type, type, dict[str, object]]] = {
        "llama": (LlamaConfig, LlamaForCausalLM, {}),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8}),
        "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, layers),
        "gemma2": (Gemma2Config, Gemma2ForCausalLM, layers),
    }
    config, model, extra = families[name]
    return model(config(**shape, **extra))
