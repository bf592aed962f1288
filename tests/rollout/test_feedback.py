from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from envgrad.rollout.group import GroupPolicy
from envgrad.rollout.runner import Round
from helpers.world import Counter, call, turn, world

SCRIPT = [turn(call("inc", n=2)), turn("done")]


class Commented(Counter):
    asked = 0
    says: object = "count higher"

    def get_feedback(self) -> object:
        type(self).asked += 1
        return f"{self.says}: {self.n}" if isinstance(self.says, str) and self.says.strip() else self.says


class Awaited(Commented):
    async def get_feedback(self) -> object:
        return f"awaited {self.n}"


class Broken(Commented):
    def get_feedback(self) -> object:
        raise ValueError("no words")


class Slow(Commented):
    over = threading.Event()

    def get_feedback(self) -> object:
        self.over.wait(20)
        return "late"


def played(
    factory: type[Commented], *, ask: bool = True, retries: int = 0, split: str = "train", **limits: Any
) -> Round:
    with world(factory, SCRIPT, max_consecutive_failed_groups=100, **limits) as (runner, tasks, _):
        runner.contexts = {name: replace(one, ask_feedback=ask) for name, one in runner.contexts.items()}
        if split != "train":
            take = tasks.take
            tasks.take = lambda count: [replace(task, split=split) for task in take(count)]  # type: ignore[method-assign]
        policy = GroupPolicy(num_generations=2, max_episode_retries=retries)
        return runner.play(tasks, 1, policy, 1)


def test_feedback_is_asked_for_after_the_episode_and_kept_on_it() -> None:
    (group,) = played(Commented).groups
    assert [episode.feedback for episode in group.episodes] == ["count higher: 2"] * 2
    (group,) = played(Awaited).groups
    assert [episode.feedback for episode in group.episodes] == ["awaited 2"] * 2
    assert [tool["function"]["name"] for tool in group.episodes[0].tools] == ["inc"]


def test_nobody_is_asked_unless_the_trainer_reads_it() -> None:
    Commented.asked = 0
    (group,) = played(Commented, ask=False).groups
    assert Commented.asked == 0 and group.episodes[0].feedback is None
    (group,) = played(Commented, split="eval").groups
    assert Commented.asked == 0 and group.episodes[0].feedback is None
    (group,) = played(Counter).groups  # type: ignore[arg-type]
    assert group.episodes[0].feedback is None


@pytest.mark.parametrize("says", [None, "", "  \n"])
def test_an_environment_may_have_nothing_to_say(says: object) -> None:
    class Silent(Commented):
        pass

    Silent.says = says
    (group,) = played(Silent).groups
    assert [episode.feedback for episode in group.episodes] == [None, None]


def test_a_failure_of_it_is_the_environments_and_is_retried() -> None:
    result = played(Broken)
    assert not result.groups and result.failures == {"environment": 2}
    assert played(Broken, retries=1).failures["environment"] == 2

    class Number(Commented):
        says = 3

    assert played(Number).failures == {"environment": 2}
    assert played(Slow, reward_timeout=0.05).failures == {"reward_timeout": 2}
    Slow.over.set()


class Listener(Counter):
    heard: ClassVar[list[list[dict[str, Any]]]] = []

    def read_chat(self, messages: list[dict[str, Any]]) -> None:
        self.last = messages[-1]["content"]
        type(self).heard.append(messages)

    def get_reward(self) -> float:
        return float(len(self.last))


class AwaitedListener(Listener):
    async def read_chat(self, messages: list[dict[str, Any]]) -> None:
        self.last = "?" * len(messages)
        messages.clear()


class DeafListener(Listener):
    def read_chat(self, messages: list[dict[str, Any]]) -> None:
        raise ValueError("no ears")


def test_an_environment_that_reads_the_chat_has_it_whole_before_it_scores() -> None:
    Listener.heard.clear()
    (group,) = played(Listener).groups  # type: ignore[arg-type]
    roles = [[message["role"] for message in chat] for chat in Listener.heard]
    assert roles == [["user", "assistant", "tool", "assistant"]] * 2
    assert [episode.reward for episode in group.episodes] == [4.0, 4.0]  # "done"
    (group,) = played(AwaitedListener).groups  # type: ignore[arg-type]
    assert [episode.reward for episode in group.episodes] == [4.0, 4.0]
    assert [len(episode.messages) for episode in group.episodes] == [4, 4]  # it was a copy


def test_an_environment_that_cannot_read_the_chat_has_failed() -> None:
    result = played(DeafListener)  # type: ignore[arg-type]
    assert not result.groups and result.failures == {"environment": 2}
