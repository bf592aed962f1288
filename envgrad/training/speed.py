"""How quick this machine is, and how quick a model is on it: decoding and training, beside their floors.

A floor is the time that the operations alone take (``flops``) at the rate of a large matrix product, measured here.
Where the weights are too large for a cache, each decoding step also has to read them: the larger of both counts.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel

from envgrad.errors import ConfigurationError
from envgrad.logprobs import install_policy_forward, policy_logprobs
from envgrad.losses import LossOutputs
from envgrad.packing import TOKENS_ON_CPU, MicroBatch, pack
from envgrad.sampling.generate import GenerateSampler
from envgrad.sampling.limits import context_of, vocabulary_of
from envgrad.sampling.local import LocalSampler, make_local_sampler
from envgrad.sampling.sampler import SamplingParams, Session
from envgrad.training.flops import ModelCost, RowWork, Work, matmul_rate, wait_for
from envgrad.training.passes import TrainingThreads, passes_side_by_side, side_by_side_fits
from envgrad.training.setup import pack_mode_of
from envgrad.types import TrainingSample

SIBLINGS = 8
CACHE_BYTES = 64 << 20
"""weights up to this may lie in a cache, where reading them costs less than memory says"""
_LARGEST_MATRIX = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is decoded and trained: ``rows`` different prompts are answered; groups of 8 siblings are trained."""

    rows: int = 32
    prompt: int = 64
    """tokens of a prompt"""
    answer: int = 64
    """tokens of each answer"""
    repeats: int = 3
    """the quickest counts"""

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("prompt", 2), ("answer", 2), ("repeats", 1)):
            value = int(getattr(self, name))
            if value < least:
                raise ConfigurationError(f"{name}={value} must be at least {least}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Tokens in seconds, and the least that they could take.

    Example:
        >>> speed = Speed(tokens=100, seconds=2.0, floor=0.5)
        >>> speed.rate, speed.share
        (50.0, 0.25)
    """

    tokens: int
    seconds: float
    floor: float | None
    """seconds; None where the model's operations are not known"""

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def share(self) -> float | None:
        """The floor's share of the time; 1 is as quick as can be."""
        return None if self.floor is None else self.floor / self.seconds

    def as_dict(self) -> dict[str, float | int | None]:
        """For JSON."""
        return {
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.rate,
            "floor_seconds": self.floor,
            "floor_share": self.share,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the device does in a second."""

    device: str
    threads: int
    dtype: str
    matmul: float
    """operations of a large matrix product"""
    reads: float
    """bytes of a matrix that is read once for each vector"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpeed:
    """One model on this machine."""

    machine: Machine
    parameters: int
    decoding: Speed
    training: Speed


def measure(model: PreTrainedModel, load: Load, *, autocast: torch.dtype | None = None) -> ModelSpeed:
    """Measure the machine, and ``model``'s decoding and training, by the code that trainers use.

    Args:
        model: On its device. It gets envgrad's attention and forward, and keeps them; weights stay as they are.
        load: What is decoded and trained.
        autocast: As in training; None: as the weights are.

    Raises:
        ConfigurationError: rows longer than the model's context.
    """
    length = load.prompt + load.answer + 1
    if length > (context := context_of(model, None)):
        raise ConfigurationError(
            f"prompt={load.prompt} and answer={load.answer} need {length} tokens, and the model's context has "
            f"{context}: shorten one"
        )
    dtype = autocast or next(model.parameters()).dtype
    machine = measure_machine(model.device, dtype)
    return ModelSpeed(
        machine=machine,
        parameters=model.num_parameters(),
        decoding=_decoding(model, load, machine, autocast),
        training=_training(model, load, machine, autocast),
    )


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """The device alone, in under a second."""
    return Machine(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        threads=torch.get_num_threads(),
        dtype=str(dtype).removeprefix("torch."),
        matmul=matmul_rate(device, dtype),
        reads=_read_rate(device, dtype),
    )


def _read_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Bytes per second of a matrix-vector product that no cache holds."""
    side = math.isqrt(_LARGEST_MATRIX // dtype.itemsize)
    matrix = torch.zeros(side, side, device=device, dtype=dtype)
    vector = torch.zeros(side, device=device, dtype=dtype)
    return matrix.nbytes / _best(lambda: matrix @ vector, 4, device)


def _best(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Seconds of the quickest of several, after one that is not counted."""
    best = math.inf
    for number in range(repeats + 1):
        wait_for(device)
        began = time.perf_counter()
        work()
        wait_for(device)
        best = min(best, time.perf_counter() - began) if number else best
    return best


def _random_ids(count: int, length: int, vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    found: list[list[int]] = torch.randint(0, vocabulary, (count, length), generator=generator).tolist()
    return found


def _decoding(model: PreTrainedModel, load: Load, machine: Machine, autocast: torch.dtype | None) -> Speed:
    """All rows at once, each from a prompt of its own, without a stop token."""
    prompts = _random_ids(load.rows, load.prompt, vocabulary_of(model))
    sampler = make_local_sampler(
        model, max_sessions=load.rows, max_context=load.prompt + load.answer + 1, autocast=autocast
    )
    try:
        seconds = _best(lambda: asyncio.run(_sample_all(sampler, prompts, load.answer)), load.repeats, model.device)
    finally:
        sampler.close()
    needed, cost = load.prompt + load.answer - 1, ModelCost.of(model)
    work = Work.of_rows(RowWork(row, load.prompt, needed, load.answer) for row in range(load.rows))
    floor = None
    if cost is not None:
        weights = sum(one.nbytes for one in model.parameters())
        reading = load.answer * weights / machine.reads if weights > CACHE_BYTES else 0.0
        floor = max(cost.forward(work) / machine.matmul, reading)
    return Speed(tokens=load.rows * load.answer, seconds=seconds, floor=floor)


async def _sample_all(sampler: LocalSampler | GenerateSampler, prompts: list[list[int]], answer: int) -> None:
    async def one(row: int, prompt: list[int]) -> None:
        session = Session(key=str(row), group=str(row), order=(row, 0, 0))
        sampler.begin(session)
        await sampler.sample(prompt, SamplingParams(max_tokens=answer, seed=row), session)
        sampler.end(session)

    await asyncio.gather(*(one(row, prompt) for row, prompt in enumerate(prompts)))


def _samples(load: Load, vocabulary: int) -> list[TrainingSample]:
    groups = max(1, load.rows // SIBLINGS)
    prompts = _random_ids(groups, load.prompt, vocabulary)
    answers = _random_ids(groups * SIBLINGS, load.answer, vocabulary)
    length, zeros, ones = load.prompt + load.answer, (0,) * load.prompt, (1,) * load.answer
    return [
        TrainingSample(
            token_ids=(*prompts[row // SIBLINGS], *answer),
            mask=(*zeros, *ones),
            logprobs=(0.0,) * length,
            versions=(0,) * length,
            advantages=(*(0.0 for _ in zeros), *(1.0 for _ in ones)),
            prompt_length=load.prompt,
            group=str(row // SIBLINGS),
        )
        for row, answer in enumerate(answers)
    ]


@dataclass(slots=True)
class _Training:
    """Forward and backward over the same samples, again and again."""

    model: PreTrainedModel
    micro_batches: tuple[MicroBatch, ...]
    autocast: torch.dtype | None
    trained: list[nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        self.trained = [one for one in self.model.parameters() if one.requires_grad]

    def once(self) -> None:
        if len(self.micro_batches) > 1 and torch.get_num_threads() > 1 and side_by_side_fits(self.model, self.model):
            cores = torch.get_num_threads()
            with TrainingThreads() as threads:
                for _ in passes_side_by_side(self.micro_batches, self._loss, self.trained, threads, cores):
                    pass
        else:
            for micro_batch in self.micro_batches:
                torch.autograd.backward(self._loss(micro_batch).loss)
        self.model.zero_grad()

    def _loss(self, micro_batch: MicroBatch) -> LossOutputs:
        with torch.autocast(self.model.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            outputs = policy_logprobs(self.model, micro_batch)
        return LossOutputs(loss=-outputs.logprobs.mean(), metrics={})


def _training(model: PreTrainedModel, load: Load, machine: Machine, autocast: torch.dtype | None) -> Speed:
    """Forward and backward; without the optimizer."""
    install_policy_forward(model)
    samples = _samples(load, vocabulary_of(model))
    on_cpu = model.device.type == "cpu"
    batch = pack(
        samples, [1.0] * len(samples), max_tokens=16384, preferred_tokens=TOKENS_ON_CPU if on_cpu else None,
        mode=pack_mode_of(model),
    )  # fmt: skip
    micro_batches = tuple(one.to(model.device) for one in batch.micro_batches)
    with _train_mode(model):
        seconds = _best(_Training(model, micro_batches, autocast).once, load.repeats, model.device)
    cost = ModelCost.of(model)
    floor = None if cost is None else cost.training(Work.of_batch(batch)) / machine.matmul
    return Speed(tokens=sum(sample.num_trained_tokens for sample in samples), seconds=seconds, floor=floor)


@contextmanager
def _train_mode(model: PreTrainedModel) -> Iterator[None]:
    was = model.training
    model.train()
    try:
        yield
    finally:
        model.train(was)
