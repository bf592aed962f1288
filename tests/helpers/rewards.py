"""Finished episodes for tests of reward sources, built by hand, and a way to score them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from envgrad.environments.boundary import WorkerPool
from envgrad.rollout.scoring import RewardBatch, RewardLog, RewardSource
from envgrad.types import Episode, Message, StopReason, Task, ToolCall, ToolOutcome, Turn

LIMIT = 30.0


def task(row: Mapping[str, object] | None = None) -> Task:
    return Task(position=0, split="train", environment="", group_id=1, seed=2, row=row)


def made(turns: Sequence[Turn], messages: Sequence[Message], ids: Sequence[int], **changes: object) -> Episode:
    """An episode whose prompt is the tokens 1, 2 and whose completion is ``ids``."""
    count = len(ids)
    options: dict[str, object] = {
        "task": task(),
        "sibling": 0,
        "token_ids": (1, 2, *ids),
        "mask": (0, 0, *[1] * count),
        "logprobs": (0.0, 0.0, *[-0.5] * count),
        "versions": (-1, -1, *[0] * count),
        "prompt_length": 2,
        "messages": tuple(messages),
        "turns": tuple(turns),
        "stop_reason": StopReason.ANSWER,
        "reward": None,
    }
    return Episode(**(options | changes))  # type: ignore[arg-type]


def answered(text: str, *, prompt: str = "Say.", reasoning: str | None = None, raw: str = "", **changes: object):
    """A chat of one question and one answer."""
    message: Message = {"role": "assistant", "content": text}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    turn = Turn(start=2, num_tokens=3, policy_version=0, message=message, text=raw or text)
    changes.setdefault("ids", (7, 8, 9))
    return made([turn], [{"role": "user", "content": prompt}, message], **changes)  # type: ignore[arg-type]


def plain(text: str, *, prompt: str = "Say", **changes: object) -> Episode:
    """Plain text that no template touched."""
    return answered(text, prompt=prompt, plain_prompt=prompt, **changes)


def called(final: str = "done", **changes: object) -> Episode:
    """A chat with a system prompt, a tool call, its result, and an answer."""
    arguments = {"n": [1]}
    first: Message = {
        "role": "assistant",
        "content": "",
        "reasoning_content": "call it",
        "tool_calls": [{"id": "c0", "type": "function", "function": {"name": "inc", "arguments": arguments}}],
    }
    result: Message = {"role": "tool", "tool_call_id": "c0", "name": "inc", "content": "now 1"}
    last: Message = {"role": "assistant", "content": final, "reasoning_content": "enough"}
    outcome = ToolOutcome(call=ToolCall(id="c0", name="inc", arguments=arguments), content="now 1", ok=True)
    turns = [
        Turn(
            start=2, num_tokens=2, policy_version=0, message=first, outcomes=(outcome,), text="<think>call it</think>{"
        ),
        Turn(start=5, num_tokens=1, policy_version=0, message=last, text=f"<think>enough</think>{final}"),
    ]
    opening: list[Message] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count."}]
    return made(turns, [*opening, first, result, last], (7, 8, 9, 10), **changes)


def batch(
    episodes: Sequence[Episode], *, environments: Sequence[object] | None = None, timeout: float | None = 10.0
) -> RewardBatch:
    return RewardBatch(
        episodes=tuple(episodes),
        environments=None if environments is None else tuple(environments),
        log=RewardLog(),
        workers=WorkerPool(8),
        timeout=timeout,
    )


def score(source: RewardSource, episodes: Sequence[Episode] | RewardBatch) -> list[float | None]:
    group = episodes if isinstance(episodes, RewardBatch) else batch(episodes)

    async def bounded() -> list[float | None]:
        return await asyncio.wait_for(source.score(group), LIMIT)

    try:
        return asyncio.run(bounded())
    finally:
        group.workers.close()
