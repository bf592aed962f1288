"""An environment asks the policy that is being rolled out."""

from __future__ import annotations

import pytest

from envgrad import StopReason
from envgrad.environments.policy import ask_policy
from envgrad.errors import TooManyFailures
from envgrad.rollout.group import GroupPolicy
from helpers.world import LIMITS, play, turn, world


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
