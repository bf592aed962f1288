from __future__ import annotations

import math
import random
import time

import pytest
import torch

from envgrad import GRPOTrainer
from envgrad.batch import Batch, StepTotals
from envgrad.environments.contract import StepResult
from envgrad.packing import pack
from envgrad.rollout.activity import ActivityReport
from envgrad.rollout.runner import Round
from envgrad.starter.compass import Compass, Direction
from envgrad.training import phases
from envgrad.training.flops import ModelCost
from envgrad.training.phases import PHASES, Laps, PhaseReport, phase_shares, rollout_tokens, training_tokens
from envgrad.training.stream import StepItem
from envgrad.types import Episode, Group, StopReason, Task, TrainingSample
from helpers.models import Constant, Letters, config, tiny_llama, tokenizer_of

COST = ModelCost(body=100, trained_body=100, head=10, trained_head=10, attention=1)


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def played(activity: ActivityReport, seconds: float = 4.0) -> Round:
    """Two siblings: a prompt of 2 tokens, 2 and 1 sampled ones."""
    task = Task(position=0, split="train", environment="e", group_id=1, seed=1)
    episodes = tuple(
        Episode(
            task=task, sibling=number, token_ids=(5, 6, *own), mask=(0, 0, *(1 for _ in own)),
            logprobs=(0.0,) * (2 + len(own)), versions=(0,) * (2 + len(own)), prompt_length=2, messages=(), turns=(),
            stop_reason=StopReason.DONE, reward=float(number),
        )
        for number, own in enumerate([(7, 8), (9,)])
    )  # fmt: skip
    return Round(groups=(Group(task=task, episodes=episodes),), seconds=seconds, activity=activity)


def batch_of(*owns, max_tokens=None) -> Batch:
    samples = [
        TrainingSample(
            token_ids=(5, 6, *own), mask=(0, 0, *(1 for _ in own)), logprobs=(0.0,) * (2 + len(own)),
            versions=(0,) * (2 + len(own)), advantages=(0.0, 0.0, *(1.0 for _ in own)), prompt_length=2, group="g",
        )
        for own in owns
    ]  # fmt: skip
    return pack(samples, [1.0] * len(samples), max_tokens=max_tokens)


def item_of(batch: Batch, round_: Round | None = None, seconds: dict[str, float] | None = None) -> StepItem:
    return StepItem(batch=batch, played=round_, iteration=0, seconds=seconds or {})


class TestLaps:
    def test_parts_and_rest(self):
        clock = Clock()
        laps = Laps(clock=clock)
        clock.now = 3.0
        laps.lap("publish")
        clock.now = 10.0
        laps.split({"decode": 4.0, "tools": 1.0}, rest="idle")
        clock.now = 11.0
        laps.lap("idle")
        assert laps.seconds == {"publish": 3.0, "decode": 4.0, "tools": 1.0, "idle": 3.0}

    def test_rounding_never_makes_time_negative(self):
        laps = Laps(clock=Clock())
        laps.split({"decode": 1e-9}, rest="idle")
        assert laps.seconds["idle"] == 0.0


