from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from envgrad.config import GRPOConfig
from envgrad.training.estimates import (
    Lengths,
    compute_dtype,
    estimate_memory,
    estimate_step,
    lengths_of,
    microbatch_tokens,
)
from helpers.models import tiny_llama


def config(tmp_path: Path, **changes: Any) -> GRPOConfig:
    options = {
        "per_device_train_batch_size": 16, "num_generations": 8, "max_completion_length": 100, "use_cpu": True,
        "report_to": "none",
    }  # fmt: skip
    return GRPOConfig(output_dir=str(tmp_path), **(options | changes))


LENGTHS = Lengths(prompt=30, completion=100)


def sizes(tmp_path: Path, references: int = 0, **changes: Any) -> dict[str, int | None]:
    items = estimate_memory(tiny_llama(), config(tmp_path, **changes), LENGTHS, in_flight=16, references=references)
    return {item.name: item.size for item in items}


def test_memory_in_numbers_counted_by_hand(tmp_path: Path) -> None:
    """Width 16, 2 layers, 4 heads and 2 key-value heads of size 4, an MLP of 32, float32."""
    weights = sum(one.numel() for one in tiny_llama().parameters())
    layer = 5 * 16 + 2 * (4 + 2) * 4 + 4 * 32
    assert sizes(tmp_path) == {
        "weights": 4 * weights,
        "gradients": 4 * weights,
        "optimizer": 8 * weights,
        "KV cache": 16 * 130 * (2 * 2 * 2 * 4 * 4),
        "activations": 2 * (30 + 8 * 100) * 2 * layer * 4,
    }


def test_what_changes_memory(tmp_path: Path) -> None:
    plain = sizes(tmp_path)
    assert sizes(tmp_path, references=1)["other weights"] == plain["weights"]
    assert sizes(tmp_path, max_kv_tokens=260)["KV cache"] == 260 * 2 * 2 * 2 * 4 * 4
    assert sizes(tmp_path, optim="sgd")["optimizer"] == 0
    assert sizes(tmp_path, optim="adafactor")["optimizer"] is None
    checkpointed, kept = sizes(tmp_path, activation_checkpointing=True)["activations"], plain["activations"]
    assert checkpointed is not None and kept is not None and checkpointed < kept
    process = sizes(tmp_path, sampler="process", sampler_processes=2)
    assert process["other weights"] == 2 * (plain["weights"] or 0)


def test_tokens_of_a_micro_batch(tmp_path: Path) -> None:
    assert microbatch_tokens(config(tmp_path), LENGTHS) == 2 * 830  # both groups: a CPU gathers up to 2048
    assert microbatch_tokens(config(tmp_path, max_tokens_per_microbatch=500), LENGTHS) == 500
    assert microbatch_tokens(config(tmp_path, max_tokens_per_microbatch=50), LENGTHS) == 130  # a row is not cut
    assert microbatch_tokens(config(tmp_path, per_device_train_batch_size=64), LENGTHS) == 2048


def test_lengths_are_bounded_by_the_context(tmp_path: Path) -> None:
    assert lengths_of(config(tmp_path), 30, None) == LENGTHS
    assert lengths_of(config(tmp_path), 30, 80).completion == 50
    assert lengths_of(config(tmp_path, max_context=70), 30, 80).completion == 40
    assert lengths_of(config(tmp_path), 90, 80).completion == 1


def test_time_is_operations_over_the_rate(tmp_path: Path) -> None:
    model = tiny_llama()
    one = estimate_step(model, config(tmp_path), LENGTHS, 1e6)
    assert one is not None and one.sampled == 1600
    assert one.training == pytest.approx(3 * one.sampling)  # all weights are trained: 6 N against 2 N
    half = estimate_step(model, config(tmp_path), LENGTHS, 2e6)
    assert half is not None and half.training == pytest.approx(one.training / 2)
    twice = estimate_step(model, config(tmp_path, num_iterations=2), LENGTHS, 1e6)
    assert twice is not None and twice.sampling == pytest.approx(one.sampling / 2)


def test_numbers_are_computed_as_training_computes_them(tmp_path: Path) -> None:
    assert compute_dtype(tiny_llama(), config(tmp_path)) is torch.float32
    assert compute_dtype(tiny_llama(), config(tmp_path, bf16=True)) is torch.bfloat16
    full, half = sizes(tmp_path)["KV cache"], sizes(tmp_path, bf16=True)["KV cache"]
    assert full is not None and half is not None and full == 2 * half
