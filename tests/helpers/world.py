"""A fake world for rollout tests: a real renderer and loop, scripted answers, environments with counters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from envgrad.agents.host import LoopbackHost
from envgrad.chat.renderer import ChatRenderer
from envgrad.environments.boundary import WorkerPool
from envgrad.environments.contract import inspect_environment
from envgrad.environments.pool import InstancePool
from envgrad.environments.tasks import TaskStream, build_task_stream
from envgrad.rollout.context import EpisodeContext, EpisodeLimits
from envgrad.rollout.group import GroupPolicy
from envgrad.rollout.loop import RolloutLoop
from envgrad.rollout.runner import RolloutRunner, Round
from envgrad.sampling.sampler import SamplingParams
from envgrad.sampling.scripted import ScriptedSampler
from envgrad.types import Episode
from helpers.tokenizers import CHATML, bpe_tokenizer

TOKENIZER = bpe_tokenizer(CHATML)
RENDERER = ChatRenderer(TOKENIZER)
LIMITS = EpisodeLimits(max_completion_length=4096, max_context=1 << 16)


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def call(name: str, **arguments: object) -> str:
    """A tool call as the template writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def turn(*parts: str, end: str = "<|im_end|>") -> list[int]:
    """A sampled turn: text and calls, with its terminator."""
    return ids("".join(parts) + end)


@contextmanager
def world(
    factory: Callable[[], object] | Mapping[str, Callable[[], object]],
    script: object,
    *,
    limits: EpisodeLimits = LIMITS,
    max_groups: int = 64,
    max_consecutive_failed_groups: int = 16,
    seed: int = 0,
    latency: float = 0.0,
    **changes: object,
) -> Iterator[tuple[RolloutRunner, TaskStream, ScriptedSampler]]:
    """A runner over scripted answers; ``changes`` replace limits."""
    sampler = ScriptedSampler(script, latency=latency)  # type: ignore[arg-type]
    workers = WorkerPool(max_hung=8)
    factories = dict(factory) if isinstance(factory, Mapping) else {"env": factory}
    specs, contexts, pools = {}, {}, {}
    for name, make in factories.items():
        spec, probe = inspect_environment(name, make)
        specs[name] = spec
        contexts[name] = EpisodeContext(
            spec=spec,
            renderer=RENDERER,
            sampler=sampler,
            sampling=SamplingParams(max_tokens=1, stop_token_ids=RENDERER.stop_token_ids),
            limits=replace(limits, **changes),  # type: ignore[arg-type]
            workers=workers,
            agents=LoopbackHost() if spec.runs_agent else None,
        )
        pools[name] = InstancePool(spec, probe, limit=256, workers=workers, close_timeout=2.0)
    runner = RolloutRunner(
        contexts=contexts,
        pools=pools,
        workers=workers,
        loop=RolloutLoop(),
        max_groups=max_groups,
        max_consecutive_failed_groups=max_consecutive_failed_groups,
    )
    try:
        yield runner, build_task_stream(specs, seed=seed, split="train"), sampler
    finally:
        runner.close()


def play(
    factory: Callable[[], object],
    script: object,
    *,
    groups: int = 1,
    siblings: int = 1,
    retries: int = 2,
    consistency: str = "auto",
    **changes: object,
) -> Round:
    policy = GroupPolicy(num_generations=siblings, max_episode_retries=retries, group_consistency=consistency)
    with world(factory, script, **changes) as (runner, tasks, _):  # type: ignore[arg-type]
        return runner.play(tasks, groups, policy)


def play_one(factory: Callable[[], object], script: object, **changes: object) -> Episode:
    return play(factory, script, **changes).groups[0].episodes[0]


class Counter:
    """``inc`` adds up; the reward is the sum. Counts openings and closings."""

    opened = 0
    closed = 0

    def __init__(self) -> None:
        type(self).opened += 1
        self.n = 0

    def reset(self, seed: int) -> str:
        self.n = 0
        return "Count."

    def inc(self, n: int) -> str:
        """
        Add to the counter.

        Args:
            n: How much.
        """
        self.n += n
        return f"now {self.n}"

    def get_reward(self) -> float:
        return float(self.n)

    def close(self) -> None:
        type(self).closed += 1