class TestReport:
    def steps(self, monkeypatch):
        """Two steps by a clock that is set by hand: one with a round, one that reuses it."""
        monkeypatch.setattr(phases, "matmul_rate", lambda device, dtype: 1e3)
        clock, told = Clock(), []
        report = PhaseReport(
            told.append, cost=COST, device=torch.device("cpu"), dtype=torch.float32, clock=clock
        )  # fmt: skip

        def step(item, began, fetched, recorded, trained, stepped, ended):
            events = (report.begin, lambda: report.fetched(item), report.recorded, report.trained)
            callbacks = (report.on_optimizer_step, report.on_step_end)
            for event, now in zip(events, (began, fetched, recorded, trained), strict=True):
                clock.now = now
                event()
            for callback, now in zip(callbacks, (stepped, ended), strict=True):
                clock.now = now
                callback(None, None, None)

        report.on_train_begin(None, None, None)
        activity = ActivityReport(
            episode_seconds={"reset": 1.0, "tools": 9.0, "reward": 0.5, "sample": 3.0}, forwarded_tokens=3
        )
        seconds = {"publish": 0.5, "decode": 2.0, "tools": 1.0, "packing": 0.25, "idle": 1.0}
        first = item_of(batch_of((7, 8), (9,)), played(activity), seconds)
        step(first, 10.0, 15.0, 15.5, 18.5, 19.0, 19.25)
        step(item_of(batch_of((7, 8), (9,))), 21.0, 21.0, 21.0, 23.0, 24.0, 24.0)
        return told

    def test_phases_add_up_to_the_step(self, monkeypatch):
        first, second = self.steps(monkeypatch)
        got = {name: first[f"time/{name}"] for name in PHASES}
        zero = dict.fromkeys(PHASES, 0.0)
        assert got == zero | {
            "publish": 0.5, "decode": 2.0, "tools": 1.0, "packing": 0.25, "forward_backward": 3.0, "optimizer": 0.5,
            "idle": 1.0 + 0.25 + 0.5 + 0.25,
        }  # fmt: skip
        assert first["time/step"] == math.fsum(got.values()) == 19.25 - 10.0
        got = {name: second[f"time/{name}"] for name in PHASES}
        assert got == zero | {"forward_backward": 2.0, "optimizer": 1.0}

    def test_what_is_done_between_steps_is_apart(self, monkeypatch):
        first, second = self.steps(monkeypatch)
        assert first["time/between"] == 0.0 and second["time/between"] == 21.0 - 19.25

    def test_a_round_is_told_once(self, monkeypatch):
        first, second = self.steps(monkeypatch)
        assert first["episode_seconds/tools"] == 9.0 and first["time/rollout"] == 4.0
        own = {"time/rollout", "tokens/rollout_forwarded", "mfu/rollout", "episode_seconds/tools"}
        assert own <= set(first) and not own & set(second)

    def test_utilization(self, monkeypatch):
        first, _ = self.steps(monkeypatch)
        # 2 + 1 tokens, 3 predictions, 3 + 3 pairs
        forward = 2 * 100 * 3 + 2 * 10 * 3 + 6
        assert first["mfu/train"] == pytest.approx(3 * forward / (3.0 * 1e3))
        assert first["mfu/rollout"] == pytest.approx(forward / (4.0 * 1e3))


def test_shares_are_of_all_the_time_that_is_averaged_over():
    metrics = {f"time/{phase}": float(number) for number, phase in enumerate(PHASES)}
    shares = phase_shares(metrics | {"time/step": 99.0, "time/between": 7.0, "reward": 1.0})
    assert set(shares) == {f"share/{phase}" for phase in PHASES} and math.fsum(shares.values()) == pytest.approx(1.0)
    assert shares["share/idle"] == pytest.approx(10 / 55)
    assert phase_shares({"reward": 1.0}) == {} and phase_shares({"time/idle": 0.0}) == {}


class TestTokens:
    def test_what_was_forwarded_beyond_need_shows(self):
        metrics = rollout_tokens(played(ActivityReport(forwarded_tokens=6)), None, None)
        assert metrics["tokens/rollout_unique"] == 3 and metrics["tokens/rollout_forwarded_ratio"] == 2.0
        assert metrics["tokens_per_second/sampled"] == 3 / 4
        assert metrics["tokens_per_second/rollout_forwarded"] == 6 / 4
        assert "mfu/rollout" not in metrics

    def test_a_sampler_that_tells_nothing_has_no_numbers(self):
        assert rollout_tokens(played(ActivityReport()), COST, 1e3) == {}

    def test_a_group_that_is_cut_forwards_its_prompt_again(self):
        metrics = training_tokens(item_of(batch_of((7, 8), (9, 9), max_tokens=3)), 2.0, None, None)
        assert (metrics["tokens/unique"], metrics["tokens/forwarded"], metrics["tokens/trained"]) == (4, 6, 4)
        assert metrics["tokens/forwarded_ratio"] == 1.5 and metrics["tokens_per_second/forwarded"] == 3.0

    def test_a_step_without_samples(self):
        empty = Batch(
            micro_batches=(), samples=(), totals=StepTotals(num_samples=0, num_tokens=0), num_required_tokens=0
        )  # fmt: skip
        metrics = training_tokens(item_of(empty), 0.0, COST, 1e3)
        assert metrics == {"tokens/trained": 0.0, "tokens/forwarded": 0.0, "tokens/unique": 0.0}


