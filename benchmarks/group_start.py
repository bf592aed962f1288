"""What a shared start is worth: the same training with siblings that share their task, and with siblings that do not.

    python -m benchmarks.group_start [--seeds 5] [--environments compass,secret,dealt] [--steps 40]

Three environments, each with two kinds of start, at equal episodes:

- ``compass``: the demo's. Shared: all siblings get the group's seed. Independent: each draws a task of its own.
- ``secret``: the game as somebody would write it who knows nothing of groups: it draws from Python's global ``random``.
  Shared: what envgrad does with it by default. Independent: each reset draws for itself (``isolate_generators="off"``).
- ``dealt``: the same, with a score that also depends on the task that was drawn.

It prints the mean variance of rewards inside groups, which is the variance of the advantage estimate ``r - baseline``
(times G / (G - 1)), at the first round (both kinds have one policy there) and over the run, and the reward.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from statistics import fmean, stdev, variance
from typing import Any

import torch
from transformers import TrainerCallback

from envgrad import GRPOConfig, GRPOTrainer
from envgrad.cli.demo import demo_config
from envgrad.environments.tasks import hash63
from envgrad.rollout.runner import Round
from envgrad.starter.compass import Compass

LAST_ROUNDS = 5


class SecretCompass(Compass):
    """The same game by somebody who knows nothing of groups, seeds and siblings: it draws its task from ``random``."""

    def reset(self) -> str:  # type: ignore[override]
        return super().reset(seed=random.getrandbits(62))

    def close(self) -> None:  # so that it is not forked
        self.moves = 0


class DealtCompass(SecretCompass):
    """A game whose score also depends on the deal, as that of many games does: up to 2 points come with the task."""

    def reset(self) -> str:  # type: ignore[override]
        opening = super().reset()
        self.luck = 2 * random.random()
        return opening

    def get_reward(self) -> dict[str, float]:  # type: ignore[override]
        return {"success": super().get_reward(), "luck": self.luck}


def independent_compass(run_seed: int) -> Callable[[], object]:
    """``Compass`` whose every reset draws a task of its own, whatever the group is."""
    draws = count()

    class IndependentCompass(Compass):
        def reset(self, split: str = "train") -> str:  # type: ignore[override]
            return super().reset(hash63("independent", run_seed, next(draws)), split)

        def close(self) -> None:  # not forked
            pass

    return IndependentCompass


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run."""

    environment: str
    shared: bool
    seed: int
    first_variance: float
    """of rewards inside groups, in the first round"""
    mean_variance: float
    """the same, mean over the run's rounds"""
    first_reward: float
    """success rates from here on"""
    mean_reward: float
    last_reward: float
    mismatches: float
    seconds: float


class _Watch(TrainerCallback):  # type: ignore[misc]
    """Keeps each round's rewards by group."""

    def __init__(self) -> None:
        self.rounds: list[list[list[float]]] = []
        self.successes: list[float] = []
        self.mismatches = 0
        self._seen: Round | None = None
        self.trainer: GRPOTrainer | None = None

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        played = None if self.trainer is None else self.trainer.last_round
        if played is None or played is self._seen:
            return
        self._seen = played
        self.mismatches += sum(group.start_mismatch is not None for group in played.groups)
        self.rounds.append([[e.reward for e in g.episodes if e.reward is not None] for g in played.groups])
        every = [e for g in played.groups for e in g.episodes]
        self.successes.append(fmean(e.rewards.get("success", e.reward) or 0.0 for e in every))


def train(environment: str, shared: bool, seed: int, steps: int) -> Run:
    began = time.perf_counter()
    config = demo_config(Path(tempfile.mkdtemp()), seed=seed, steps=steps)
    config = replace_config(config, group_consistency="auto" if shared else "off", log_episodes=False)
    factory: Callable[[], object]
    if environment == "compass":
        factory = Compass if shared else independent_compass(seed)
    else:
        factory = DealtCompass if environment == "dealt" else SecretCompass
        random.seed(seed)
        config = replace_config(config, isolate_generators="auto" if shared else "off")
    watch = _Watch()
    trainer = GRPOTrainer("starter", args=config, environment_factory=factory, callbacks=[watch])
    watch.trainer = trainer
    try:
        trainer.train()
    finally:
        trainer.close()
    inside = [fmean(variance(group) for group in groups if len(group) > 1) for groups in watch.rounds]
    rewards = watch.successes
    return Run(
        environment=environment,
        shared=shared,
        seed=seed,
        first_variance=inside[0],
        mean_variance=fmean(inside),
        first_reward=rewards[0],
        mean_reward=fmean(rewards),
        last_reward=fmean(rewards[-LAST_ROUNDS:]),
        mismatches=watch.mismatches,
        seconds=time.perf_counter() - began,
    )


def replace_config(config: GRPOConfig, **values: Any) -> GRPOConfig:
    """The demo's configuration with some values changed."""
    for name, value in values.items():
        if not hasattr(config, name):
            raise AttributeError(name)
        setattr(config, name, value)
    return config


def table(runs: Sequence[Run]) -> str:
    """Markdown: mean and standard deviation over seeds."""
    lines = [
        "| environment | start | variance in groups, first round | over the run | success, mean of run | last rounds |",
        "|---|---|---|---|---|---|",
    ]
    for environment in dict.fromkeys(run.environment for run in runs):
        for shared in (True, False):
            chosen = [run for run in runs if run.environment == environment and run.shared == shared]
            if chosen:
                figures = [
                    _figure([getattr(run, name) for run in chosen])
                    for name in ("first_variance", "mean_variance", "mean_reward", "last_reward")
                ]
                lines.append(f"| {environment} | {'shared' if shared else 'independent'} | {' | '.join(figures)} |")
    return "\n".join(lines)


def _figure(values: Sequence[float]) -> str:
    return f"{fmean(values):.3f}" + (f" (sd {stdev(values):.3f})" if len(values) > 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--environments", default="compass,secret,dealt")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", type=Path, help="JSON lines, one for each run, appended")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = []
    for environment in options.environments.split(","):
        for seed in range(options.seeds):
            for shared in (True, False):
                run = train(environment, shared, seed, options.steps)
                runs.append(run)
                print(json.dumps(asdict(run)), flush=True)
                if options.output:
                    with options.output.open("a") as file:
                        file.write(json.dumps(asdict(run)) + "\n")
    print(table(runs))


if __name__ == "__main__":
    main()
