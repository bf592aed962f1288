"""What environments keep between their episodes travels in the checkpoint."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from envgrad.environments.boundary import WorkerPool
from envgrad.environments.contract import StepResult, inspect_environment
from envgrad.environments.pool import InstancePool
from envgrad.errors import EnvironmentContractError, EnvironmentFailure
from helpers.trainers import NAMES, Kind


class Levels:
    """All instances share a level, which rises with every episode."""

    level = 0
    resets: list[int] = []

    def reset(self, seed: int) -> str:
        type(self).resets.append(self.level)
        type(self).level += 1
        return f"Level {self.resets[-1]}, task {seed % 97}."

    def step(self, message: str) -> StepResult:
        return StepResult("ok", reward=len(message) / 100, done=True)

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.level}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        type(self).level = state["level"]


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_goes_on_at_the_level_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    class Own(Levels):
        level, resets = 0, []

    options = {
        "max_steps": 3,
        "save_strategy": "steps",
        "save_steps": 2,
        "deterministic": True,
        "max_completion_length": 8,
    }
    if name == "SDPO":
        options["success_reward_threshold"] = 0.01
    Kind(name).make(tmp_path, options=options, environment_factory=Own).train()
    saved = json.loads((tmp_path / "checkpoint-2" / "rollout_state.json").read_text())["environments"]
    (state,) = next(iter(saved.values()))
    assert 0 < state["level"] < Own.level, "episodes of the third step came behind the checkpoint"
    Own.level, Own.resets = 0, []
    again = Kind(name).make(tmp_path, options=options, environment_factory=Own)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert min(Own.resets) == state["level"]


@pytest.mark.parametrize("name", ["GRPO", "AsyncGRPO"])
def test_each_environment_of_a_mixture_goes_on_at_its_own_level(name: str, tmp_path: Path) -> None:
    """Played ahead too: there a level may rise while a checkpoint asks for it."""

    class First(Levels):
        level, resets = 0, []

    class Second(Levels):
        level, resets = 0, []

    kinds = {"first": First, "second": Second}
    options = {
        "max_steps": 6, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 8,
        "max_completion_length": 8,
    }  # fmt: skip
    if name == "AsyncGRPO":
        options["max_staleness"] = 1
    Kind(name).make(tmp_path, options=options, environment_factory=kinds).train()
    saved = json.loads((tmp_path / "checkpoint-2" / "rollout_state.json").read_text())["environments"]
    for kind in kinds.values():
        kind.level, kind.resets = 0, []
    again = Kind(name).make(tmp_path, options=options, environment_factory=kinds)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for environment, kind in kinds.items():
        levels = {state["level"] for state in saved[environment]}
        assert 0 not in levels and min(kind.resets) in levels


def test_states_cross_processes(tmp_path: Path) -> None:
    book = tmp_path / "book"

    class Own:
        """Each instance counts its own episodes."""

        def __init__(self) -> None:
            self.level = 0

        def reset(self, seed: int) -> str:
            with book.open("a") as file:
                file.write(f"{self.level}\n")
            self.level += 1
            return "Go."

        def step(self, message: str) -> StepResult:
            return StepResult("ok", reward=len(message) / 100, done=True)

        def state_dict(self) -> dict[str, Any]:
            return {"level": self.level}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.level = state["level"]

    options = {
        "max_steps": 3, "save_strategy": "steps", "save_steps": 2, "max_completion_length": 8,
        "environment_executor": "process",
    }  # fmt: skip
    Kind("GRPO").make(tmp_path / "run", options=options, environment_factory=Own).train()
    assert sorted(book.read_text().split()) == ["0"] * 4 + ["1"] * 4 + ["2"] * 4
    checkpoint = tmp_path / "run" / "checkpoint-2"
    saved = json.loads((checkpoint / "rollout_state.json").read_text())["environments"]
    assert saved == {"Own": [{"level": 2}]}
    book.unlink()
    again = Kind("GRPO").make(tmp_path / "run", options=options, environment_factory=Own)
    again.train(resume_from_checkpoint=str(checkpoint))
    assert book.read_text().split() == ["2"] * 4


class Silent(Levels):
    """Cannot say its level."""

    hangs = False
    ended = threading.Event()

    def state_dict(self) -> dict[str, Any]:
        if self.hangs:
            self.ended.wait(60)
        raise OSError("nobody knows")


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_state_that_cannot_be_told_costs_no_checkpoint(
    name: str, hangs: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Own(Silent):
        level, resets = 0, []

    Own.hangs, Own.ended = hangs, threading.Event()
    options = {
        "max_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_completion_length": 8, "reset_timeout": 0.7,
    }  # fmt: skip
    if name == "SDPO":
        options["success_reward_threshold"] = 0.01
    with caplog.at_level(logging.WARNING):
        trainer = Kind(name).make(tmp_path, options=options, environment_factory=Own)
        trainer.train()
    Own.ended.set()
    assert trainer.state.global_step == 2
    assert json.loads((tmp_path / "checkpoint-2" / "rollout_state.json").read_text())["environments"] == {}
    why = "did not return in " if hangs else "raised OSError: nobody knows"
    assert (
        f"saved without the state of Own, so a resumed run begins it anew: environment 'Own': state_dict {why}"
        in caplog.text
    )


def test_an_instance_that_cannot_tell_its_state_is_replaced() -> None:
    class Moody(Named):
        def state_dict(self) -> dict[str, Any]:
            if self.name == 1:
                raise OSError("not now")
            return super().state_dict()

    async def scenario() -> None:
        pool, workers = pool_of(Moody)
        out = [await pool.acquire() for _ in range(3)]
        for one, number in zip(out, (1, 2, 3), strict=True):
            one.name = number
        for one in reversed(out):
            pool.release(one)
        assert await pool.states() == [{"name": 2}, {"name": 3}]
        assert pool.size == pool.num_free == 2
        await pool.close()
        workers.close()

    asyncio.run(scenario())


class Named:
    """Each instance has a state of its own."""

    made = 0

    def __init__(self) -> None:
        self.name = Named.made
        Named.made += 1

    def reset(self) -> str:
        return "Go."

    def get_reward(self) -> float:
        return 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"name": self.name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.name = state["name"]


def pool_of(kind: type, limit: int = 3) -> tuple[InstancePool, WorkerPool]:
    spec, probe = inspect_environment("named", kind)
    workers = WorkerPool()
    return InstancePool(spec, probe, limit=limit, workers=workers, close_timeout=1.0), workers


def test_states_are_of_those_that_wait_and_go_to_as_many() -> None:
    async def scenario() -> None:
        pool, workers = pool_of(Named)
        out = [await pool.acquire() for _ in range(3)]
        for one, name in zip(out, (10, 20, 30), strict=True):
            one.name = name
        for one in out[:2]:
            pool.release(one)
        assert await pool.states() == [{"name": 20}, {"name": 10}], "the next to be used first"
        assert await pool.acquire() is out[1], "order stays as it was"
        await pool.close()
        other, more = pool_of(Named)
        await other.restore([{"name": 20}, {"name": 10}])
        assert [(await other.acquire()).name for _ in range(3)] == [20, 10, 10]
        await other.close()
        workers.close(), more.close()

    asyncio.run(scenario())


def test_where_all_are_out_the_next_that_comes_is_asked() -> None:
    async def scenario() -> None:
        pool, workers = pool_of(Named, limit=1)
        only = await pool.acquire()
        asking = asyncio.ensure_future(pool.states())
        await asyncio.sleep(0.01)
        assert not asking.done()
        only.name = 7
        pool.release(only)
        assert await asking == [{"name": 7}] and pool.num_free == 1
        await pool.close()
        workers.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("state", [{"a": (1, 2)}, {"a": {1, 2}}, {1: 2}, {"a": float("nan")}, [1], None])
def test_a_state_that_a_checkpoint_cannot_hold_is_named(state: object) -> None:
    class Odd(Named):
        def state_dict(self) -> Any:
            return state

    async def scenario() -> None:
        pool, workers = pool_of(Odd)
        with pytest.raises(EnvironmentContractError, match="which a checkpoint cannot hold"):
            await pool.states()
        assert pool.num_free == 1
        await pool.close()
        workers.close()

    asyncio.run(scenario())


def test_what_raises_is_the_environments_failure_and_loses_no_instance() -> None:
    class Broken(Named):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("level")

    async def scenario() -> None:
        pool, workers = pool_of(Broken)
        with pytest.raises(EnvironmentFailure, match="load_state_dict raised KeyError"):
            await pool.restore([{"name": 1}])
        assert pool.size == 1 and pool.num_free == 1
        await pool.acquire()
        with pytest.raises(EnvironmentFailure, match="load_state_dict raised KeyError"):
            await pool.acquire()
        assert pool.size == 1, "the new one is closed"
        await pool.close()
        workers.close()

    asyncio.run(scenario())
