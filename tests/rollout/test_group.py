from __future__ import annotations

import itertools
import logging
import os
import random
import signal
import threading

import pytest

from envgrad.environments.contract import StepResult
from envgrad.environments.tasks import hash63
from envgrad.errors import EnvironmentContractError, EnvironmentFailure, TooManyFailures
from envgrad.rollout.group import GroupPolicy
from helpers.world import Counter, call, play, play_one, turn, world


def fresh(base):
    """A subclass with its own counters of instances."""
    return type(base.__name__, (base,), {"opened": 0, "closed": 0})


def test_siblings_get_one_task_and_groups_different_ones():
    class Draws:
        def reset(self, seed, group_id):
            self.task = (seed, group_id)
            return f"Task {random.Random(seed).randrange(10**9)}"

        def get_reward(self):
            return float(self.task[0] % 1000)

    groups = play(Draws, [turn("x")], groups=3, siblings=4).groups
    openings = [{episode.messages[0]["content"] for episode in group.episodes} for group in groups]
    assert [len(opening) for opening in openings] == [1, 1, 1]
    assert len(set.union(*openings)) == 3
    assert all(len({episode.reward for episode in group.episodes}) == 1 for group in groups)
    assert all(group.start_mismatch is None for group in groups)


def test_an_environment_that_draws_by_itself_is_forked_so_that_siblings_share_the_hidden_word():
    class Hidden:
        def __init__(self):
            self.random = random.Random()

        def reset(self):
            self.word = self.random.randrange(10**9)
            return "Guess."

        def get_reward(self):
            return float(self.word)

    groups = play(Hidden, [turn("x")], groups=3, siblings=4).groups
    rewards = [{episode.reward for episode in group.episodes} for group in groups]
    assert [len(r) for r in rewards] == [1, 1, 1] and len(set.union(*rewards)) == 3
    assert all(group.start_mismatch is None for group in groups)


class SecretlyDifferent:
    """Cannot be forked (it has `close`) and draws its word from nothing shared."""

    def reset(self):
        self.word = random.SystemRandom().randrange(10**9)
        return "Guess."

    def get_reward(self):
        return 1.0

    def close(self):
        pass


def test_a_hidden_difference_is_named_once_and_is_an_error_if_required(caplog):
    with caplog.at_level(logging.WARNING):
        groups = play(SecretlyDifferent, [turn("x")], groups=3, siblings=2).groups
    assert all("word" in group.start_mismatch for group in groups)
    assert sum("start differently" in record.message for record in caplog.records) == 1
    with pytest.raises(EnvironmentContractError, match="word"):
        play(SecretlyDifferent, [turn("x")], siblings=2, consistency="require")
    assert play(SecretlyDifferent, [turn("x")], siblings=2, consistency="off").groups[0].start_mismatch is None


def test_groups_come_back_in_task_order_whatever_finishes_first():
    def latency(session):
        return 0.05 if session.order[0] == 0 else 0.0

    with world(Counter, [turn("x")], latency=latency) as (runner, tasks, _):
        groups = runner.play(tasks, 4, GroupPolicy(num_generations=2)).groups
    assert [group.task.position for group in groups] == [0, 1, 2, 3]
    assert [[episode.sibling for episode in group.episodes] for group in groups] == [[0, 1]] * 4


def test_a_slow_sibling_delays_nobody():
    def latency(session):
        return 0.4 if session.order[1] == 0 else 0.02

    with world(Counter, [turn(call("inc", n=1))] * 3 + [turn("x")], latency=latency) as (runner, tasks, sampler):
        runner.play(tasks, 1, GroupPolicy(num_generations=4))
        finished = [request.session.order[1] for request in sampler.requests if request.turn == 3]
    assert finished[-1] == 0


