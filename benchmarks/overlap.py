"""How much of the ideal overlap asynchronous training gets, measured in one process.

python -m benchmarks.overlap            # a table; about a minute and a half on two idle cores
python -m benchmarks.overlap --json out.json --samplers scripted

Sampling S, environment latency L and training T are seconds a step of the synchronous run, which takes about S + L + T.
Beside its rollouts a step takes at best max(S + T, L) where sampling and training share the processor, and T where
sampling costs the trainer none: there a scripted sampler waits for S seconds an answer, as one waits for a server, and
enough rounds are in flight to hide S + L. L is a multiple of T.

A step is the mean over all steps behind the first few and before the last ones, which have no rollouts beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import torch
from transformers import PrinterCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar

from envgrad import GRPOConfig, GRPOTrainer
from envgrad.sampling.scripted import ScriptedSampler
from envgrad.training import rollouts

from .models import build_model

EPISODES, GROUP, TURN = 16, 4, 96
"""episodes a step, siblings, and the most tokens of an answer"""
RATIOS = (0.5, 1.0, 2.0)
FIRST = 4
"""steps that are not counted: the first rounds fill the buffer"""
TRAINING = ("packing", "logprobs", "forward_backward", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """One pair of runs, seconds a step."""

    sampler: str
    ratio: float
    """L / T, as it was asked for"""
    sampling: float
    latency: float
    training: float
    max_staleness: int
    synchronous: float
    asynchronous: float
    busy: float
    """share of the asynchronous step in which the trainer did not wait for a round"""
    dropped: float
    """share of groups that were too old"""

    @property
    def ideal(self) -> float:
        """The ideal speed-up."""
        together = self.sampling + self.latency + self.training
        shared = self.sampling if self.sampler == "local" else 0.0
        longest = self.latency if self.sampler == "local" else (self.sampling + self.latency) / self.max_staleness
        return together / max(shared + self.training, longest)

    @property
    def speedup(self) -> float:
        return self.synchronous / self.asynchronous

    @property
    def of_ideal(self) -> float:
        return self.speedup / self.ideal


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """One run: seconds a step, and what was logged of the counted steps."""

    step: float
    logs: Sequence[dict[str, float]]

    def mean(self, *names: str) -> float:
        return fmean(sum(entry[name] for name in names) for entry in self.logs)

    @property
    def training(self) -> float:
        return self.mean(*(f"time/{phase}" for phase in TRAINING))

    @property
    def sampling(self) -> float:
        return self.mean("time/prefill", "time/decode")


def environment(latency: float) -> type:
    """Reads one answer, and takes ``latency`` seconds for it."""

    class Slow:
        def reset(self, seed: int) -> str:
            return "Say something, and take your time. " * 4

        async def step(self, message: str) -> tuple[str, bool]:
            await asyncio.sleep(latency)
            return "heard", True

        def get_reward(self) -> float:
            return random.random()  # whatever was said, so that every group has something to train

    return Slow


class _Steps(TrainerCallback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.times.append(time.perf_counter())


def run(model: Path, latency: float, counted: int, max_staleness: int = 0) -> Times:
    """Train ``counted`` steps and those around them; ``max_staleness``: asynchronously, if it is not 0."""
    last = max_staleness + 1
    beside: dict[str, Any] = {"asynchronous": True, "max_staleness": max_staleness} if max_staleness else {}
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder, max_steps=FIRST + counted + last, per_device_train_batch_size=EPISODES,
            num_generations=GROUP, max_completion_length=TURN, logging_steps=1, report_to="none", save_strategy="no",
            disable_tqdm=True, use_cpu=True, bf16=False, log_episodes=False, **beside,
        )  # fmt: skip
        watch = _Steps()
        trainer = GRPOTrainer(str(model), args=args, environment_factory=environment(latency), callbacks=[watch])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "time/step" in entry][FIRST : FIRST + counted]
    if fmean(entry["frac_reward_zero_std"] for entry in logs) > 0.1:
        raise SystemExit("groups taught nothing, so that little was trained: there is no T to measure")
    return Times(step=(watch.times[FIRST + counted - 1] - watch.times[FIRST - 1]) / counted, logs=logs)


def scripted(seconds: float) -> Callable[..., ScriptedSampler]:
    """Makes samplers that answer at the usual length after ``seconds``, and cost this process nothing."""

    def answer(prompt: Any, params: Any, session: Any) -> list[int]:
        places = range(session.order[0] + session.order[1], 1000)
        ids = [100 + place % 97 for place in places[:TURN]]
        return [token for token in ids if token not in params.stop_token_ids] or ids[:1]

    return lambda *args, **kwargs: ScriptedSampler(answer, max_context=4096, latency=seconds)


def measure(model: Path, sampler: str, ratio: float, plain: Times, counted: int) -> Overlap:
    """``plain``: a run without latency and with the local sampler."""
    latency = ratio * plain.training
    make = scripted(plain.sampling) if sampler == "scripted" else rollouts.make_local_sampler
    with mock.patch.object(rollouts, "make_local_sampler", make):
        together = run(model, latency, counted)
        sampling = plain.sampling if sampler == "scripted" else together.sampling
        # Enough rounds in flight to hide what is waited for; more would only make samples older.
        staleness = math.ceil((sampling + latency) / together.training)
        beside = run(model, latency, counted, staleness)
    return Overlap(
        sampler=sampler, ratio=ratio, sampling=sampling, latency=latency, training=together.training,
        max_staleness=staleness, synchronous=together.step, asynchronous=beside.step,
        busy=1 - beside.mean("async/wait_seconds") / beside.step, dropped=beside.mean("async/dropped_share"),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=8, help="steps that are counted in each run")
    parser.add_argument("--ratios", type=float, nargs="*", default=RATIOS)
    parser.add_argument("--samplers", nargs="*", default=("local", "scripted"), choices=("local", "scripted"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    found = []
    print("sampler   L/T  S      L      T      staleness  sync   async  speedup  ideal  of ideal  busy  dropped")
    with tempfile.TemporaryDirectory() as folder:
        model = build_model("small", Path(folder))
        plain = run(model, 0.0, given.steps)
        for sampler in given.samplers:
            for ratio in given.ratios if sampler == "local" else (1.0,):
                one = measure(model, sampler, ratio, plain, given.steps)
                found.append(asdict(one) | {"speedup": one.speedup, "ideal": one.ideal, "of_ideal": one.of_ideal})
                print(
                    f"{one.sampler:9} {one.ratio:3.1f}  {one.sampling:.3f}  {one.latency:.3f}  {one.training:.3f}  "
                    f"{one.max_staleness:9}  {one.synchronous:.3f}  {one.asynchronous:.3f}  {one.speedup:7.2f}  "
                    f"{one.ideal:5.2f}  {one.of_ideal:8.2f}  {one.busy:4.2f}  {one.dropped:7.3f}", flush=True,
                )  # fmt: skip
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
