"""How much of the ideal overlap asynchronous training gets, measured in one process.

python -m benchmarks.overlap            # a table; about a minute
python -m benchmarks.overlap --json out.json

Per step, with sampling S, environment latency L and training T: synchronous training takes about S + L + T; beside its
rollouts at best max(S + T, L) where sampling and training share the processor, and max(T, L) where sampling costs the
trainer none (a scripted sampler stands in for a server). S, L and T are those of the synchronous run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any
from unittest import mock

import torch
from transformers import TrainerCallback

from envgrad import GRPOConfig, GRPOTrainer
from envgrad.sampling.scripted import ScriptedSampler
from envgrad.training import rollouts

EPISODES, GROUP, TURN = 32, 8, 48
RATIOS = (0.5, 1.0, 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """One pair of runs, seconds a step."""

    sampler: str
    ratio: float
    """L / T"""
    sampling: float
    latency: float
    training: float
    synchronous: float
    asynchronous: float
    ideal: float
    """the ideal speed-up"""
    busy: float
    """share of the asynchronous step in which the trainer did not wait for a round"""

    @property
    def speedup(self) -> float:
        return self.synchronous / self.asynchronous

    @property
    def of_ideal(self) -> float:
        return self.speedup / self.ideal


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


def run(latency: float, steps: int, **changes: Any) -> tuple[float, list[dict[str, float]]]:
    """Median seconds between two steps, the first three left out, and what was logged."""
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=EPISODES, num_generations=GROUP,
            max_completion_length=TURN, logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True,
            use_cpu=True, bf16=False, log_episodes=False, **changes,
        )  # fmt: skip
        watch = _Steps()
        trainer = GRPOTrainer("starter", args=args, environment_factory=environment(latency), callbacks=[watch])
        trainer.train()
    pairs = list(zip(watch.times[3:-1], watch.times[4:], strict=True))
    return median(after - before for before, after in pairs), trainer.state.log_history[3:steps]


def scripted() -> Callable[..., ScriptedSampler]:
    """Answers of the usual length, at once, as a server would that costs this process nothing."""

    def answer(prompt: Any, params: Any, session: Any) -> list[int]:
        places = range(session.order[0] + session.order[1], 1000)
        ids = [100 + place % 97 for place in places[:TURN]]
        return [token for token in ids if token not in params.stop_token_ids] or ids[:1]

    return lambda *args, **kwargs: ScriptedSampler(answer, max_context=4096)


def measure(sampler: str, ratio: float, steps: int) -> Overlap:
    make = scripted() if sampler == "scripted" else rollouts.make_local_sampler
    with mock.patch.object(rollouts, "make_local_sampler", make):
        _, logs = run(0.0, steps)
        if fmean(entry["frac_reward_zero_std"] for entry in logs) > 0.5:
            raise SystemExit("most groups taught nothing, so that little was trained: there is no T to measure")
        training = fmean(
            sum(entry[f"time/{phase}"] for phase in ("packing", "logprobs", "forward_backward", "optimizer"))
            for entry in logs
        )
        sampling = fmean(entry["time/prefill"] + entry["time/decode"] for entry in logs)
        latency = ratio * training
        together, _ = run(latency, steps)
        # Enough rounds ahead to hide the latency; more would only make samples older.
        beside, logs = run(latency, steps, asynchronous=True, max_staleness=max(1, round(ratio)))
    return Overlap(
        sampler=sampler, ratio=ratio, sampling=sampling, latency=latency, training=training, synchronous=together,
        asynchronous=beside, ideal=(sampling + latency + training) / max(sampling + training, latency),
        busy=1 - fmean(entry["async/wait_seconds"] for entry in logs) / beside,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--ratios", type=float, nargs="*", default=RATIOS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    print("sampler   L/T  S      L      T      sync   async  speedup  ideal  of ideal  trainer busy")
    for sampler in ("local", "scripted"):
        for ratio in given.ratios:
            one = measure(sampler, ratio, given.steps)
            found.append(asdict(one))
            print(
                f"{one.sampler:9} {one.ratio:3.1f}  {one.sampling:.3f}  {one.latency:.3f}  {one.training:.3f}  "
                f"{one.synchronous:.3f}  {one.asynchronous:.3f}  {one.speedup:7.2f}  {one.ideal:5.2f}  "
                f"{one.of_ideal:8.2f}  {one.busy:12.2f}", flush=True,
            )  # fmt: skip
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