class Flaky(Counter):
    """Fails in ``inc`` until its class has seen ``failures`` of them."""

    failures = 1
    lock = threading.Lock()

    def inc(self, n: int) -> str:
        """Add.

        Args:
            n: How much.
        """
        with self.lock:
            if type(self).failures > 0:
                type(self).failures -= 1
                raise EnvironmentFailure("power cut")
        self.n += n
        return str(self.n)


def test_a_failed_episode_is_retried_on_a_fresh_instance_with_the_same_task():
    factory = fresh(Flaky)
    factory.failures = 1
    with world(factory, [turn(call("inc", n=3)), turn("x")]) as (runner, tasks, sampler):
        group = runner.play(tasks, 1, GroupPolicy(num_generations=2)).groups[0]
        keys = [request.session.key for request in sampler.requests]
        seeds = {request.session.key: request.params.seed for request in sampler.requests if request.turn == 0}
        assert sampler.open_sessions == frozenset()
    assert [episode.reward for episode in group.episodes] == [3.0, 3.0] and not group.failures
    retried = [key for key in keys if key.endswith("/1")]
    assert len(set(retried)) == 1 and len(set(seeds.values())) == 3, "the attempt enters the sampling seed"
    assert sorted(episode.attempt for episode in group.episodes) == [0, 1]
    assert factory.opened == 3 == factory.closed


def test_a_failure_is_never_reward_zero_and_the_group_goes_on_with_two_scored_siblings():
    factory = fresh(Flaky)
    factory.failures = 2
    played = play(factory, [turn(call("inc", n=3)), turn("x")], siblings=4, retries=0)
    group = played.groups[0]
    assert group.task.position == 0 and [episode.reward for episode in group.episodes] == [3.0, 3.0]
    assert played.failures == {"environment": 2}
    assert {failure.sibling for failure in group.failures}.isdisjoint({e.sibling for e in group.episodes})


def test_a_group_below_the_quorum_is_dropped_and_the_next_task_takes_its_place():
    factory = fresh(Flaky)
    factory.failures = 3
    with world(factory, [turn(call("inc", n=3)), turn("x")], max_groups=1) as (runner, tasks, _):
        played = runner.play(tasks, 2, GroupPolicy(num_generations=4, max_episode_retries=0))
        assert tasks.position == 3
    assert [group.task.position for group in played.groups] == [1, 2]
    assert [group.task.position for group in played.dropped] == [0]
    assert played.failures == {"environment": 3}


def test_too_many_dropped_groups_stop_the_run_with_the_cause():
    class Broken(Counter):
        def reset(self, seed):
            raise OSError("no disk")

    factory = fresh(Broken)
    with pytest.raises(TooManyFailures, match="3 groups in a row") as caught:
        play(factory, [turn("x")], groups=8, siblings=2, retries=1, max_consecutive_failed_groups=3)
    assert isinstance(caught.value.__cause__, EnvironmentFailure) and "no disk" in str(caught.value)
    assert factory.opened == factory.closed


def test_reset_and_reward_timeouts_are_failures_of_their_kind():
    import asyncio

    class SlowReset:
        async def reset(self, seed):
            await asyncio.sleep(3600)

        def get_reward(self):
            return 1.0

    class SlowReward:
        def reset(self, seed):
            return "go"

        async def get_reward(self):
            await asyncio.sleep(3600)

    for factory, kind in ((SlowReset, "reset_timeout"), (SlowReward, "reward_timeout")):
        with (
            world(factory, [turn("x")], max_consecutive_failed_groups=2, reset_timeout=0.05, reward_timeout=0.05) as (
                runner,
                tasks,
                _,
            ),
            pytest.raises(TooManyFailures) as caught,
        ):
            runner.play(tasks, 2, GroupPolicy(num_generations=2, max_episode_retries=0))
        assert caught.value.__cause__.kind == kind


