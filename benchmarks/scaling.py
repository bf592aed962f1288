"""Measured steps for the simulation of ``envgrad plan``: some to fit its constants, others to check it.

python -m benchmarks.scaling --measure tests/scaling/measured.json   # about five minutes, on an idle machine
python -m benchmarks.scaling tests/scaling/measured.json             # fit, simulate, and show both beside each other

Every configuration trains the same small random model with the library's own trainer, sampler and buffer, on one thread
of torch for each of them. The lengths of answers are drawn from the table that the simulation draws from; what an
environment waits for is drawn from the same distribution. All configurations are run, then all again: a step's time is
the mean over both.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from envgrad.sampling.sampler import Completion, Sampler, SamplingParams, Session
from envgrad.scaling.analytic import estimate
from envgrad.scaling.costs import Costs
from envgrad.scaling.fit import WARM_UP, fit, read_runs, simulated_seconds
from envgrad.scaling.workload import Draw, Workload

from .ours import FILLER, FixedTurns

MARK = "!"
"""the first token of an episode's last answer, and of no other"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One measured run."""

    name: str
    use: Literal["fit", "check"]
    load: Workload
    steps: int = 8


def _load(
    groups: int, siblings: int, turns: float, tokens: float, latency: float = 0.0, *, prompt: int = 64,
    result: int = 24, spread: float = 0.0, latency_spread: float = 0.0, turns_spread: float = 0.0,
    concurrency: int | None = None, staleness: int = 0,
) -> Workload:  # fmt: skip
    return Workload(
        groups=groups, siblings=siblings, turns=Draw(mean=turns, cv=turns_spread), prompt_tokens=prompt,
        turn_tokens=Draw(mean=tokens, cv=spread), result_tokens=result,
        latency=Draw(mean=latency, cv=latency_spread), concurrency=concurrency, asynchronous=staleness > 0,
        max_staleness=max(1, staleness),
    )  # fmt: skip


CONFIGURATIONS = (
    Configuration(name="fit: base", use="fit", load=_load(4, 4, 3, 24)),
    Configuration(name="fit: one long turn", use="fit", load=_load(8, 8, 1, 48, prompt=128), steps=6),
    Configuration(name="fit: many short turns", use="fit", load=_load(2, 4, 8, 12, 0.02, result=40)),
    Configuration(name="fit: uneven", use="fit", load=_load(4, 8, 4, 32, spread=0.5), steps=6),
    Configuration(name="fit: beside training", use="fit", load=_load(4, 4, 3, 32, staleness=1), steps=16),
    Configuration(name="slow environment", use="check", load=_load(6, 4, 2, 40, 0.05)),
    Configuration(name="slower environment", use="check", load=_load(4, 8, 4, 20, 0.2), steps=6),
    Configuration(name="long prompts", use="check", load=_load(8, 4, 3, 16, prompt=320)),
    Configuration(
        name="half at once", use="check", load=_load(8, 4, 3, 24, 0.05, latency_spread=0.5, concurrency=16)
    ),
    Configuration(
        name="uneven, with a wait", use="check",
        load=_load(4, 8, 5, 24, 0.05, spread=0.6, latency_spread=1.0, turns_spread=0.3),
    ),
    Configuration(name="many long answers", use="check", load=_load(8, 4, 2, 64), steps=6),
    Configuration(
        name="many groups, four at once", use="check", load=_load(10, 4, 2, 24, 0.2, concurrency=16), steps=6
    ),
    Configuration(name="beside: slower environment", use="check", load=_load(4, 4, 3, 24, 0.2, staleness=1), steps=16),
    Configuration(name="beside: slow environment", use="check", load=_load(6, 4, 2, 40, 0.05, staleness=1), steps=16),
    Configuration(name="beside: two rounds ahead", use="check", load=_load(4, 8, 4, 24, 0.2, staleness=2), steps=15),
    Configuration(
        name="beside: uneven", use="check", load=_load(8, 4, 3, 32, prompt=128, spread=0.5, staleness=1), steps=12
    ),
)  # fmt: skip


class PlannedTurns(FixedTurns):
    """The workload's table of answers, drawn by task and sibling; the last answer of an episode says so."""

    def __init__(self, inner: Sampler, load: Workload, *, end: int, mark: int) -> None:
        self.inner = inner
        self._load, self._end, self._no_call, self._mark = load, end, end, mark
        self._turns = {}

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams, session: Session) -> Completion:
        position, sibling, _ = session.order
        plan = self._load.turn_plan(position, sibling)
        turn = self._turns[session.key]
        self._turns[session.key] = turn + 1
        fixed = replace(params, max_tokens=plan[turn], stop_token_ids=(), stop_strings=())
        sampled = await self.inner.sample(prompt_ids, fixed, session)
        first, *rest = self._ended(sampled.token_ids, self._end)
        if turn + 1 == len(plan):
            first = self._mark
        elif first == self._mark:
            first = FILLER
        return replace(sampled, token_ids=(first, *rest), stop_reason="stop")


