"""Resuming with another configuration, with nothing to resume from, and when all is done."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from envgrad import GRPOTrainer, RLOOConfig, RLOOTrainer
from envgrad.errors import CheckpointError, ConfigurationError
from envgrad.training.signals import Terminated
from envgrad.training.stream import StepStream
from helpers.models import Letters, config, flat, tiny_llama, tokenizer_of
from helpers.trainers import NAMES, Kind

pytestmark = pytest.mark.filterwarnings("ignore")

ROUNDS = {
    "per_device_train_batch_size": 4, "steps_per_generation": 2, "save_strategy": "steps", "save_steps": 1,
    "deterministic": True,
}  # fmt: skip
"""two optimizer steps a round"""


def make(folder: Path, **changes: Any) -> GRPOTrainer:
    return GRPOTrainer(
        tiny_llama(), args=config(folder, **(ROUNDS | changes)), processing_class=tokenizer_of(),
        environment_factory=Letters,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps: ``checkpoint-1`` within its round, ``checkpoint-2`` behind it."""
    folder = tmp_path_factory.mktemp("run")
    make(folder, max_steps=2).train()
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_without_a_checkpoint_transformers_own_error_says_so(name: str, tmp_path: Path) -> None:
    trainer = Kind(name).make(tmp_path, tiny_llama(), environment_factory=Letters)
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        trainer.train(resume_from_checkpoint=True)
    trainer.close()


@pytest.mark.parametrize("step", [1, 2])
def test_the_saved_schedule_goes_on_whatever_learning_rate_is_given(
    run: Path, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(run, max_steps=3, learning_rate=0.5, save_strategy="no", max_tokens_per_microbatch=40)
    trainer.train(resume_from_checkpoint=str(run / f"checkpoint-{step}"))
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert trainer.state.global_step == 3 and rates == [0.05] * 3
    assert "learning_rate=0.5 does not act" in caplog.text and "with 0.05" in caplog.text


@pytest.mark.parametrize(
    ("step", "changes", "words"),
    [
        (2, {"num_generations": 2}, ["checkpoint-2", "num_generations=4", "has 2", "model="]),
        (1, {"num_generations": 2}, ["num_generations=4"]),
        (1, {"per_device_train_batch_size": 8}, ["episodes per optimizer step=4", "has 8"]),
        (1, {"steps_per_generation": 4}, ["episodes per round=8", "has 16"]),
        (1, {"num_iterations": 2}, ["num_iterations=1", "has 2"]),
        (2, {"seed": 5}, ["seed"]),
    ],
)
def test_what_would_break_the_promise_names_both_values(
    run: Path, step: int, changes: dict[str, Any], words: list[str]
) -> None:
    trainer = make(run, max_steps=4, save_strategy="no", **changes)
    with pytest.raises(ConfigurationError) as found:
        trainer.train(resume_from_checkpoint=str(run / f"checkpoint-{step}"))
    assert all(word in str(found.value) for word in words), found.value


def test_between_rounds_their_size_may_change(run: Path) -> None:
    trainer = make(run, max_steps=3, save_strategy="no", per_device_train_batch_size=8, num_iterations=2)
    trainer.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    assert trainer.state.global_step == 3


def test_another_algorithm_is_named(run: Path) -> None:
    options = config(run, **ROUNDS).to_dict()
    kept = {name: options[name] for name in (*ROUNDS, "output_dir", "num_generations", "use_cpu", "report_to")}
    trainer = RLOOTrainer(
        tiny_llama(), args=RLOOConfig(**(kept | {"max_steps": 4})), processing_class=tokenizer_of(),
        environment_factory=Letters,
    )  # fmt: skip
    with pytest.raises(CheckpointError, match="algorithm=GRPO, and this run has RLOO"):
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-2"))


def test_a_finished_run_has_nothing_left_to_do(run: Path) -> None:
    trainer = make(run, max_steps=2, save_strategy="no")
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 2 and trainer.last_round is None
    whole = make(run / "again", max_steps=2, save_strategy="no")
    whole.train()
    assert torch.allclose(flat(trainer.model), flat(whole.model), atol=1e-5)


# -- what is counted is counted once


class Crash(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise RuntimeError("the power went")


def rewards(trainer: GRPOTrainer) -> list[float]:
    return [entry["reward"] for entry in trainer.state.log_history if {"loss", "reward"} <= entry.keys()]


def test_what_was_not_logged_before_the_checkpoint_is_logged_behind_it(tmp_path: Path) -> None:
    """Logs come every fourth step, checkpoints every second: an average over four steps is of all four."""
    options = {"max_steps": 4, "logging_steps": 4, "save_steps": 2, "steps_per_generation": 1, "deterministic": True}
    whole = make(tmp_path / "whole", **options)
    whole.train()
    cut = make(tmp_path / "cut", **options)
    cut.add_callback(Crash())
    with pytest.raises(RuntimeError, match="the power went"):
        cut.train()
    again = make(tmp_path / "cut", **options)
    again.train(resume_from_checkpoint=True)
    assert rewards(whole) == rewards(again) and len(rewards(again)) == 1


def test_a_round_that_a_signal_cuts_off_from_its_first_step_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"max_steps": 6, "save_steps": 100, "deterministic": True}
    whole = make(tmp_path / "whole", **options)
    whole.train()
    original, rounds = StepStream._next_round, []

    def interrupted(stream: StepStream) -> bool:
        got = original(stream)
        rounds.append(got)
        if len(rounds) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return got

    monkeypatch.setattr(StepStream, "_next_round", interrupted)
    cut = make(tmp_path / "cut", **options)
    with pytest.raises(Terminated):
        cut.train()
    assert cut.state.global_step == 2 and len(rounds) == 2
    again = make(tmp_path / "cut", **options)
    again.train(resume_from_checkpoint=True)
    assert len(rounds) == 3, "the round in hand was not played again"
    assert rewards(again) == rewards(whole) and torch.equal(flat(again.model), flat(whole.model))
    assert again.state.num_input_tokens_seen == whole.state.num_input_tokens_seen