def test_group_reward_scores_siblings_together_while_all_are_alive():
    class Rank(Counter):
        @classmethod
        def group_reward(cls, environments):
            assert cls.closed == 0
            best = max(environment.n for environment in environments)
            return [float(environment.n == best) for environment in environments]

        get_reward = None  # type: ignore[assignment]

    factory = fresh(Rank)
    script = {f"train/0/{i}/0": [turn(call("inc", n=i)), turn("x")] for i in range(3)}
    group = play(factory, script, siblings=3).groups[0]
    assert [episode.reward for episode in group.episodes] == [0.0, 0.0, 1.0]

    class Wrong(Rank):
        @classmethod
        def group_reward(cls, environments):
            return [1.0]

    with pytest.raises(TooManyFailures, match="1 rewards for 3"):
        play(fresh(Wrong), script, siblings=3, retries=0, max_consecutive_failed_groups=1)


def test_a_first_group_without_any_reward_is_an_error_that_says_so():
    class Unpaid:
        def reset(self, seed):
            return "go"

        def act(self) -> str:
            """Act."""
            return "x"

    with pytest.raises(EnvironmentContractError, match="get_reward"):
        play(Unpaid, [turn("x")], siblings=2)


@pytest.mark.parametrize("way_out", ["end", "error", "interrupt"])
def test_every_instance_is_closed_exactly_once_on_every_way_out(way_out):
    factory, asked = fresh(Counter), itertools.count()

    def script(prompt_ids, params, session):
        if way_out == "error" and session.order == (1, 1, 0):
            raise ZeroDivisionError("a bug of ours")
        if way_out == "interrupt" and next(asked) == 20:
            os.kill(os.getpid(), signal.SIGINT)
        return turn(call("inc", n=1)) if way_out == "interrupt" else turn("x")

    def run():
        with world(factory, script, latency=0.01) as (runner, tasks, _):
            runner.play(tasks, 3, GroupPolicy(num_generations=2))

    if way_out == "end":
        run()
    elif way_out == "error":
        with pytest.raises(ZeroDivisionError):
            run()
    else:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it may be ignored
        try:
            with pytest.raises(KeyboardInterrupt):
                run()
        finally:
            signal.signal(signal.SIGINT, before)
    assert factory.opened == factory.closed > 0


def test_whole_groups_are_admitted_under_a_bound_on_concurrency():
    alive, peak, lock = [0], [0], threading.Lock()

    class Busy:
        def reset(self, seed):
            with lock:
                alive[0] += 1
                peak[0] = max(peak[0], alive[0])
            return "go"

        def get_reward(self):
            with lock:
                alive[0] -= 1
            return 1.0

    with world(Busy, [turn("x")], max_groups=2, latency=0.01) as (runner, tasks, _):
        groups = runner.play(tasks, 8, GroupPolicy(num_generations=3)).groups
    assert len(groups) == 8 and peak[0] <= 6


def test_group_ids_are_hashes_with_63_bits():
    groups = play(Counter, [turn("x")], groups=2, siblings=2).groups
    for group in groups:
        assert 2 < group.task.group_id < 2**63
        assert group.task.seed == hash63("seed", group.task.group_id)


@pytest.mark.parametrize("member", ["fork", "start_state"])
def test_a_failure_in_what_siblings_share_drops_the_group_and_not_the_run(member):
    class Shaky(Counter):
        broken = {"fork": 3, "start_state": 6}[member]

        def shaky(self):
            type(self).broken -= 1
            if type(self).broken >= 0:
                raise OSError("not today")

    class Forks(Shaky):
        def reset(self):
            self.n = 0
            return "Count."

        def fork(self):
            self.shaky()
            return Forks()

    class Pictured(Shaky):
        def start_state(self):
            self.shaky()
            return self.n

    factory = {"fork": Forks, "start_state": Pictured}[member]
    played = play(factory, [turn("x")], siblings=2)
    assert len(played.groups) == 1 and played.dropped
    assert {failure.kind for group in played.dropped for failure in group.failures} == {"environment"}


class Numbered(Counter):
    """Knows how many of its kind were made before it; subclass it in each test."""

    made = 0

    def __init__(self):
        self.number, type(self).made = type(self).made, type(self).made + 1

    def reset(self, seed):
        self.n = 0
        return "Count."


