"""One start per group, for environments that know nothing of groups."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from dataclasses import replace

import numpy as np
import pytest

from envgrad.environments import swapping
from envgrad.environments.generator_lock import GeneratorLock
from envgrad.environments.isolation import Isolation
from envgrad.environments.tasks import hash63
from envgrad.errors import EnvironmentContractError, EnvironmentFailure
from envgrad.rollout.group import GroupPolicy
from helpers.world import call, turn, world

WORDS = 10**9


class Secret:
    """Its opening always reads the same; its reward tells the hidden word."""

    word = 0

    def get_reward(self):
        return float(self.word)


class DrawsFromPython(Secret):
    def reset(self):
        self.word = random.randrange(WORDS)
        return "Guess."


class DrawsFromNumpyAndCloses(Secret):
    def reset(self):
        self.word = int(np.random.randint(WORDS))
        return "Guess."

    def close(self):
        pass


class DrawsFromPythonAndCloses(DrawsFromPython):
    def close(self):
        pass


class OwnGenerator(Secret):
    def __init__(self):
        self.random = random.Random()

    def reset(self):
        self.word = self.random.randrange(WORDS)
        return "Guess."


class AsyncAndCloses(Secret):
    async def reset(self):
        self.word = random.randrange(WORDS // 1000) * 1000
        await asyncio.sleep(0)
        self.word += int(np.random.randint(1000))
        return "Guess."

    async def close(self):
        pass


class BornAndCloses(Secret):
    """Draws when it is built, and keeps that through its resets."""

    def __init__(self):
        self.word = random.randrange(WORDS)

    def reset(self):
        return "Guess."

    def close(self):
        pass


class Seeds(Secret):
    """Seeds the global generator by the group's seed and draws from it later: right only if nobody draws between."""

    def reset(self, seed):
        random.seed(seed)
        self.word = random.randrange(WORDS)
        return "Guess."

    def roll(self) -> str:
        """Roll."""
        return str(random.randrange(WORDS))


def played(factory, groups, siblings, script=None, *, policy=None, isolate="auto", **options):
    with world(factory, script or [turn("x")], **options) as (runner, tasks, _):
        set_mode(runner, isolate)
        policy = policy or GroupPolicy(num_generations=siblings)
        return runner.play(tasks, groups, replace(policy, num_generations=siblings)).groups


def set_mode(runner, mode):
    runner.contexts = {name: replace(context, isolation=Isolation(mode)) for name, context in runner.contexts.items()}


def hidden_words(groups):
    return [{episode.reward for episode in group.episodes} for group in groups]


def process_state():
    return random.getstate(), str(np.random.get_state())


@pytest.mark.parametrize(
    ("factory", "groups"),
    [
        (DrawsFromPython, 1000),
        (DrawsFromNumpyAndCloses, 1000),
        (OwnGenerator, 1000),
        (DrawsFromPythonAndCloses, 200),
        (AsyncAndCloses, 200),
        (BornAndCloses, 100),
    ],
)
def test_siblings_share_a_hidden_word_that_the_environment_draws_by_itself(factory, groups):
    before = process_state()
    found = played(factory, groups, 2)
    words = hidden_words(found)
    assert sum(group.start_mismatch is not None for group in found) == 0
    assert len(words) == groups and all(len(word) == 1 for word in words)
    assert len(set.union(*words)) == groups, "each group has a word of its own"
    assert process_state() == before


def test_instances_that_draw_when_they_are_built_are_new_for_each_start_and_each_is_closed():
    class Counted(BornAndCloses):
        built = closed = 0

        def __init__(self):
            super().__init__()
            type(self).built += 1

        def close(self):
            type(self).closed += 1

    played(Counted, 5, 2)
    assert Counted.built == Counted.closed == 11, "one to look at, and ten to play"


def test_a_factory_that_draws_in_its_first_call_only_is_left_alone():
    class Imports(OwnGenerator):
        built = 0

        def __init__(self):
            super().__init__()
            if not Imports.built:
                random.random()  # as an import may
            Imports.built += 1

        def close(self):
            pass

        def reset(self, seed):
            self.word = seed % WORDS
            return "Guess."

    with world(Imports, [turn("x")]) as (runner, tasks, _):
        runner.play(tasks, 4, GroupPolicy(num_generations=2, max_groups=1))
        isolation = runner.contexts["env"].isolation
    assert isolation.settled and not isolation.active and not isolation.draws_at_birth
    assert Imports.built == 3, "the first was replaced; two were played again and again"


