"""Mixtures, curricula, dynamic sampling, references and evaluations beside rollouts that go on."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import pytest
import torch
from transformers import TrainerCallback

from envgrad.environments.contract import StepResult
from helpers.models import Constant, Letters, flat, tiny_llama
from helpers.trainers import Kind, logged

pytestmark = pytest.mark.filterwarnings("ignore")


class Rounds(TrainerCallback):  # type: ignore[misc, unused-ignore]
    def __init__(self) -> None:
        self.trainer: Any = None
        self.played: list[Any] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.played.append(self.trainer.last_round)


def trained(folder: Path, environment: Any, **options: Any) -> tuple[Any, list[Any]]:
    """A run of AsyncGRPO, and its rounds."""
    given = {"max_completion_length": 8, "max_staleness": 2, "num_generations": 2} | options
    trainer = Kind("AsyncGRPO").make(folder, tiny_llama(), environment_factory=environment, options=given)
    kept = Rounds()
    kept.trainer = trainer
    trainer.add_callback(kept)
    trainer.train()
    assert max(logged(trainer, "async/staleness_max")) <= given["max_staleness"]
    return trainer, kept.played


def test_environments_are_mixed_by_weight_without_a_dataset(tmp_path: Path) -> None:
    weights = {"often": 0.75, "seldom": 0.25}
    trainer, played = trained(
        tmp_path, {"often": Letters, "seldom": Letters}, max_steps=10, environment_weights=weights
    )
    tasks = [group.task for one in played for group in (*one.groups, *one.dropped, *one.stale)]
    assert sorted(task.position for task in tasks) == list(range(20)), "each drawn task once"
    for count in range(1, 21):  # at any time within one draw of its share
        drawn = Counter(task.environment for task in tasks if task.position < count)
        assert abs(drawn["often"] - 0.75 * count) <= 1
    assert trainer.state.global_step == 10


def test_each_environment_has_its_own_size_and_temperature(tmp_path: Path) -> None:
    own = {"hot": {"num_generations": 4, "temperature": 2.0}, "mild": {}}
    trainer, played = trained(tmp_path, {"hot": Letters, "mild": Letters}, max_steps=4, environment_options=own)
    sizes = {
        (group.task.environment, len(group.episodes)) for one in played for group in one.groups
    }  # fmt: skip
    assert sizes == {("hot", 4), ("mild", 2)}
    # log-probs are at each environment's own temperature on both sides: the first round is of the weights of now
    assert logged(trainer, "sampler_mismatch")[0] < 1e-4


class Varied(Letters):
    """Pays something else for every answer."""

    def step(self, message: str) -> StepResult:
        return StepResult("ok", reward=random.random(), done=True)


def test_a_curriculum_moves_weight_to_what_teaches(tmp_path: Path) -> None:
    trainer, played = trained(
        tmp_path, {"flat": Constant, "good": Varied}, max_steps=12, max_completion_length=24,
        curriculum="variance", curriculum_decay=0.5,
        curriculum_min_share=0.1, environment_weights={"flat": 0.5, "good": 0.5}, learning_rate=1e-4,
    )  # fmt: skip
    shares = logged(trainer, "curriculum/flat")
    assert shares[0] == 0.5 and fmean(shares[4:]) < 0.35
    late = Counter(group.task.environment for one in played[4:] for group in one.groups)
    assert late["flat"] < 8 and late.total() == 16, "less than half of them"


class Half(Letters):
    """Ten tasks; those of an even index pay the same for anything."""

    @classmethod
    def num_tasks(cls, split: str) -> int:
        return 10

    def reset(self, task_index: int) -> str:  # type: ignore[override]
        self.index = task_index
        return f"Write {task_index}."

    def step(self, message: str) -> Any:
        return super().step(message) if self.index % 2 else ("ok", True)

    def get_reward(self) -> float:
        return 0.0 if self.index % 2 else 1.0


def test_groups_that_teach_nothing_are_replaced_and_counted_as_drawn(tmp_path: Path) -> None:
    trainer, played = trained(tmp_path, Half, max_steps=-1, num_train_epochs=2, dynamic_sampling=True)
    fates = Counter(group.task.position for one in played for group in (*one.groups, *one.filtered))
    assert fates == dict.fromkeys(range(20), 1), "trained, or filtered, once"
    groups = [group for one in played for group in one.groups]
    fill = sum(one.unteaching for one in played)
    teaches = [len({episode.reward for episode in group.episodes}) > 1 for group in groups]
    assert teaches.count(False) == fill and sum(len(one.filtered) for one in played) >= 8
    assert trainer.state.epoch == 2.0 and trainer.state.global_step < 10


def test_a_reference_an_entropy_bonus_and_several_passes(tmp_path: Path) -> None:
    trainer, _ = trained(
        tmp_path, Letters, max_steps=6, beta=0.1, num_iterations=2, steps_per_generation=2, entropy_coef=0.01,
        per_device_train_batch_size=2,
    )  # fmt: skip
    kl = logged(trainer, "kl")
    assert abs(kl[0]) < 1e-5 < abs(kl[-1]) and trainer.state.global_step == 6


def test_an_evaluation_within_a_run_plays_other_tasks_and_is_no_training(tmp_path: Path) -> None:
    options = {"max_completion_length": 8, "max_staleness": 2, "num_generations": 2, "eval_tasks": 4, "max_steps": 4}
    trainer = Kind("AsyncGRPO").make(tmp_path, tiny_llama(), environment_factory=Letters, options=options)
    evaluated: list[Any] = []

    class Evaluates(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            before = flat(trainer.model)
            found = trainer.play_eval()
            evaluated.append(found)
            assert torch.equal(before, flat(trainer.model))
            versions = {one for group in found.groups for e in group.episodes for one in e.versions if one >= 0}
            assert versions == {trainer.state.global_step}, "with the weights of now, though rollouts go on"

    trainer.add_callback(Evaluates())
    trainer.train()
    keys = [{group.task.group_id for group in one.groups} for one in evaluated]
    assert len(evaluated) == 4 and all(one == keys[0] for one in keys), "the same tasks each time"
    assert not keys[0] & {group.task.group_id for group in trainer.last_round.groups}
    assert max(logged(trainer, "async/staleness_max")) <= 2


class Slow(Letters):
    """Two answers, with time between them in which weights may change. Of the groups that start first, those that the
    first round does not need wait there for an evaluation, which has published weights."""

    started: ClassVar[list[int]]
    evaluated: ClassVar[bool]
    patience: ClassVar[float]

    def reset(self, seed: int, split: str = "train") -> str:  # type: ignore[override]
        self.seed, self.answers = seed, 0
        if split == "eval":
            type(self).evaluated = True
        elif seed not in self.started:
            self.started.append(seed)
        return super().reset(seed)

    async def step(self, message: str) -> Any:  # type: ignore[override]
        self.answers += 1
        await asyncio.sleep(0.1)
        if self.answers == 2:
            return super().step(message)
        until = time.monotonic() + self.patience
        while self.seed in self.started[2:] and not self.evaluated and time.monotonic() < until:
            await asyncio.sleep(0.01)
        return "go on", False


@pytest.mark.parametrize("inflight", [True, False])
def test_an_evaluation_does_not_change_weights_under_episodes_that_must_not_span_versions(
    tmp_path: Path, inflight: bool
) -> None:
    class Held(Slow):
        started, evaluated = [], False
        patience = 60.0 if inflight else 1.0  # else the evaluation waits for them

    trainer, played = trained(
        tmp_path, Held, max_steps=6, max_completion_length=80, steps_per_generation=2, max_staleness=1,
        per_device_train_batch_size=2, inflight_weight_updates=inflight, eval_strategy="steps", eval_steps=1,
        eval_tasks=1,
    )  # fmt: skip
    episodes = [episode for one in played for group in one.groups for episode in group.episodes]
    spans = {len({version for version in episode.versions if version >= 0}) for episode in episodes}
    assert len(logged(trainer, "eval_reward")) == 6
    assert (spans == {1}) is not inflight, "in flight they do span some"