@pytest.mark.parametrize("dying", [[0], [1], [0, 1, 2], [0, 1, 2, 3, 5]])
def test_an_instance_that_dies_when_its_start_is_looked_at_costs_nobody_else(dying):
    """Numbers of instances, in the order in which they were made."""

    class Mortal(Counter):
        made, resets = 0, 0

        def __init__(self):
            self.number, Mortal.made = Mortal.made, Mortal.made + 1

        def reset(self, seed):
            Mortal.resets += 1
            self.n = 0
            return "Count."

        def start_state(self):
            if self.number in dying:
                raise EnvironmentFailure("gone")
            return self.n

        def get_reward(self):
            return 1.0 if self.number not in dying else 9.0

    (group,) = play(Mortal, [turn("x")], siblings=3).groups
    assert [episode.reward for episode in group.episodes] == [1.0] * 3 and group.start_mismatch is None
    assert group.faults == {"environment": len(dying)} and Mortal.resets == 3 + len(dying)


def test_tries_to_tell_a_start_are_each_siblings_own():
    """Instances 0, then 3, then 4 fail: three failures of three siblings, none of which failed twice."""

    class Mortal(Numbered):
        asked = []

        def start_state(self):
            Mortal.asked.append(self.number)
            if self.number in (0, 3, 4):
                raise EnvironmentFailure("gone")
            return self.n

    (group,) = play(Mortal, [turn("x")], siblings=3, retries=3).groups
    assert len(group.episodes) == 3 and group.faults == {"environment": 3}
    assert Mortal.asked == [0, 1, 2, 3, 4, 5], "nobody is asked twice"


def test_a_sibling_whose_start_cannot_be_told_is_lost_alone():
    class Mortal(Numbered):
        def start_state(self):
            if not self.number:
                raise EnvironmentFailure("gone")
            return self.n

    (group,) = play(Mortal, [turn("x")], siblings=3, retries=0).groups
    assert [episode.sibling for episode in group.episodes] == [1, 2] and Mortal.made == 3
    assert [(failure.sibling, failure.attempts) for failure in group.failures] == [(0, 1)]


def test_a_start_that_takes_too_long_to_tell_costs_nobody_else():
    class Hangs(Numbered):
        asked = []
        going = threading.Event()

        def start_state(self):
            Hangs.asked.append(self.number)
            if self.number == 1:
                Hangs.going.wait(20)
            if self.number == 2:
                raise SystemExit("as a simulator does")
            return self.n

    (group,) = play(Hangs, [turn("x")], siblings=4, reset_timeout=1.5).groups
    Hangs.going.set()
    assert len(group.episodes) == 4 and group.faults == {"reset_timeout": 1, "environment": 1}
    assert Hangs.asked == [0, 1, 2, 3, 4, 5]


def test_starts_that_nobody_can_tell_are_not_waited_for_one_by_one():
    class Hangs(Numbered):
        asked = []
        going = threading.Event()

        def start_state(self):
            Hangs.asked.append(self.number)
            if self.number < 2:
                Hangs.going.wait(20)
            return self.n

    (group,) = play(Hangs, [turn("x")], siblings=5, reset_timeout=1.5).groups
    Hangs.going.set()
    assert len(group.episodes) == 5 and group.faults == {"reset_timeout": 5}
    assert Hangs.asked == [0, 1, 5, 6, 7, 8, 9]


def test_instances_whose_common_reward_failed_are_not_played_again():
    class Shared(Counter):
        made = 0

        def __init__(self):
            Shared.made += 1

        def reset(self, seed):
            self.n = 0
            return "Count."

        @classmethod
        def group_reward(cls, environments):
            if Shared.made <= 4:  # two groups
                raise EnvironmentFailure("the judge fell asleep")
            return [1.0 for _ in environments]

    played = play(Shared, [turn("x")], siblings=2)
    assert len(played.groups) == 1 and len(played.dropped) == 2 and Shared.made == 6


