"""One forward and backward over the same rows: packed with shared prompts, and padded, on one model in one process.

    python -m benchmarks.training MODEL_FOLDER JOB_JSON

This needs no other library: the padded side is what a plain trainer does, with logits of every position.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from envgrad.attention import use_envgrad_attention
from envgrad.logprobs import install_policy_forward, policy_logprobs
from envgrad.packing import pack
from envgrad.types import TrainingSample

from .floor import RowSize, training_flops
from .machine import busy_share, load_average, matmul_rate
from .models import load, shape_of

SIBLINGS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Rows to train on: groups of 8, with answers of half the length to the whole of it."""

    prompt: int
    answer: int
    groups: int
    pairs: int
    threads: int


def samples_of(job: Job, vocabulary: int) -> list[TrainingSample]:
    """Random rows."""
    generator = torch.Generator().manual_seed(0)

    def draw(size: int) -> list[int]:
        return torch.randint(0, vocabulary, (size,), generator=generator).tolist()

    found = []
    for group in range(job.groups):
        head = draw(job.prompt)
        for sibling in range(SIBLINGS):
            size = job.answer // 2 + (job.answer // 2) * (sibling + 1) // SIBLINGS
            length, zeros, ones = job.prompt + size, (0,) * job.prompt, (1,) * size
            found.append(
                TrainingSample(
                    token_ids=(*head, *draw(size)), mask=(*zeros, *ones), logprobs=(0.0,) * length,
                    versions=(0,) * length, advantages=(*(0.0 for _ in zeros), *(1.0 for _ in ones)),
                    prompt_length=job.prompt, group=str(group),
                )
            )  # fmt: skip
    return found


def train_packed(model: PreTrainedModel, samples: list[TrainingSample]) -> None:
    for packed in pack(samples, [1.0] * len(samples), max_tokens=16384).micro_batches:
        policy_logprobs(model, packed, entropy="none").logprobs.sum().backward()
    model.zero_grad()


def train_padded(model: PreTrainedModel, samples: list[TrainingSample]) -> None:
    longest = max(len(sample.token_ids) for sample in samples)
    for start in range(0, len(samples), SIBLINGS):
        rows = samples[start : start + SIBLINGS]
        ids = torch.tensor([[*row.token_ids, *([0] * (longest - len(row.token_ids)))] for row in rows])
        mask = torch.tensor([[*row.mask, *([0] * (longest - len(row.mask)))] for row in rows], dtype=torch.bool)
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[:, :-1].float()
        logprobs = torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None])[..., 0]
        logprobs[mask[:, 1:]].sum().backward()
    model.zero_grad()


def seconds_of(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main(folder: str, text: str) -> None:
    job = Job(**json.loads(text))
    torch.set_num_threads(job.threads)
    ours, plain = load(Path(folder))[0], load(Path(folder))[0]
    use_envgrad_attention(ours)
    install_policy_forward(ours)
    samples = samples_of(job, ours.config.vocab_size)
    train_packed(ours.train(), samples)
    train_padded(plain.train(), samples)
    seconds: dict[str, list[float]] = {"packed": [], "padded": []}
    loads = []
    for _ in range(job.pairs):
        loads.append((load_average(), busy_share()))
        seconds["packed"].append(seconds_of(lambda: train_packed(ours, samples)))
        seconds["padded"].append(seconds_of(lambda: train_padded(plain, samples)))
    rows = [
        RowSize(group=int(one.group), prompt=one.prompt_length, sampled=len(one.token_ids) - one.prompt_length, given=0)
        for one in samples
    ]
    floor = training_flops(shape_of(ours), rows) / matmul_rate()
    print(json.dumps({"job": asdict(job), "seconds": seconds, "floor": floor, "loads": loads}))


if __name__ == "__main__":
    main(*sys.argv[1:3])