def environment(load: Workload, prompt: str, result: str) -> type:
    """Answers the same words after its wait, until it reads the mark."""

    class Waiting:
        def reset(self, seed: int) -> str:
            return f"Task {seed % 100_000:05d}. {prompt}"

        async def step(self, message: str) -> tuple[str, bool]:
            seconds = load.latency.at("latency", random.random())
            if seconds:
                await asyncio.sleep(seconds)
            return result, message.startswith(MARK)

        def get_reward(self) -> float:
            return random.random()  # whatever was said, so that every group has something to train

    return Waiting


@dataclass(slots=True)
class SamplerSteps:
    """What the engine's steps took, summed over steps of one kind and of about as many rows."""

    sums: dict[tuple[bool, int, bool], list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0] * 5))
    training: bool = False
    """whether the trainer computes now"""
    counted: bool = False

    def watch(self, engine: Any) -> None:
        """Count ``engine``'s steps from here on."""
        step, run, stats, context = engine.step, engine._run, engine.stats, [0]

        def noted(plan: Any) -> Any:
            context[0] = sum(one.row.start + one.row.size for one in plan)
            return run(plan)

        def timed(*, patience: float = 0.0) -> Any:
            context[0], training = 0, self.training
            prefill, sampled, began = stats.prefill_tokens, stats.sampled_tokens, time.perf_counter()
            found = step(patience=patience)
            seconds = time.perf_counter() - began
            if self.counted and training == self.training:
                prefill, sampled = stats.prefill_tokens - prefill, stats.sampled_tokens - sampled
                sums = self.sums[prefill > 0, sampled.bit_length(), training]
                for place, value in enumerate((1.0, sampled, context[0], prefill, seconds)):
                    sums[place] += value
            return found

        engine._run, engine.step = noted, timed

    def rows(self) -> list[dict[str, float | bool]]:
        names = ("steps", "rows", "context", "prefill", "seconds")
        return [
            {"prefilling": prefilling, "beside_training": training} | dict(zip(names, sums, strict=True))
            for (prefilling, _, training), sums in sorted(self.sums.items())
        ]


def measure(one: Configuration, model: Path) -> dict[str, Any]:
    """Train ``one``, and return its times a step and its counts."""
    from unittest import mock

    from transformers import PrinterCallback, TrainerCallback

    from envgrad import GRPOConfig, GRPOTrainer
    from envgrad.training.rollouts import Rollouts

    from .models import load as load_model

    load, made, steps = one.load, one.steps, SamplerSteps()
    policy, tokenizer = load_model(model)
    words = "look at the door and the river; say what it is "
    text = tokenizer.encode(words * 60, add_special_tokens=False)
    prompt, result = (str(tokenizer.decode(text[:count])) for count in (load.prompt_tokens, load.result_tokens))
    inner_sampler = Rollouts._make_sampler

    def make_sampler(self: Rollouts, max_sessions: int) -> PlannedTurns:
        inner: Any = inner_sampler(self, max_sessions)
        steps.watch(inner._engine)
        return PlannedTurns(inner, load, end=tokenizer.eos_token_id, mark=tokenizer.convert_tokens_to_ids(MARK))

    class Watch(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.times: list[float] = []

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.times.append(time.perf_counter())
            steps.training = False
            steps.counted = len(self.times) >= WARM_UP

    last = load.rounds_in_flight
    beside = {"asynchronous": True, "max_staleness": load.max_staleness} if load.asynchronous else {}
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(Rollouts, "_make_sampler", make_sampler):
        args = GRPOConfig(
            output_dir=folder, max_steps=WARM_UP + made + last, per_device_train_batch_size=load.episodes,
            num_generations=load.siblings, max_completion_length=3500, logging_steps=1, report_to="none",
            save_strategy="no", disable_tqdm=True, use_cpu=True, bf16=False, log_episodes=False, learning_rate=1e-6,
            max_concurrent_episodes=load.concurrency, **beside,
        )  # fmt: skip
        watch, counts = Watch(), []
        trainer = GRPOTrainer(
            policy, args=args, processing_class=tokenizer, callbacks=[watch],
            environment_factory=environment(load, prompt, result),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        train = trainer.training_step

        def training_step(model: Any, inputs: Any, *rest: Any) -> Any:
            counts.append(_count(inputs))
            steps.training = True
            return train(model, inputs, *rest)

        trainer.training_step = training_step
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "time/step" in entry][WARM_UP : WARM_UP + made]
    times = watch.times[WARM_UP - 1 : WARM_UP + made]
    return {
        "steps": [round(after - before, 5) for before, after in itertools.pairwise(times)],
        "phases": {
            name.removeprefix("time/"): round(fmean(entry[name] for entry in logs), 6)
            for name in logs[0]
            if name.startswith("time/") or name == "async/wait_seconds"
        },
        "counts": {
            name: fmean(count[name] for count in counts[WARM_UP : WARM_UP + made]) for name in counts[0]
        },
        "sampler": steps.rows(),
    }  # fmt: skip


def _count(item: Any) -> dict[str, float]:
    """Tokens of a step, as they were."""
    from envgrad.training.flops import Work

    work = Work.of_batch(item.batch)
    episodes = [episode for group in item.played.groups for episode in group.episodes]
    suffixes = [
        len(one.token_ids) - one.prompt_length - one.num_sampled_tokens for one in episodes if len(one.turns) > 1
    ]
    between = sum(len(one.turns) - 1 for one in episodes)
    return {
        "episodes": len(episodes),
        "turns": fmean(len(one.turns) for one in episodes),
        "prompt": fmean(one.prompt_length for one in episodes),
        "sampled": sum(one.num_sampled_tokens for one in episodes),
        "result": sum(suffixes) / between if between else 0.0,
        "forwarded": item.batch.num_forwarded_tokens,
        "unique": work.tokens,
        "pairs": work.pairs,
        "micro_batches": len(item.batch.micro_batches),
    }


def measure_log(rounds: int = 60) -> dict[str, float]:
    """Write one round of episodes again and again, as a trainer does."""
    from transformers import PrinterCallback

    from envgrad import GRPOConfig, GRPOTrainer
    from envgrad.episodes.log import EpisodeLog
    from envgrad.starter.compass import Compass

    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder, max_steps=1, per_device_train_batch_size=64, num_generations=8, report_to="none",
            max_completion_length=256, save_strategy="no", disable_tqdm=True, use_cpu=True, log_episodes=False,
        )  # fmt: skip
        trainer = GRPOTrainer("starter", args=args, environment_factory=Compass)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        played = trainer.last_round
        log = EpisodeLog(Path(folder) / "episodes")
        log.write(played, step=0)
        log.flush()
        began = time.perf_counter()
        for step in range(1, rounds):
            log.write(played, step=step)
        log.flush()
        seconds = time.perf_counter() - began
        log.close()
        size = sum(path.stat().st_size for path in (Path(folder) / "episodes").iterdir() if path.is_file())
    tokens = sum(len(one.token_ids) for group in played.groups for one in group.episodes)
    episodes = sum(len(group.episodes) for group in played.groups)
    return {
        "row_tokens": tokens / episodes,
        "bytes_per_token": size / (rounds * tokens),
        "bytes_per_second": size / rounds * (rounds - 1) / seconds,
        "tokens_per_second": (rounds - 1) * tokens / seconds,
    }


