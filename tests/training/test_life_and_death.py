"""How runs end, seen from outside: exit codes, tracebacks, checkpoints, and that nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from helpers.zygote import Scenario, Zygote, gone

ALGORITHMS = ("GRPO", "RLOO", "SDPO")


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote("helpers.life_scenarios")
    yield zygote
    zygote.close()


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run").glob("checkpoint-*"))


def sampler_of(scenario: Scenario) -> int:
    return int(re.findall(r"sampler (\d+)", scenario.stdout)[-1])


# -- errors end the run with their text, and a code that is not 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_failing_environment_ends_the_run_with_its_error(zygote: Zygote, tmp_path: Path, algorithm: str) -> None:
    code, run = zygote.run("environment_fails", tmp_path, algorithm)
    assert code == 1
    assert "Traceback" in run.stderr and "OSError: the simulator burnt down" in run.stderr
    assert "TooManyFailures" in run.stderr.splitlines()[-1]
    assert checkpoints(tmp_path) == ["checkpoint-2"] and "closed" in run.stdout


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_failing_reward_ends_the_run_with_its_error(zygote: Zygote, tmp_path: Path, algorithm: str) -> None:
    code, run = zygote.run("reward_fails", tmp_path, algorithm)
    assert code == 1
    assert "ZeroDivisionError: nobody to judge" in run.stderr and "TooManyFailures" in run.stderr.splitlines()[-1]
    assert checkpoints(tmp_path) == ["checkpoint-2"] and "closed" in run.stdout


def test_failures_beside_training_end_an_asynchronous_run_with_their_error(zygote: Zygote, tmp_path: Path) -> None:
    for scenario, error in (("environment_fails", "OSError: the simulator burnt down"),
                            ("reward_fails", "ZeroDivisionError: nobody to judge")):  # fmt: skip
        (tmp_path / scenario).mkdir()
        code, run = zygote.run(scenario, tmp_path / scenario, "AsyncGRPO")
        assert code == 1
        assert error in run.stderr and "TooManyFailures" in run.stderr.splitlines()[-1]
        assert "closed" in run.stdout


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "AsyncGRPO"])
def test_a_dying_sampler_thread_ends_the_run_with_its_error(zygote: Zygote, tmp_path: Path, algorithm: str) -> None:
    code, run = zygote.run("sampler_thread_dies", tmp_path, algorithm)
    assert code == 1
    assert run.stderr.splitlines()[-1] == "MemoryError: no more memory for keys" and "closed" in run.stdout


def test_a_hanging_tool_keeps_neither_the_run_nor_its_exit(zygote: Zygote, tmp_path: Path) -> None:
    code, run = zygote.run("tool_hangs", tmp_path)
    assert code == 1 and "TooManyFailures" in run.stderr.splitlines()[-1]


# -- a sampler in a process of its own


def test_a_sampler_process_gives_the_same_weights_and_leaves_nothing(zygote: Zygote, tmp_path: Path) -> None:
    (tmp_path / "process").mkdir()
    (tmp_path / "local").mkdir()
    code, run = zygote.run("sampler_process_trains", tmp_path / "process")
    assert code == 0, run.stderr
    assert gone(sampler_of(run))
    threads = run.stdout.splitlines()[-1]
    assert "envgrad" not in threads, threads
    code, _ = zygote.run("local_sampler_trains", tmp_path / "local")
    assert code == 0
    weights = [torch.load(tmp_path / name / "weights.pt") for name in ("process", "local")]
    assert torch.equal(*weights)


@pytest.mark.parametrize("algorithm", ["GRPO", "AsyncGRPO"])
def test_a_killed_sampler_process_ends_the_run_in_seconds(zygote: Zygote, tmp_path: Path, algorithm: str) -> None:
    run = zygote.start("sampler_process_is_killed", tmp_path, algorithm)
    run.wait_for("step 3")
    sampler = sampler_of(run)
    began = time.monotonic()
    os.kill(sampler, signal.SIGKILL)
    assert run.finish() == 1 and time.monotonic() - began < 50
    assert f"envgrad.errors.SamplerDied: the sampler's process ({sampler}) is gone: SIGKILL ended it" in run.stderr
    steps = re.findall(r"step (\d+)", run.stdout)
    assert checkpoints(tmp_path) == [f"checkpoint-{steps[-1]}"] and "closed" in run.stdout


def test_a_sampler_process_ends_with_its_trainer(zygote: Zygote, tmp_path: Path) -> None:
    run = zygote.start("sampler_process_is_killed", tmp_path)
    run.wait_for("step 2")
    sampler = sampler_of(run)
    run.kill(signal.SIGKILL)
    assert run.finish() == -signal.SIGKILL
    assert gone(sampler, 30.0)


@pytest.mark.parametrize("algorithm", ["GRPO", "AsyncGRPO"])
def test_no_room_for_published_weights_ends_the_run_with_what_is_missing(
    zygote: Zygote, tmp_path: Path, algorithm: str
) -> None:
    code, run = zygote.run("disk_is_full", tmp_path, algorithm)
    assert code == 1
    last = run.stderr.splitlines()[-1]
    assert "WeightTransferError: version 2 of the policy" in last and "File too large" in last, run.stderr


# -- signals


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_interrupt_saves_closes_and_goes_on_as_one(zygote: Zygote, tmp_path: Path, algorithm: str) -> None:
    run = zygote.start("waits", tmp_path, algorithm)
    run.wait_for("waiting")
    run.kill(signal.SIGINT)
    assert run.finish() in (1, -signal.SIGINT), run.stderr  # Python's own code for an uncaught KeyboardInterrupt
    assert run.stderr.rstrip().endswith("KeyboardInterrupt") and "SIGINT: saving and closing" in run.stderr
    assert checkpoints(tmp_path) == ["checkpoint-2"] and "closed" in run.stdout


def test_an_interrupt_of_an_asynchronous_run_saves_and_closes_too(zygote: Zygote, tmp_path: Path) -> None:
    run = zygote.start("waits", tmp_path, "AsyncGRPO")
    run.wait_for("waiting")
    time.sleep(1.0)  # the trainer takes what is there, and waits
    run.kill(signal.SIGINT)
    assert run.finish() in (1, -signal.SIGINT), run.stderr
    assert run.stderr.rstrip().endswith("KeyboardInterrupt") and "SIGINT: saving and closing" in run.stderr
    assert len(checkpoints(tmp_path)) == 1 and "closed" in run.stdout


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "AsyncGRPO"])
def test_termination_saves_and_closes_and_its_exit_code_says_so(zygote: Zygote, tmp_path: Path, algorithm: str) -> None:
    run = zygote.start("waits", tmp_path, algorithm)
    run.wait_for("waiting")
    if algorithm == "AsyncGRPO":
        time.sleep(1.0)  # the trainer takes what is there, and waits
    run.kill(signal.SIGTERM)
    assert run.finish() == 143, run.stderr
    saved = checkpoints(tmp_path)
    assert len(saved) == 1 if algorithm == "AsyncGRPO" else saved == ["checkpoint-2"]
    assert "closed" in run.stdout


def test_nothing_is_saved_where_nothing_is_to_be_saved(zygote: Zygote, tmp_path: Path) -> None:
    run = zygote.start("waits", tmp_path, "GRPO", "no")
    run.wait_for("waiting")
    run.kill(signal.SIGTERM)
    assert run.finish() == 143
    assert checkpoints(tmp_path) == [] and "closed" in run.stdout


@pytest.mark.parametrize(
    ("algorithm", "number"), [("GRPO", signal.SIGINT), ("GRPO", signal.SIGTERM), ("AsyncGRPO", signal.SIGINT)]
)
def test_a_second_signal_ends_the_process_at_once(
    zygote: Zygote, tmp_path: Path, algorithm: str, number: signal.Signals
) -> None:
    run = zygote.start("closes_slowly", tmp_path, algorithm)
    run.wait_for("waiting")
    run.wait_for("step 2")
    run.kill(number)
    deadline = time.monotonic() + 60
    while not checkpoints(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    saved = checkpoints(tmp_path)  # beside rollouts, a step more may have been made by then
    assert len(saved) == 1 and (algorithm == "AsyncGRPO" or saved == ["checkpoint-2"])
    run.kill(number)
    began = time.monotonic()
    assert run.finish() == -number and time.monotonic() - began < 10
    assert checkpoints(tmp_path) == saved, "what was saved stays"


def test_an_evaluation_is_terminated_too(zygote: Zygote, tmp_path: Path) -> None:
    run = zygote.start("evaluates", tmp_path)
    run.wait_for("waiting")
    run.kill(signal.SIGTERM)
    assert run.finish() == 143 and "closed" in run.stdout


@pytest.mark.parametrize("delay", [0.0, 0.013, 0.031, 0.057])
def test_a_signal_at_any_time_leaves_a_whole_checkpoint(zygote: Zygote, tmp_path: Path, delay: float) -> None:
    run = zygote.start("steps_for_ever", tmp_path)
    run.wait_for("going")
    time.sleep(delay)
    run.kill(signal.SIGTERM)
    assert run.finish() == 143, run.stderr
    (name,) = checkpoints(tmp_path)
    saved = {path.name for path in (tmp_path / "run" / name).iterdir()}
    assert {"model.safetensors", "optimizer.pt", "rollout_state.json", "trainer_state.json"} <= saved
    assert not list((tmp_path / "run").glob(".saving*"))


@pytest.mark.parametrize(
    ("place", "steps"), [("rollout", 2), ("credit", 2), ("micro-batch", 3), ("optimizer", 4)]
)  # fmt: skip
def test_an_interrupted_run_resumes_to_the_same_weights(zygote: Zygote, tmp_path: Path, place: str, steps: int) -> None:
    code, run = zygote.run("interrupted", tmp_path, place)
    assert code == 0, run.stderr
    assert f"interrupted after {steps}" in run.stdout and "equal True" in run.stdout, run.stdout
