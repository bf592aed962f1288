"""Decoding alone: the same prompts and lengths through each engine, in turn, in one process.

    python -m benchmarks.decoding MODEL_FOLDER JOB_JSON

Every engine samples the same number of tokens for each prompt, at temperature 1 and without a stop token. Where lengths
vary there are twice as many prompts as the batch has rows: an engine that refills its rows does so, the others take one
batch after the other, each to its longest row (``generate``) or losing rows as they end (the bare loop).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from envgrad.sampling.local import LocalSampler
from envgrad.sampling.sampler import SamplingParams, Session

from .bare import decode_bare
from .machine import busy_share, load_average
from .models import load

PROMPT = 50
"""tokens of each prompt"""

Engine = Callable[[PreTrainedModel, list[list[int]], list[int], int], int]
"""(model, prompts, lengths, batch) -> sampled tokens"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One comparison of engines."""

    batch: int
    varied: bool
    pairs: int
    threads: tuple[int, ...]
    continuous_batching: bool = False
    longest: int = 64
    """tokens of each answer; where they vary, twice that at most"""

    @property
    def lengths(self) -> list[int]:
        """In the order in which prompts come; varied ones are spread evenly, and shuffled.

        Example:
            >>> Job(batch=2, varied=False, pairs=1, threads=(1,)).lengths
            [64, 64]
            >>> sorted(Job(batch=2, varied=True, pairs=1, threads=(1,)).lengths)
            [8, 48, 88, 128]
        """
        if not self.varied:
            return [self.longest] * self.batch
        rows, shortest, most = 2 * self.batch, 8, 2 * self.longest
        spread = [shortest + (most - shortest) * row // (rows - 1) for row in range(rows)]
        random.Random(0).shuffle(spread)
        return spread


def prompts_of(model: PreTrainedModel, count: int) -> list[list[int]]:
    """Random prompts, all different."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, model.config.vocab_size, (count, PROMPT), generator=generator).tolist()


def decode_locally(model: PreTrainedModel, prompts: list[list[int]], lengths: list[int], batch: int) -> int:
    """envgrad's sampler, which also returns log-probs and samples each row from a seed of its own."""
    sampler = LocalSampler(model, max_sessions=batch, max_context=PROMPT + max(lengths) + 1)

    async def one(row: int) -> int:
        session = Session(key=str(row), group=str(row), order=(row, 0, 0))
        sampler.begin(session)
        answer = await sampler.sample(prompts[row], SamplingParams(max_tokens=lengths[row], seed=row), session)
        sampler.end(session)
        return len(answer.token_ids)

    async def every() -> int:
        return sum(await asyncio.gather(*(one(row) for row in range(len(prompts)))))

    try:
        return asyncio.run(every())
    finally:
        sampler.close()


def decode_with_generate(model: PreTrainedModel, prompts: list[list[int]], lengths: list[int], batch: int) -> int:
    """``transformers.generate``: every batch runs to its longest row; tokens past a row's length are not counted."""
    for first in range(0, len(prompts), batch):
        ids, wanted = torch.tensor(prompts[first : first + batch]), max(lengths[first : first + batch])
        config = GenerationConfig(
            do_sample=True, top_k=0, max_new_tokens=wanted, min_new_tokens=None, eos_token_id=None, pad_token_id=0
        )
        own, model.generation_config = model.generation_config, GenerationConfig()
        try:
            with torch.no_grad():
                found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        finally:
            model.generation_config = own
        if found.shape[1] != PROMPT + wanted:
            raise AssertionError(f"generate gave {found.shape[1] - PROMPT} tokens, not {wanted}")
    return sum(lengths)


def decode_in_a_bare_loop(model: PreTrainedModel, prompts: list[list[int]], lengths: list[int], batch: int) -> int:
    slices = [slice(first, first + batch) for first in range(0, len(prompts), batch)]
    return sum(decode_bare(model, prompts[one], lengths[one]) for one in slices)


def decode_continuously(model: PreTrainedModel, prompts: list[list[int]], lengths: list[int], batch: int) -> int:
    """transformers' continuous batching."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=max(lengths), eos_token_id=-1, pad_token_id=0)
    manager = model.init_continuous_batching(
        generation_config=config,
        continuous_batching_config=ContinuousBatchingConfig(max_requests_per_batch=batch, num_blocks=4 * batch),
    )
    manager.start()
    try:
        for prompt, length in zip(prompts, lengths, strict=True):
            manager.add_request(prompt, max_new_tokens=length)
        found = 0
        for _ in prompts:
            while (result := manager.get_result(timeout=60)) is None:
                if not manager.is_running():
                    raise AssertionError("continuous batching stopped before it had answered")
            found += len(result.generated_tokens)
        return found
    finally:
        manager.stop(block=True)


def engines_of(job: Job, folder: Path) -> dict[str, tuple[PreTrainedModel, Engine]]:
    """Engines by name, each with a model that carries its own kind of attention."""
    plain, ours = load(folder)[0].eval(), load(folder)[0].eval()
    found: dict[str, tuple[PreTrainedModel, Engine]] = {
        "envgrad": (ours, decode_locally),
        "generate": (plain, decode_with_generate),
        "bare loop": (plain, decode_in_a_bare_loop),
    }
    if job.continuous_batching:
        found["continuous batching"] = (load(folder)[0].eval(), decode_continuously)
    return found


def timed(engine: Engine, model: PreTrainedModel, job: Job, threads: int) -> float:
    """Seconds of one run; checks that it sampled what it should."""
    torch.set_num_threads(threads)
    lengths = job.lengths
    prompts = prompts_of(model, len(lengths))
    began = time.perf_counter()
    sampled = engine(model, prompts, lengths, job.batch)
    seconds = time.perf_counter() - began
    if sampled != sum(lengths):
        raise AssertionError(f"sampled {sampled} tokens, not {sum(lengths)}")
    return seconds


def run(folder: Path, job: Job, tell: Callable[[dict[str, Any]], None]) -> None:
    """Warm each engine up on short answers, keep the thread count that was best there, then alternate."""
    engines = engines_of(job, folder)
    threads: dict[str, int] = {}
    for name, (model, engine) in engines.items():
        short = replace(job, varied=False, longest=min(job.longest, 16))
        timed(engine, model, short, job.threads[0])
        tried = {count: timed(engine, model, short, count) for count in job.threads}
        threads[name] = min(tried, key=tried.__getitem__)
    order: Sequence[str] = list(engines)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    loads = []
    for index in range(job.pairs):
        loads.append((load_average(), busy_share()))
        for name in itertools.chain(order[index % len(order) :], order[: index % len(order)]):
            model, engine = engines[name]
            seconds[name].append(timed(engine, model, job, threads[name]))
    tell({"job": asdict(job), "tokens": sum(job.lengths), "threads": threads, "seconds": seconds, "loads": loads})


def main(folder: str, job: str) -> None:
    values = json.loads(job)
    run(Path(folder), Job(**(values | {"threads": tuple(values["threads"])})), lambda answer: print(json.dumps(answer)))


if __name__ == "__main__":
    main(*sys.argv[1:3])
