"""A state of rollouts with a bit of everything in it, for tests of checkpoints."""

from __future__ import annotations

from typing import Any

from envgrad.algorithms.grpo import GRPO
from envgrad.environments.tasks import TaskStream, build_task_stream
from envgrad.errors import EnvironmentFailure
from envgrad.packing import pack
from envgrad.training.buffer import Finished, Place, Unconsumed
from envgrad.training.rounds import RoundsState
from envgrad.training.saved import RolloutState
from envgrad.training.stream import StepItem
from envgrad.types import Episode, EpisodeRow, FailedEpisode, Group, StopReason, Task, ToolCall, ToolOutcome, Turn


def stream_of_rows() -> TaskStream:
    rows = [{"prompt": f"p{number}", "when": object()} for number in range(9)]
    return build_task_stream({}, seed=3, split="train", dataset=rows)


def episode_of(task: Task, sibling: int, reward: float | None, **changes: Any) -> Episode:
    call = ToolCall(id="call_0", name="inc", arguments={"n": [1, None, 2.5, "\ud800"]})
    outcome = ToolOutcome(call=call, content="ok", ok=True, reward=0.1, seconds=0.25, tool="inc")
    turn = Turn(start=2, num_tokens=2, policy_version=4, message={"role": "assistant", "content": "x"}, text="x",
                outcomes=(outcome,), observation=None, reward=0.1)  # fmt: skip
    given: dict[str, Any] = {
        "task": task, "sibling": sibling, "token_ids": (5, 6, 7 + sibling, 8), "mask": (0, 0, 1, 1),
        "logprobs": (0.0, 0.0, -0.1 - sibling / 3, -1e-9), "versions": (-1, -1, 4, 5), "prompt_length": 2,
        "messages": ({"role": "user", "content": "hi"}, {"role": "assistant", "content": None}), "turns": (turn,),
        "stop_reason": StopReason.ANSWER, "reward": reward, "rewards": {"a": reward, "b": None},
        "seconds": {"sample": 0.5}, "tools": ({"type": "function"},), "feedback": "more", "extras": {"note": [1, "x"]},
        "branches": (
            EpisodeRow(token_ids=(1, 2), mask=(0, 1), logprobs=(0.0, -0.5), versions=(-1, 4), prompt_length=1),
        ),
    }  # fmt: skip
    return Episode(**(given | changes))


def group_of(task: Task, **changes: Any) -> Group:
    episodes = tuple(episode_of(task, sibling, float(sibling), **changes) for sibling in range(2))
    failure = FailedEpisode(task=task, sibling=2, attempts=3, kind="environment", error=EnvironmentFailure("it broke"))
    return Group(task=task, episodes=episodes, failures=(failure,), start_mismatch="n", metrics={"m": (1.0, 2.5)})


def state_with_everything(**changes: Any) -> RolloutState:
    """Two steps over one batch, two groups that wait, one that was dropped, and one task in play."""
    tasks = stream_of_rows()
    drawn = [tasks.draw() for _ in range(5)]
    algorithm = GRPO()
    samples = algorithm.credit([group_of(drawn[0][0])])
    totals = algorithm.totals(samples)
    batch = pack(samples, algorithm.weights(samples, totals), totals=totals, max_tokens=6)
    steps = [
        StepItem(batch=batch, played=None, iteration=number, seconds={"decode": 0.5}, metrics={"x": float("inf")})
        for number in (1, 2)
    ]
    waiting = tuple(
        Finished(
            place=Place(number=number, last_round=2), group=group_of(drawn[number][0], **changes), teaches=number > 1
        )
        for number in (1, 2)
    )
    unconsumed = Unconsumed(published=(4, 5, 6), rounds=2, waiting=waiting, dropped=(group_of(drawn[3][0]),))
    return RolloutState(
        rounds=RoundsState(
            tasks=tasks.state_dict([drawn[4][1]]),
            unconsumed=unconsumed,
            draws={task.position: state for task, state in drawn[1:4]},
        ),
        algorithm={"coefficient": 0.125},
        pending=steps,
        unlogged={"reward": [0.5, float("nan")]},
        shape={"num_generations": 2},
    )