def test_a_fork_that_dies_before_others_are_forked_from_it_is_replaced():
    class Mortal(Counter):
        made = 0

        def __init__(self):
            self.number, Mortal.made = Mortal.made, Mortal.made + 1

        def reset(self):
            self.n = 7
            return "Count."

        def fork(self):
            if self.number == 1:
                raise EnvironmentFailure("gone")
            forked = Mortal()
            forked.n = self.n
            return forked

        def get_reward(self):
            return float(self.n)

    (group,) = play(Mortal, [turn("x")], siblings=3).groups
    assert [episode.reward for episode in group.episodes] == [7.0] * 3 and group.faults == {"environment": 1}


def test_a_fork_that_fails_for_a_while_costs_no_sibling_that_has_started():
    class Busy(Counter):
        forks = 0

        def reset(self):
            self.n = 7
            return "Count."

        def fork(self):
            Busy.forks += 1
            if Busy.forks in (3, 4):  # the pristine one, sibling 1; then sibling 2, and what should replace its source
                raise EnvironmentFailure("no snapshot now")
            if Busy.forks == 6:
                return None
            forked = Busy()
            forked.n = self.n
            return forked

        def get_reward(self):
            return float(self.n)

    (group,) = play(Busy, [turn("x")], siblings=4).groups
    assert [episode.reward for episode in group.episodes] == [7.0] * 4 and group.faults == {"environment": 3}


def test_an_instance_that_dies_when_it_is_forked_is_started_again():
    class Mortal(Counter):
        made = 0

        def __init__(self):
            self.number, Mortal.made = Mortal.made, Mortal.made + 1

        def reset(self):
            self.n = self.number
            return f"Count from {self.n}."

        def fork(self):
            if not self.number:
                raise EnvironmentFailure("gone")
            forked = Mortal()
            forked.n = self.n
            return forked

        def get_reward(self):
            return float(self.n)

    (group,) = play(Mortal, [turn("x")], siblings=3).groups
    assert [episode.reward for episode in group.episodes] == [1.0] * 3 and group.faults == {"environment": 1}
    assert {episode.messages[0]["content"] for episode in group.episodes} == {"Count from 1."}


def test_a_first_reset_that_fails_is_retried_before_its_siblings_copy_it():
    class Flaky:
        resets = 0

        def reset(self):
            type(self).resets += 1
            if self.resets == 1:
                raise OSError("once")
            self.n = self.resets
            return f"Count from {self.n}."

        def get_reward(self):
            return float(self.n)

    played = play(Flaky, [turn("x")], siblings=3)
    assert Flaky.resets == 2 and played.groups[0].start_mismatch is None
    assert len({episode.messages[0]["content"] for episode in played.groups[0].episodes}) == 1


def test_components_that_bear_the_name_of_turn_rewards_are_added_to_them():
    class Paid:
        def reset(self, seed):
            return "Go."

        def step(self, message):
            return StepResult("ok", reward=1.0, done=True)

        def get_reward(self):
            return {"turns": 0.5}

    episode = play_one(Paid, [turn("x")])
    assert episode.reward == 1.5 and dict(episode.rewards) == {"turns": 1.5}


def test_a_group_reward_does_not_score_an_episode_that_its_environment_calls_unscorable():
    class Judged:
        def reset(self, seed):
            return "Go."

        def get_reward(self):
            return None

        @classmethod
        def group_reward(cls, environments):
            return [1.0 for _ in environments]

    with pytest.raises(TooManyFailures, match="get_reward returned None"):
        play(Judged, [turn("x")], siblings=2, max_consecutive_failed_groups=2)


def test_a_single_episode_without_reward_is_no_sign_of_an_environment_without_one():
    class Sparse:
        def reset(self, seed):
            return "Go."

        def step(self, message):
            return StepResult("ok", done=True)

    assert play_one(Sparse, [turn("x")]).reward == 0