def test_a_start_that_loads_a_library_is_made_again_since_nobody_saw_what_it_drew(monkeypatch):
    loaded = iter([{"random"}])
    monkeypatch.setattr(
        "envgrad.rollout.starting.loaded_generators", lambda: frozenset(next(loaded, {"random", "numpy"}))
    )

    class Counted(DrawsFromNumpyAndCloses):
        closed = []

        def close(self):
            type(self).closed.append(self.word)

    groups = played(Counted, 1, 3)
    assert len(Counted.closed) == 4 and len(hidden_words(groups)[0]) == 1 and groups[0].start_mismatch is None


def test_without_isolation_the_same_environment_starts_apart():
    groups = played(DrawsFromPythonAndCloses, 3, 4, isolate="off")
    assert all("word" in group.start_mismatch for group in groups)
    assert all(len(words) == 4 for words in hidden_words(groups))


def test_environments_that_do_not_draw_are_never_swapped_after_their_first_start(monkeypatch):
    swapped = []
    original = swapping.swapped_call
    monkeypatch.setattr(
        "envgrad.environments.boundary.swapped_call", lambda *args: swapped.append(args[0]) or original(*args)
    )
    played(OwnGenerator, 3, 2)
    assert swapped == ["env.reset"]


def test_a_group_keeps_its_word_after_a_resume_and_the_clock_does_not_matter():
    whole = hidden_words(played(DrawsFromPythonAndCloses, 6, 4))
    assert [len(words) for words in whole] == [1] * 6 and len(set.union(*whole)) == 6
    random.seed(123)  # whatever the process has drawn meanwhile
    with world(DrawsFromPythonAndCloses, [turn("x")]) as (runner, tasks, _):
        first = hidden_words(runner.play(tasks, 3, GroupPolicy(num_generations=4)).groups)
        state = tasks.state_dict()
    with world(DrawsFromPythonAndCloses, [turn("x")]) as (runner, tasks, _):
        tasks.load_state_dict(state)
        rest = hidden_words(runner.play(tasks, 3, GroupPolicy(num_generations=4)).groups)
    assert first + rest == whole


def rolls(groups):
    return {
        (group.task.environment, group.task.position, episode.sibling): [
            message["content"] for message in episode.messages if message["role"] == "tool"
        ]
        for group in groups
        for episode in group.episodes
    }


def test_interleaved_episodes_roll_what_they_roll_alone():
    class AsyncSeeds(Seeds):
        async def roll(self) -> str:
            """Roll."""
            first = random.randrange(WORDS)
            await asyncio.sleep(0.001)
            return f"{first} {random.randrange(WORDS)}"

    script = [turn(call("roll"))] * 4 + [turn("x")]
    factories = {"sync": Seeds, "async": AsyncSeeds}
    before = process_state()
    alone = rolls(played(factories, 6, 3, script, max_groups=1))
    together = rolls(played(factories, 6, 3, script, latency=lambda session: 0.001 * (session.order[1] + 1)))
    assert alone == together and all(len(set(found)) == 4 for found in alone.values())
    assert len(alone) == 18
    assert process_state() == before


def test_whoever_draws_from_one_generator_has_a_stream_of_the_other_too():
    class Mixed(DrawsFromPythonAndCloses):
        """Its start draws from Python's generator, its tool from numpy's."""

        def roll(self) -> str:
            """Roll."""
            return str(np.random.randint(WORDS))

    script = [turn(call("roll"))] * 2 + [turn("x")]
    before = process_state()
    found = rolls(played(Mixed, 3, 3, script))
    assert process_state() == before
    assert all(found["env", group, sibling] == found["env", group, 0] for group in range(3) for sibling in range(3))
    np.random.seed(1)  # whatever the process has drawn meanwhile
    assert rolls(played(Mixed, 3, 3, script)) == found


def test_a_retry_and_its_siblings_begin_with_the_same_numbers():
    class Fails(DrawsFromPythonAndCloses):
        failed = 0

        def roll(self) -> str:
            """Roll."""
            rolled = random.randrange(WORDS)
            if not Fails.failed:
                Fails.failed = 1
                raise EnvironmentFailure("power cut")
            return str(rolled)

    groups = played(Fails, 1, 3, [turn(call("roll")), turn("x")])
    assert sorted(episode.attempt for episode in groups[0].episodes) == [0, 0, 1]
    assert len(hidden_words(groups)[0]) == 1 and len({tuple(found) for found in rolls(groups).values()}) == 1


@pytest.mark.parametrize("failures", [0, 1])
def test_forks_copy_the_stream_where_fork_itself_draws_too(failures):
    class Forks(DrawsFromPython):
        left = failures

        def __init__(self):
            self.mark = None

        def fork(self):
            forked = Forks()
            forked.word = self.word
            random.random()
            return forked

        def roll(self) -> str:
            """Roll."""
            if type(self).left:
                type(self).left -= 1
                raise EnvironmentFailure("power cut")
            return str(random.randrange(WORDS))

    groups = played(Forks, 1, 4, [turn(call("roll")), turn("x")])
    found = rolls(groups)
    forked = {tuple(found[key]) for key in found if key[2] > 0}
    assert len(found) == 4 and len(hidden_words(groups)[0]) == 1
    if not failures:
        assert len(forked) == 1