def measure_all(chosen: Sequence[Configuration], passes: int, output: Path) -> None:
    """All of ``chosen``, again and again; ``output`` has at any time what has been measured."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from .machine import busy_share, machine_line
    from .models import build_model

    torch.set_num_threads(1)
    disable_progress_bar()
    began = time.perf_counter()
    data: dict[str, Any] = {
        "machine": machine_line(),
        "busy_before": busy_share(),
        "model": "small: 4 layers of width 128, 557 tokens, float32, one thread each for training and sampling",
    }
    runs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = build_model("small", Path(folder))
        data["log"] = measure_log()
        print(f"{time.perf_counter() - began:5.0f} s  episode log: {data['log']}", flush=True)
        for _ in range(passes):
            for one in chosen:
                found = measure(one, model)
                run = {"name": one.name, "use": one.use, "load": one.load.as_dict(), "passes": []}
                runs.setdefault(one.name, run)["passes"].append(found)
                phases = "  ".join(f"{name} {value:.3f}" for name, value in found["phases"].items() if value > 0.005)
                spent = time.perf_counter() - began
                print(f"{spent:5.0f} s  {one.name:28}  {fmean(found['steps']):.3f} s a step  {phases}", flush=True)
                data |= {"seconds": round(spent, 1), "runs": list(runs.values())}
                output.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def show(data: dict[str, Any]) -> Costs:
    """Fit, simulate, and print every configuration beside what was measured."""
    runs = read_runs(data)
    costs = fit(runs)
    print(data["machine"])
    print(f"{'configuration':32} {'measured':>8} {'simulated':>9} {'apart':>6}  {'planned':>7}   each time")
    for run in runs:
        simulated, planned = simulated_seconds(run, costs), estimate(run.load, costs).seconds
        print(
            f"{run.name:32} {run.seconds:8.3f} {simulated:9.3f} {simulated / run.seconds - 1:+6.0%}  {planned:7.3f}   "
            + ", ".join(f"{one:.3f}" for one in run.repeats)
        )
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, nargs="?", help="what --measure wrote: fit it and simulate")
    parser.add_argument("--measure", type=Path, metavar="FILE")
    parser.add_argument("--only", nargs="*", help="names of configurations")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument(
        "--costs", type=Path, metavar="FILE", help="write the fitted costs, for envgrad plan --measured"
    )
    given = parser.parse_args()
    if given.measure is not None:
        chosen = [one for one in CONFIGURATIONS if not given.only or one.name in given.only]
        measure_all(chosen, given.passes, given.measure)
    if given.measured is not None:
        costs = show(json.loads(given.measured.read_text(encoding="utf-8")))
        if given.costs is not None:
            given.costs.write_text(json.dumps({"costs": costs.as_dict()}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
