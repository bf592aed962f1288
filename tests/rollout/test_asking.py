"""An environment asks the policy that is being rolled out."""

from __future__ import annotations

import asyncio

import pytest

from envgrad import StopReason
from envgrad.algorithms.credit import with_parts
from envgrad.algorithms.grpo import GRPO
from envgrad.algorithms.rloo import RLOO
from envgrad.environments.policy import ask_policy, forget_part, play_part, reward_part, use_policy
from envgrad.errors import EnvironmentFailure, TooManyFailures
from envgrad.rollout.group import GroupPolicy
from envgrad.rollout.scoring import RewardWeights
from helpers.world import LIMITS, RENDERER, play, play_one, turn, world


class Debate:
    """The policy opens against itself and answers itself."""

    async def reset(self, seed: int) -> str:
        self.opening = await ask_policy([{"role": "user", "content": f"Open debate {seed % 100}."}])
        return f"Answer: {self.opening}"

    async def step(self, message: str):
        self.reply = await ask_policy([{"role": "user", "content": message}], max_tokens=5)
        return self.reply, True

    def get_reward(self) -> float:
        return float(len(self.reply))


def test_asked_answers_are_sampled_and_never_trained():
    seen = []

    def script(prompt_ids, params, session):
        seen.append((len(prompt_ids), params.max_tokens, params.seed, session.key, tuple(prompt_ids)))
        return turn(("first", "second", "third")[(len(seen) - 1) % 3])

    (group,) = play(Debate, script, max_turns=4).groups
    (episode,) = group.episodes
    assert episode.stop_reason is StopReason.DONE and episode.reward == float(len("third"))
    assert [message["content"] for message in episode.messages] == ["Answer: first", "second", "third"]
    assert sum(episode.mask) == len(turn("second"))
    (_, room, first_seed, key, _), (_, _, own_seed, _, _), (_, short, second_seed, _, _) = seen
    assert room == LIMITS.max_completion_length and short == 5
    assert len({first_seed, own_seed, second_seed}) == 3 and {entry[3] for entry in seen} == {key}


def test_siblings_open_alike_and_then_ask_for_themselves():
    seeds = {"open": [], "reply": []}

    def script(prompt_ids, params, session):
        kind = "open" if session.key not in asked else "own" if asked[session.key] == 1 else "reply"
        asked[session.key] = asked.get(session.key, 0) + 1
        if kind in seeds:
            seeds[kind].append(params.seed)
        return turn(kind)

    asked: dict[str, int] = {}
    (group,) = play(Debate, script, siblings=4).groups
    assert len(group.episodes) == 4 and group.start_mismatch is None
    assert len(set(seeds["open"])) == 1 and len(set(seeds["reply"])) == 4


def test_a_chat_that_does_not_fit_is_a_failure():
    class Long(Debate):
        async def step(self, message: str):
            await ask_policy([{"role": "user", "content": "word " * 500}])
            return "", True

    policy = GroupPolicy(num_generations=2, max_episode_retries=0)
    with (
        world(Long, lambda *_: turn("x"), max_context=200, max_consecutive_failed_groups=1) as (runner, tasks, _),
        pytest.raises(TooManyFailures) as failed,
    ):
        runner.play(tasks, 1, policy)
    assert "leaves no room for an answer in a context of 200" in str(failed.value.__cause__)


class Duel:
    """White is the agent, black another part of the policy's; the longer last word wins."""

    async def reset(self, seed: int) -> str:
        self.chat = [{"role": "user", "content": "You are black."}]
        return "You are white."

    async def step(self, message: str):
        self.chat.append({"role": "user", "content": message})
        said = await play_part("black", self.chat)
        if said is None:
            return "", True
        self.chat.append({"role": "assistant", "content": said})
        self.white, self.black = len(message), len(said)
        return said, len(self.chat) > 4

    async def get_reward(self) -> float:
        reward_part("black", float(self.black - self.white))
        return float(self.white - self.black)


def test_another_part_is_an_episode_of_its_own_with_the_sampled_tokens():
    said = iter(["white one", "black 1", "white two more", "black 2"])
    episode = play_one(Duel, lambda *_: turn(next(said)))
    (black,) = episode.parts
    assert (black.part, black.task, black.sibling) == ("black", episode.task, 0)
    assert [message["content"] for message in black.messages] == [
        "You are black.", "white one", "black 1", "white two more", "black 2",
    ]  # fmt: skip
    # What was sampled, and nothing else, has mask 1; the row grew from the opening as an episode's does.
    first = RENDERER.open(black.messages[:2], None)
    assert black.token_ids[: black.prompt_length] == tuple(first)
    start, end = black.turns[0].start, black.turns[0].start + black.turns[0].num_tokens
    assert list(black.token_ids[start:end]) == turn("black 1")
    assert sum(black.mask) == len(turn("black 1")) + len(turn("black 2")) and black.token_ids[-1] == turn("x")[-1]
    assert black.token_ids == tuple(RENDERER.open(black.messages, None)[: len(black.token_ids)])
    assert black.reward == float(len("black 2") - len("white two more")) == -episode.reward
    assert black.stop_reason is episode.stop_reason is StopReason.DONE and not episode.part
    assert episode.key == ("train/0", 0) and black.key == ("train/0/black", 0)
    assert episode.num_sampled_tokens == len(turn("white one")) + len(turn("white two more"))