def test_a_stream_that_stands_elsewhere_is_a_start_that_differs():
    class Lazy(Secret):
        """Draws more in the first reset of the class; nothing of it is kept."""

        loaded = False

        def reset(self):
            random.random()
            if not Lazy.loaded:
                Lazy.loaded = True
                random.random()
            return "Go."

        def close(self):
            pass

    groups = played(Lazy, 2, 2)
    assert groups[0].start_mismatch == "the global generator of random: the siblings have drawn differently from it"
    assert groups[1].start_mismatch is None


class SecretlyDifferent(Secret):
    def reset(self):
        self.word = random.SystemRandom().randrange(WORDS)
        return "Guess."

    def close(self):
        pass


def test_a_secret_difference_is_named_and_if_required_stops_the_run_before_a_token_is_sampled(caplog):
    with caplog.at_level(logging.WARNING):
        groups = played(SecretlyDifferent, 2, 2)
    first, other = sorted(hidden_words(groups)[0])
    assert {f"{first:.0f}", f"{other:.0f}"} == set(groups[0].start_mismatch.removeprefix("word: ").split(" != "))
    assert sum("siblings of one group of env start differently: word: " in r.message for r in caplog.records) == 1
    with world(SecretlyDifferent, [turn("x")]) as (runner, tasks, sampler):
        with pytest.raises(EnvironmentContractError, match=r"env start differently: word: \d+ != \d+"):
            runner.play(tasks, 4, GroupPolicy(num_generations=2, group_consistency="require"))
        assert len(sampler.requests) == 0


def test_start_states_of_isolated_siblings_are_read_on_copies_of_their_streams():
    class Tells(DrawsFromPythonAndCloses):
        def start_state(self):
            return {"word": self.word, "noise": random.random()}

        def roll(self) -> str:
            """Roll."""
            return str(random.random())

    groups = played(Tells, 3, 3, [turn(call("roll")), turn("x")])
    assert all(group.start_mismatch is None for group in groups)
    off = rolls(played(Tells, 3, 3, [turn(call("roll")), turn("x")], policy=unchecked()))
    assert rolls(groups) == off, "looking at a start does not change the episode"


def unchecked():
    return GroupPolicy(num_generations=1, group_consistency="off")


def test_group_rewards_draw_from_the_groups_own_stream():
    class Judged(DrawsFromPythonAndCloses):
        @classmethod
        def group_reward(cls, environments):
            return [random.random() for _ in environments]

        get_reward = None

    first, again = (hidden_words(played(Judged, 3, 2)) for _ in range(2))
    assert first == again and len(set.union(*first)) == 6


def test_a_first_start_that_fails_leaves_the_question_open():
    class Late(DrawsFromPythonAndCloses):
        resets = 0

        def reset(self):
            type(self).resets += 1
            if type(self).resets == 1:
                raise OSError("once")
            return super().reset()

    groups = played(Late, 4, 3)
    assert all(len(words) == 1 for words in hidden_words(groups)[1:])
    assert all(group.start_mismatch is None for group in groups[1:])


def test_a_hung_tool_of_an_isolated_environment_fails_others_by_name_until_it_returns(monkeypatch):
    monkeypatch.setattr(swapping, "GENERATORS", GeneratorLock(grace=0.05))
    blocker, hang = threading.Event(), [True]

    class Hangs(DrawsFromPythonAndCloses):
        def act(self) -> str:
            """Act."""
            if hang:
                hang.pop()
                blocker.wait(30)
            return "ok"

    def release(group):
        if group.failures:
            blocker.set()

    options = {"tool_timeout": 0.1, "max_consecutive_failed_groups": 1000}
    with world(Hangs, [turn(call("act")), turn("x")], **options) as (runner, tasks, _):
        runner.on_group = release
        policy = GroupPolicy(num_generations=2, max_episode_retries=0)
        played_round = runner.play(tasks, 2, policy)
    errors = [str(failure.error) for group in played_round.dropped for failure in group.failures]
    assert errors and all("env.act ran past its timeout" in error for error in errors)
    assert len(played_round.groups) == 2


def test_seeds_are_63_bit_hashes_that_games_do_not_mistake():
    seeds = {hash63("seed", hash63(0, "train", "env", position)) for position in range(20_000)}
    assert len(seeds) == 20_000 and min(seeds) > 2 and max(seeds) < 2**63
    assert max(seeds) > 2**62 and min(abs(a - b) for a, b in zip(sorted(seeds), sorted(seeds)[1:], strict=False)) > 2
