"""Memory of each device that trains and of each that samples, by its uses.

Training shards weights, gradients and optimizer states over its devices (FSDP, ZeRO-3): 4 + 4 + 8 bytes a parameter in
float32, or 16 divided by their number. Beside them lie the weights of two layers as they are computed, gathered, and
the activations of one micro-batch (``training.estimates`` has their formula). Sampling holds the weights as they are
computed, cut over the devices of a replica; what is left of nine tenths of the memory are keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass

from envgrad.errors import ConfigurationError
from envgrad.scaling.hardware import Accelerator
from envgrad.scaling.shapes import ModelShape
from envgrad.scaling.workload import Workload

USABLE = 0.9
"""of a device's memory"""
_STATE_BYTES = 16
"""weights, gradients and AdamW's two averages of one parameter, in float32"""
_LEAST_ROWS = 16
"""that a replica should be able to decode at once"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMemory:
    """Bytes on each device that trains."""

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    """two layers as they are computed; none where nothing is sharded"""
    activations: float
    activations_checkpointed: float
    microbatch: int
    """tokens of one forward on each device"""

    @property
    def held(self) -> float:
        """Between two steps too."""
        return self.weights + self.gradients + self.optimizer

    def total(self, *, checkpointing: bool) -> float:
        """Of all uses."""
        kept = self.activations_checkpointed if checkpointing else self.activations
        return self.held + self.gathered + kept


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerMemory:
    """Bytes on each device that samples."""

    devices: int
    """of one replica"""
    weights: float
    kv_room: float
    kv_wanted: float
    """if every episode in flight kept its whole row"""
    max_rows: int
    """whole rows that a replica can hold"""


def trainer_memory(
    shape: ModelShape, load: Workload, gpu: Accelerator, devices: int, *, microbatch: int
) -> TrainerMemory:
    """What one of ``devices`` that train holds.

    Example: an 8B model on 8 devices.
        >>> from envgrad.scaling.hardware import accelerator
        >>> from envgrad.scaling.shapes import SHAPES
        >>> from envgrad.scaling.workload import Draw
        >>> load = Workload(groups=8, siblings=8, turns=Draw(mean=4), prompt_tokens=500, turn_tokens=Draw(mean=200))
        >>> found = trainer_memory(SHAPES["8B"], load, accelerator("h100"), 8, microbatch=8192)
        >>> [round(one / 1e9, 1) for one in (found.weights, found.optimizer, found.activations_checkpointed)]
        [4.1, 8.2, 3.7]
    """
    each, sharded = gpu.number_bytes, shape.parameters / devices
    tokens = min(microbatch, max(1, round(load.episodes * load.row_tokens / devices)))
    layer = shape.layer_values
    return TrainerMemory(
        weights=4 * sharded,
        gradients=4 * sharded,
        optimizer=8 * sharded,
        gathered=2 * each * shape.body / shape.layers if devices > 1 else 0.0,
        activations=each * tokens * shape.layers * layer,
        activations_checkpointed=each * tokens * (shape.layers * shape.width + layer),
        microbatch=tokens,
    )


def sampler_memory(
    shape: ModelShape, load: Workload, gpu: Accelerator, samplers: int, *, trainer: float | None = None
) -> SamplerMemory:
    """What one device that samples holds, with ``samplers`` devices for all replicas together.

    A replica has as few devices, a power of two, as leave room for a few rows.

    Args:
        shape: The model.
        load: A step, whose rows are kept.
        gpu: The device.
        samplers: Devices that sample.
        trainer: Bytes that training holds on the same device; the sampler then reads the trainer's weights, or in
            asynchronous training a copy of them. None: it has the device for itself.

    Raises:
        ConfigurationError: not even all devices together have that room.
    """
    weights = gpu.number_bytes * shape.parameters
    if trainer is not None and not load.asynchronous:
        weights = 0
    devices = 1
    while True:
        room = max(0.0, USABLE * gpu.memory - (trainer or 0.0) - weights / devices)
        row = shape.kv_bytes(gpu.number_bytes) * load.row_tokens / devices
        if room >= _LEAST_ROWS * row:
            break
        devices *= 2
        if devices > samplers:
            raise ConfigurationError(
                f"{samplers} x {gpu.name} cannot sample from {shape.name}: weights and {_LEAST_ROWS} rows of "
                f"{load.row_tokens:,.0f} tokens need more memory; give more --gpus, or fewer that train"
            )
    return SamplerMemory(
        devices=devices,
        weights=weights / devices,
        kv_room=room,
        kv_wanted=row * load.in_flight / max(1, samplers // devices),
        max_rows=int(room / row),
    )