class Chat(Letters):
    """Four free-text turns."""

    def reset(self, seed: int) -> str:
        self.left = 4
        return super().reset(seed)

    def step(self, message: str) -> StepResult:
        self.left -= 1
        return StepResult("Go on, please.", reward=super().step(message).reward, done=not self.left)


class SlowCompass(Compass):
    """Waits in all of its methods; moves take different times, so that siblings come back one by one. Pays for the way
    to the east too, so that siblings differ."""

    def reset(self, seed: int, split: str) -> str:
        time.sleep(0.002)
        return super().reset(seed=seed, split=split)

    def move(self, direction: Direction) -> str:
        time.sleep(random.Random(id(self)).choice([0.0, 0.003, 0.02]))
        return super().move(direction)

    def get_reward(self):
        time.sleep(0.003)
        return super().get_reward() + 0.1 * self.cell[0]


SlowCompass.move.__doc__ = Compass.move.__doc__


def run(tmp_path, model, environment, **changes):
    options = {"num_generations": 8, "per_device_train_batch_size": 16, "max_completion_length": 160, "max_steps": 2}
    trainer = GRPOTrainer(
        model, args=config(tmp_path, **(options | changes)), environment_factory=environment,
        processing_class=None if model == "starter" else tokenizer_of(),
    )  # fmt: skip
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("tools", [True, False])
def test_nothing_is_forwarded_twice(tmp_path, tools):
    """Several turns, groups of 8: what is forwarded is what must be, in rollouts and in training."""
    model, environment = ("starter", SlowCompass) if tools else (tiny_llama(), Chat)
    logs = run(tmp_path, model, environment, learning_rate=1e-3)
    assert all(entry["episodes/turns"] > 2 for entry in logs)
    for entry in logs:
        assert 1.0 <= entry["tokens/rollout_forwarded_ratio"] <= 1.05
        assert 1.0 <= entry["tokens/forwarded_ratio"] <= 1.05
        assert entry["mfu/rollout"] > 0 and entry["mfu/train"] > 0


def test_every_logged_step_has_all_phases_and_their_shares_sum_to_one(tmp_path):
    first, *_ = run(tmp_path, "starter", SlowCompass, max_steps=1)
    seconds = {phase: first[f"time/{phase}"] for phase in PHASES}
    assert math.fsum(seconds.values()) == pytest.approx(first["time/step"])
    assert math.fsum(first[f"share/{phase}"] for phase in PHASES) == pytest.approx(1.0)
    assert all(value >= 0 for value in seconds.values())
    for phase in ("prefill", "decode", "tools", "reset", "reward", "optimizer"):
        assert seconds[phase] > 0, phase
    assert first["episode_seconds/reset"] >= 16 * 0.002 and first["episode_seconds/reward"] >= 16 * 0.003
    assert seconds["decode"] + seconds["tools"] < first["time/rollout"] < first["time/step"]


def test_steps_that_reuse_a_round_have_no_rollout_time(tmp_path):
    first, second = run(tmp_path, tiny_llama(), Letters, num_iterations=2, max_completion_length=8)
    assert first["time/decode"] > 0 and second["time/decode"] == second["time/prefill"] == 0.0
    assert "tokens/rollout_unique" not in second and second["tokens/unique"] == first["tokens/unique"]


def test_a_step_that_teaches_nothing_is_reported_too(tmp_path):
    first, *_ = run(tmp_path, tiny_llama(), Constant, max_steps=1, max_completion_length=8)
    assert first["tokens/forwarded"] == 0.0 and "tokens/forwarded_ratio" not in first and "mfu/train" not in first
    assert first["time/decode"] > 0


def test_passes_of_other_policies_have_a_phase_of_their_own(tmp_path):
    first, *_ = run(tmp_path, tiny_llama(), Letters, max_steps=1, beta=0.1, max_completion_length=8)
    assert first["time/logprobs"] > 0