def test_each_part_is_compared_with_the_same_part_of_the_siblings():
    words = {0: ("w", "bbbb"), 1: ("www", "b")}

    class Short(Duel):
        async def step(self, message: str):
            observation, _ = await super().step(message)
            return observation, True

    def script(prompt_ids, params, session):
        number = asked[session.key] = asked.get(session.key, -1) + 1
        return turn(words[session.order[1]][number])

    asked: dict[str, int] = {}
    groups = play(Short, script, siblings=2).groups
    agent, black = with_parts(groups)
    assert [one.reward for one in agent.episodes] == [-3.0, 2.0] and [one.reward for one in black.episodes] == [
        3.0,
        -2.0,
    ]
    samples = GRPO(scale_rewards="none").credit([agent, black])
    # mean 0.5 less of each: -3 - (-0.5), 2 - (-0.5); 3 - 0.5, -2 - 0.5
    assert [sample.advantages[-1] for sample in samples] == [-2.5, 2.5, 2.5, -2.5]
    assert [sample.group for sample in samples] == ["train/0"] * 4 and {sample.row for sample in samples} == {0}
    samples = RLOO(beta=0.0).credit([agent, black])
    assert [sample.advantages[-1] for sample in samples] == [-5.0, 5.0, 5.0, -5.0]


def test_a_chat_that_does_not_go_on_begins_a_row_and_a_part_that_begins_anew_is_forgotten():
    class Restless:
        async def reset(self, seed: int) -> str:
            await play_part("one", [{"role": "user", "content": "thrown away"}])
            forget_part("one")
            return "Go."

        async def step(self, message: str):
            for word in ("a", "b"):
                await play_part("one", [{"role": "user", "content": word}])
            await play_part("unpaid", [{"role": "user", "content": "c"}])
            return "", True

        async def get_reward(self) -> float:
            reward_part("one", 1.0)
            with pytest.raises(EnvironmentFailure, match="the part 'two' has not played; those that have: one, unpaid"):
                reward_part("two", 1.0)
            with pytest.raises(EnvironmentFailure, match="'one' earned nan"):
                reward_part("one", float("nan"))
            return 0.0

    episode = play_one(Restless, lambda *_: turn("x"))
    one, unpaid = episode.parts
    assert (one.reward, unpaid.reward) == (1.0, None)
    assert len(one.rows) == 2 and [turn.row for turn in one.turns] == [1, 0]
    assert [message["content"] for message in one.messages] == ["b", "x"]
    assert one.num_sampled_tokens == 2 * len(turn("x"))


def test_a_part_that_has_no_room_left_is_told_so():
    # Black's first answer leaves less than its next chat's suffix needs.
    episode = play_one(Duel, lambda *_: turn("a b c d e f"), max_completion_length=len(turn("a b c d e f")) + 2)
    assert len(episode.parts[0].turns) == 1 and episode.parts[0].completion_length == len(turn("a b c d e f"))


def test_a_retried_episode_keeps_what_the_last_attempt_said():
    failed = []

    class Shaky(Duel):
        async def get_reward(self) -> float:
            if not failed:
                failed.append(1)
                raise RuntimeError
            return await super().get_reward()

    episode = play_one(Shaky, lambda *_: turn("x"))
    assert episode.attempt == 1 and len(episode.parts[0].turns) == 2


def test_parts_are_weighted_as_their_environment_is():
    with world(Duel, lambda *_: turn("x")) as (runner, tasks, _):
        context = runner.contexts["env"]
        runner.contexts["env"] = type(context)(  # type: ignore[index]
            **{name: getattr(context, name) for name in context.__slots__}
            | {"reward_weights": RewardWeights({"Duel": 0.5})}
        )
        assert runner.play(tasks, 1, GroupPolicy(num_generations=1)).groups


def test_without_a_rollout_parts_are_answered_and_not_kept():
    async def play_by_hand():
        async def policy(messages, *, max_tokens=None):
            return f"{messages[-1]['content']} {max_tokens}"

        with use_policy(policy):
            said = await play_part("black", [{"role": "user", "content": "hi"}], max_tokens=3)
            reward_part("black", 1.0)
            forget_part("black")
        with pytest.raises(EnvironmentFailure, match="play_part: no policy"):
            await play_part("black", [])
        return said

    assert asyncio.run(play_by_hand()) == "hi 3"
