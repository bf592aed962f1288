"""What a Ray cluster costs and survives: slow environments side by side, dying actors, a dying node, whole runs."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from envgrad.environments.boundary import WorkerPool, call_user
from envgrad.environments.contract import inspect_environment
from envgrad.environments.executors.ray_factory import RayFactory
from envgrad.environments.executors.ray_options import RayOptions, Resources
from envgrad.environments.pool import InstancePool
from envgrad.errors import ConfigurationError, EnvironmentContractError
from envgrad.rollout.group import GroupPolicy
from helpers.models import flat, tiny_llama
from helpers.ray_worlds import Asleep, Dying, Notes, Slow, ray_cluster
from helpers.trainers import Kind, by_sibling, logged, script, sober_llama
from helpers.world import call, turn, world
from helpers.zygote import gone

pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster() -> Any:
    with ray_cluster(one={"games": 8}, two={"games": 8}) as cluster:
        yield cluster


def test_two_hundred_slow_environments_in_sixteen_actors(cluster: Any) -> None:
    """All work at once: what a run takes is what one environment takes, but for a tenth (printed, not asserted)."""
    environments, calls, seconds = 200, 8, 1.0
    options = RayOptions(concurrency=environments, per_actor=50)
    factory = RayFactory(functools.partial(Asleep, seconds), "asleep", options)
    most = 0

    async def run() -> tuple[float, float, list[float]]:
        nonlocal most
        spec, probe = inspect_environment("asleep", factory)
        workers = WorkerPool()
        pool = InstancePool(spec, probe, limit=environments, workers=workers, close_timeout=60.0)

        async def episode(instance: Any, number: int) -> float:
            await instance.reset(seed=number)
            (tool,) = instance.tools
            for _ in range(calls):
                outcome = await call_user("work", tool.bind(instance), workers=workers, timeout=60.0)
                assert outcome.value == "worked"
            return await instance.get_reward()

        began = time.monotonic()
        instances = await asyncio.gather(*(pool.acquire() for _ in range(environments)))
        built = time.monotonic() - began
        most = len(factory.actors)
        began = time.monotonic()
        rewards = await asyncio.gather(*(episode(one, number) for number, one in enumerate(instances)))
        taken = time.monotonic() - began
        await pool.close()
        return built, taken, rewards

    built, taken, rewards = asyncio.run(run())
    factory.close()
    share = calls * seconds / taken
    print(
        f"\n{environments} environments in {most} actors: built in {built:.1f} s; {calls} calls of {seconds} s each in "
        f"{taken:.2f} s: {share:.3f} of ideal, {environments * calls / taken:.0f} calls a second"
    )
    assert most <= 16 and rewards == [float(calls)] * environments
    assert share > 0.1, "far from one after the other, which would be 0.08 with 16 at once"


def work(times: int) -> list[list[int]]:
    return [turn(call("work")) for _ in range(times)] + [turn("done")]


@pytest.mark.parametrize("victim", ["actor", "node"])
def test_a_killed_actor_and_a_killed_node_cost_their_episodes_only(cluster: Any, tmp_path: Path, victim: str) -> None:
    notes = Notes(tmp_path / "notes")
    options = RayOptions(resources=Resources(custom={"games": 1.0}), per_actor=2, concurrency=8)
    factory = RayFactory(functools.partial(Slow, notes.path, 0.3), "slow", options)
    answers = by_sibling(work(3))
    groups, siblings = 6, 4
    killed: list[int] = []

    def strike() -> None:
        notes.wait_for("work", 8)
        if victim == "actor":
            post = next(post for post in factory.actors if post.where is not None)
            killed.append(post.pid)
            os.kill(post.pid, signal.SIGKILL)
        else:
            node = cluster.named["two"]
            killed.extend(post.pid for post in factory.actors if on_node(post, node))
            cluster.remove_node(node, allow_graceful=False)

    striker = threading.Thread(target=strike)
    policy = GroupPolicy(num_generations=siblings, max_episode_retries=2)
    with world(factory, answers, max_groups=2, tool_timeout=30.0) as (runner, tasks, _):
        striker.start()
        played = runner.play(tasks, groups, policy)
        striker.join()
        survivors = {post.pid for post in factory.actors}
    factory.close()
    assert killed and not survivors.intersection(killed)
    assert len(played.groups) == groups and not played.dropped
    assert [episode.reward for group in played.groups for episode in group.episodes] == [3.0] * groups * siblings
    assert not played.failures, "all were played again"
    faults = played.faults["environment"]
    pids, closes = notes.pids(), notes.closes()
    lost = {instance for instance in pids if closes[instance] == 0}
    assert set(closes.values()) <= {0, 1}, "closed once, or gone with its actor"
    assert 1 <= faults <= len(lost) <= 2 * len(killed), (faults, lost, killed)
    assert notes.count("reset") <= groups * siblings + faults, "no other episode was played again"
    assert all(gone(pid) for pid in pids.values()) and all(gone(pid) for pid in killed)
    print(f"\na killed {victim}: {len(killed)} actors and {len(lost)} instances gone, {faults} episodes played again")
    if victim == "node":
        cluster.named["two"] = cluster.add_node(
            num_cpus=4, resources={"games": 8}, include_dashboard=False, object_store_memory=80 * 2**20
        )


def on_node(post: Any, node: Any) -> bool:
    return post.where is not None and str(node.node_id)[:8] in post.where


def test_deaths_name_actor_and_node(cluster: Any, tmp_path: Path) -> None:
    factory = RayFactory(functools.partial(Slow, tmp_path / "notes", 30.0), "slow", RayOptions(concurrency=2))
    instance = factory()
    (post,) = factory.actors

    async def run() -> str:
        await instance.reset(seed=1)
        working = asyncio.ensure_future(instance._call_tool("work"))
        await asyncio.sleep(0.2)
        os.kill(post.pid, signal.SIGKILL)
        error = (await asyncio.gather(working, return_exceptions=True))[0]
        return f"{type(error).__name__}: {error}"

    text = asyncio.run(run())
    assert text.startswith("EnvironmentFailure: the environment died in call: actor 1 of 'slow' (process "), text
    assert f"(process {post.pid} on node " in text and "is gone: " in text
    assert factory.actors == () and instance.process_lost
    instance.close()
    factory.close()


# -- whole runs


def test_rewards_and_weights_are_those_of_threads(cluster: Any, tmp_path: Path) -> None:
    import random

    import torch

    from envgrad.environments.members import StepResult

    class Parity:
        """Draws its word from the global generator; paid by the share of letters of one parity, which it has drawn."""

        def reset(self) -> str:
            self.parity, self.hits = random.randrange(2), 0
            return f"Write {random.randrange(100)}."

        def step(self, message: str) -> StepResult:
            self.hits = sum(ord(letter) % 2 == self.parity for letter in message)
            return StepResult("ok", reward=self.hits / max(1, len(message)), done=True)

    seen: list[int] = []

    def bonus(environments: Any, **kwargs: Any) -> list[float]:
        seen.extend(one.hits for one in environments)
        return [0.01 * one.hits for one in environments]

    weights, rewards = [], []
    for executor in ("thread", "ray"):
        trainer = Kind("GRPO").make(
            tmp_path / executor, model=tiny_llama(), environment_factory=Parity, reward_funcs=bonus,
            options={"environment_executor": executor, "deterministic": True, "max_completion_length": 24},
        )  # fmt: skip
        trainer.train()
        weights.append(flat(trainer.model))
        rewards.append(logged(trainer, "reward"))
        assert trainer.rollouts.tally.is_clean
    assert rewards[0] == rewards[1] and len(rewards[0]) == 2 and torch.equal(*weights)
    half = len(seen) // 2
    assert any(seen) and sorted(seen[:half]) == sorted(seen[half:])
    assert all(factory.actors == () for factory in trainer.rollouts._processes)


def test_a_run_ends_and_is_accounted_for_while_instances_and_actors_die(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = Notes(tmp_path / "notes")
    script(monkeypatch, by_sibling(work(2)))
    rounds, groups, siblings = 2, 8, 4
    trainer = Kind("GRPO").make(
        tmp_path / "run", model=sober_llama(), environment_factory=functools.partial(Dying, notes.path),
        options={
            "environment_executor": "ray", "environments_per_actor": 4, "max_concurrent_episodes": 16,
            "max_steps": rounds, "per_device_train_batch_size": groups * siblings, "num_generations": siblings,
            "max_turns": 4, "tool_timeout": 2.0, "max_episode_retries": 2,
        },
    )  # fmt: skip
    trainer.train()
    tally = trainer.rollouts.tally
    assert trainer.state.global_step == rounds and tally.groups - tally.dropped == rounds * groups
    counts = {way: notes.count(way) for way in Dying.WAYS}
    assert all(counts.values()), counts
    assert tally.faults["tool_timeout"] >= counts["hang"] - 3 * counts["actor"], "some hung where an actor died"
    deaths = counts["die"] + counts["actor"]
    assert tally.faults["environment"] >= deaths - counts["actor"]
    assert tally.faults["environment"] <= counts["die"] + 4 * counts["actor"] + counts["hang"]
    assert tally.episodes + sum(tally.failures.values()) == tally.groups * siblings
    assert set(notes.closes().values()) <= {0, 1}
    lost = [instance for instance, count in notes.closes().items() if not count]
    assert deaths <= len(lost) <= counts["die"] + counts["hang"] + 8 * counts["actor"], "closed once, or gone"
    assert all(gone(pid) for pid in notes.pids().values())
    print(f"\n{counts}: {dict(tally.faults)} in {notes.count('try')} calls; {len(lost)} instances gone with a process")


def test_what_cannot_act_is_refused_at_construction(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"environment_resources=.* acts only with environment_executor='ray'"):
        Kind("GRPO").config(tmp_path, environment_resources={"num_cpus": 1})
    with pytest.raises(ConfigurationError, match="ray_address='auto' acts only with environment_executor='ray'"):
        Kind("GRPO").config(tmp_path, ray_address="auto", environment_executor="process")
    with pytest.raises(ConfigurationError, match="environments_per_actor=0 must be at least 1"):
        Kind("GRPO").config(tmp_path, environments_per_actor=0, environment_executor="ray")
    config = Kind("GRPO").config(tmp_path, environment_executor="ray", environment_resources='{"num_cpus": 2}')
    assert config.ray_options(8).resources.num_cpus == 2.0 and config.ray_options(8).actors == 8


def test_what_cannot_cross_is_refused_by_the_trainer(cluster: Any, tmp_path: Path) -> None:
    from envgrad.environments.adapters.other_python import OtherPython

    class Judged:
        def reset(self) -> str:
            return "x"

        def act(self) -> str:
            """Act."""
            return "x"

        @classmethod
        def group_reward(cls, environments: Any) -> list[float]:
            return [0.0 for _ in environments]

    ray = {"environment_executor": "ray"}
    with pytest.raises(EnvironmentContractError, match="Judged has group_reward"):
        Kind("GRPO").make(tmp_path, environment_factory=Judged, options=ray)
    other = OtherPython("python", "envgrad.starter.compass:Compass")
    with pytest.raises(ConfigurationError, match="OtherPython starts processes on this machine"):
        Kind("GRPO").make(tmp_path, environment_factory=other, options=ray)
