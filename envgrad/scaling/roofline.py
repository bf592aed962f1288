"""Costs of a model on machines that were not measured: data sheets, shares that are assumed to be reached, and bytes.

Every figure made here is labelled as estimated; ``measured`` replaces those that somebody has measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from envgrad.errors import ConfigurationError
from envgrad.scaling.costs import LOG_BYTES_PER_TOKEN, Costs, LoopCosts, SamplerCosts, StorageCosts, TrainerCosts
from envgrad.scaling.hardware import Accelerator, Reached
from envgrad.scaling.memory import USABLE, SamplerMemory, TrainerMemory, sampler_memory, trainer_memory
from envgrad.scaling.shapes import ModelShape
from envgrad.scaling.workload import Workload
from envgrad.training.flops import Work

LOOP = LoopCosts(turn=0.0003, episode=0.0002)
"""of the thread that plays episodes, on one core of an AMD EPYC: fitted on measured runs (benchmarks/scaling.py)"""
LOG_RATE = 9.3e6
"""bytes a second that the log's thread writes, on the same machine, while nothing else keeps it busy"""
_OPTIMIZER_BYTES = 28
"""that an AdamW step reads and writes for each parameter in float32"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """Devices, and how they are split.

    Raises:
        ConfigurationError: nothing left to train or to sample on.
    """

    gpu: Accelerator
    gpus: int
    trainers: int
    """devices that train; the others sample. All do both in turn where ``shared``"""
    reached: Reached
    microbatch: int = 8192
    """tokens of one forward on each device that trains"""
    checkpointing: bool | None = None
    """activation checkpointing; None: where memory needs it"""
    checkpoint_every: int = 100
    checkpoint_blocks: bool = True
    log_episodes: bool = True

    def __post_init__(self) -> None:
        if self.gpus < 1 or not 1 <= self.trainers <= self.gpus:
            raise ConfigurationError(f"{self.trainers} of {self.gpus} devices that train: give 1 to {self.gpus}")
        if self.trainers == self.gpus and self.gpus > 1:
            raise ConfigurationError(
                f"--trainer-gpus {self.trainers} leaves none of {self.gpus} to sample: samplers are servers with "
                "devices of their own"
            )

    @property
    def shared(self) -> bool:
        """One device trains and samples in turn."""
        return self.gpus == 1

    @property
    def samplers(self) -> int:
        return self.gpus if self.shared else self.gpus - self.trainers


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """Memory of both kinds of devices, and the costs that follow."""

    trainer: TrainerMemory
    sampler: SamplerMemory
    checkpointing: bool
    costs: Costs


def size_up(shape: ModelShape, load: Workload, machines: Machines) -> Sized:
    """Memory and estimated costs of ``shape`` on ``machines``.

    Raises:
        ConfigurationError: it does not fit.
    """
    gpu = machines.gpu
    trainer = trainer_memory(shape, load, gpu, machines.trainers, microbatch=machines.microbatch)
    needs = trainer.total(checkpointing=False) > USABLE * gpu.memory
    checkpointing = needs if machines.checkpointing is None else machines.checkpointing
    wanted = trainer.total(checkpointing=checkpointing)
    if wanted > USABLE * gpu.memory:
        how = "" if checkpointing else ", without activation checkpointing"
        raise ConfigurationError(
            f"training {shape.name} on {machines.trainers} x {gpu.name}{how} needs {wanted / 1e9:,.0f} GB on each, of "
            f"{USABLE * gpu.memory / 1e9:,.0f} that can be used: give more --gpus and --trainer-gpus, or fewer "
            "--microbatch-tokens"
        )
    held = wanted if load.asynchronous else trainer.held  # activations are gone while a round is played
    sampler = sampler_memory(shape, load, gpu, machines.samplers, trainer=held if machines.shared else None)
    costs = Costs(
        sampler=_sampler_costs(shape, machines, sampler),
        trainer=_trainer_costs(shape, load, machines, checkpointing),
        loop=LOOP,
        storage=_storage_costs(shape, machines),
        replicas=max(1, machines.samplers // sampler.devices),
        local=machines.shared,
        sampler_beside=2.0 if machines.shared else 1.0,
        trainer_beside=2.0 if machines.shared else 1.0,
        sources=_sources(machines),
    )
    return Sized(trainer=trainer, sampler=sampler, checkpointing=checkpointing, costs=costs)


def _sampler_costs(shape: ModelShape, machines: Machines, memory: SamplerMemory) -> SamplerCosts:
    """A step reads all weights and all keys and values, and multiplies for each row."""
    gpu, reached, devices = machines.gpu, machines.reached, memory.devices
    reads = devices * gpu.reads * reached.reading
    rate = devices * gpu.rate * reached.prefill
    one = shape.cost.forward(Work(tokens=1, predictions=1))
    return SamplerCosts(
        step=reached.sampler_step + (shape.body + shape.head_weights) * gpu.number_bytes / reads,
        row=one / rate,
        context=shape.kv_bytes(gpu.number_bytes) / reads,
        prefill=shape.cost.forward(Work(tokens=1)) / rate,
        max_rows=memory.max_rows,
    )


def _trainer_costs(shape: ModelShape, load: Workload, machines: Machines, checkpointing: bool) -> TrainerCosts:
    rate = machines.trainers * machines.gpu.rate * machines.reached.training
    cost = shape.cost
    unique = load.groups * load.prompt_tokens + load.episodes * (load.row_tokens - load.prompt_tokens)
    predicted = load.sampled_tokens / unique
    token, prediction = Work(tokens=1), Work(predictions=1)
    again = cost.forward(token) if checkpointing else 0
    again_pair = cost.attention if checkpointing else 0
    reads = machines.trainers * machines.gpu.reads * machines.reached.reading
    return TrainerCosts(
        step=shape.parameters * _OPTIMIZER_BYTES / reads,
        token=(cost.training(token) + again + predicted * cost.training(prediction)) / rate,
        pair=(3 * cost.attention + again_pair) / rate,
    )


def _storage_costs(shape: ModelShape, machines: Machines) -> StorageCosts:
    reached = machines.reached
    served = shape.parameters * machines.gpu.number_bytes
    # Gathered from the shards, then sent to all replicas at once; within one device nothing moves.
    publish = 0.0 if machines.shared else 2 * served / reached.network
    return StorageCosts(
        publish=publish,
        checkpoint=12 * shape.parameters / reached.disk,
        checkpoint_every=machines.checkpoint_every,
        checkpoint_blocks=machines.checkpoint_blocks,
        log_bytes_per_token=LOG_BYTES_PER_TOKEN if machines.log_episodes else 0.0,
        log_rate=LOG_RATE,
    )


def _sources(machines: Machines) -> dict[str, str]:
    gpu, reached = machines.gpu, machines.reached
    sheet = f"not measured: {gpu.name}'s data sheet"
    return {
        "sampler": f"{sheet}, {reached.reading:.0%} of its reads, {reached.prefill:.0%} of its rate and "
        f"{reached.sampler_step * 1e3:g} ms a step assumed",
        "trainer": f"{sheet}, {reached.training:.0%} of its rate assumed",
        "publish": f"not measured: {reached.network / 1e9:g} GB/s assumed",
        "checkpoint": f"not measured: {reached.disk / 1e9:g} GB/s assumed",
        "loop": "measured on one core of an AMD EPYC, with an environment that does nothing",
        "log": "measured on one core of an AMD EPYC that did nothing else",
    }
