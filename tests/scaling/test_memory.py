from __future__ import annotations

import pytest

from envgrad.errors import ConfigurationError
from envgrad.scaling.hardware import accelerator
from envgrad.scaling.memory import USABLE, sampler_memory, trainer_memory
from envgrad.scaling.shapes import SHAPES
from envgrad.scaling.workload import Draw, Workload

LOAD = Workload(groups=64, siblings=8, turns=Draw(mean=4), prompt_tokens=600, turn_tokens=Draw(mean=100))
H100 = accelerator("h100")


def test_sixteen_bytes_a_parameter_are_shared_out() -> None:
    shape = SHAPES["8B"]
    for devices in (1, 8, 64):
        found = trainer_memory(shape, LOAD, H100, devices, microbatch=4096)
        assert found.weights + found.gradients + found.optimizer == pytest.approx(16 * shape.parameters / devices)
    assert trainer_memory(shape, LOAD, H100, 1, microbatch=4096).gathered == 0
    assert found.gathered == pytest.approx(2 * 2 * shape.body / shape.layers)


def test_activations_grow_with_the_micro_batch_and_checkpointing_keeps_few() -> None:
    small, large = (trainer_memory(SHAPES["8B"], LOAD, H100, 8, microbatch=size) for size in (1000, 4000))
    assert large.activations == pytest.approx(4 * small.activations)
    assert large.activations_checkpointed < 0.1 * large.activations
    assert large.total(checkpointing=True) < large.total(checkpointing=False)


def test_a_micro_batch_is_not_longer_than_what_there_is() -> None:
    few = Workload(groups=1, siblings=2, turns=Draw(mean=1), prompt_tokens=50, turn_tokens=Draw(mean=50))
    assert trainer_memory(SHAPES["8B"], few, H100, 2, microbatch=8192).microbatch == 100


def test_a_replica_has_as_many_devices_as_it_needs() -> None:
    assert sampler_memory(SHAPES["8B"], LOAD, H100, 8).devices == 1
    large = sampler_memory(SHAPES["70B"], LOAD, H100, 8)
    assert large.devices == 4  # on two, 141 GB of weights leave room for few rows
    assert large.weights == pytest.approx(2 * SHAPES["70B"].parameters / 4)
    row = SHAPES["70B"].kv_bytes(2) * LOAD.row_tokens / 4
    assert large.max_rows == int((USABLE * 80e9 - large.weights) / row)
    assert large.kv_wanted == pytest.approx(row * 512 / 2)


def test_too_few_devices() -> None:
    with pytest.raises(ConfigurationError, match="cannot sample from 70B"):
        sampler_memory(SHAPES["70B"], LOAD, H100, 1)
