"""Groups in flight beside a trainer: what is started, waited for, given up, and told of; with rollouts of its own."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter

import pytest

from envgrad.environments.contract import inspect_environment
from envgrad.environments.tasks import build_task_stream
from envgrad.errors import TooManyFailures
from envgrad.rollout.activity import Activity
from envgrad.rollout.group import GroupPolicy
from envgrad.rollout.loop import RolloutLoop
from envgrad.rollout.runner import DynamicSampling
from envgrad.training.phases import Laps
from envgrad.training.producer import BufferedRounds
from envgrad.training.rounds import InlineRounds, RoundPlan, RoundsState
from envgrad.types import Episode, Group, StopReason


class Endless:
    def reset(self, seed):
        return "Go."

    def get_reward(self):
        return 1.0


class Rows(list):
    """A dataset of prompts."""


def stream_of(length=None):
    if length is None:
        return build_task_stream({"e": inspect_environment("e", Endless)[0]}, seed=0, split="train")
    rows = Rows({"prompt": f"p{number}"} for number in range(length))
    return build_task_stream({}, seed=0, split="train", dataset=rows)


class FakeRunner:
    """Plays a group in a random time, of the version that is served when it begins (and when it ends)."""

    def __init__(self, *, failures=0.0, longest=0.003, seed=0, at_end=None):
        self.loop = RolloutLoop()
        self.activity = Activity()
        self.max_groups = 64
        self.version = -1
        self.played: list[int] = []
        self.running = self.most_running = 0
        self.quick = 0
        """those that run and end by themselves"""
        self.cancelled = 0
        self._dice, self._failures, self._longest = random.Random(seed), failures, longest
        self._at_end = at_end or (lambda task: None)

    async def play_group(self, task, policy):
        self.played.append(task.position)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        first, quick = self.version, self._longest < 1.0
        self.quick += quick
        try:
            await asyncio.sleep(self._dice.random() * self._longest)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
            self.quick -= quick
        self._at_end(task)
        reward = float(self._dice.random() < 0.5)
        episodes = tuple(
            Episode(
                task=task, sibling=number, token_ids=(5, 6, 7), mask=(0, 1, 1), logprobs=(0.0, -1.0, -1.0),
                versions=(-1, first, self.version), prompt_length=1, messages=(), turns=(),
                stop_reason=StopReason.ANSWER, reward=reward * number,
            )
            for number in range(2)
        )  # fmt: skip
        return Group(task=task, episodes=episodes)

    def is_of_use(self, group, policy):
        return self._dice.random() >= self._failures


def rounds_of(runner, tasks, *, groups=3, staleness=1, inflight=True, left=None, limit=None, dynamic=None, most=None):
    versions = iter(range(0, 10_000, 2))

    def publish():
        runner.version = next(versions)
        return runner.version

    plan = RoundPlan(
        tasks=tasks, runner=runner, policy=GroupPolicy(num_generations=2, max_groups=most), groups=groups,
        publish=publish, group_limit=limit, dynamic=dynamic,
    )  # fmt: skip
    return BufferedRounds(plan, max_staleness=staleness, inflight=inflight, rounds_left=lambda: left)


@pytest.fixture
def closing():
    made = []
    yield made.append
    for rounds, runner in made:
        rounds.close()
        runner.loop.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "envgrad-rollouts"]


@pytest.mark.parametrize("inflight", [True, False])
@pytest.mark.parametrize("staleness", [1, 3])
def test_every_drawn_task_is_trained_once_or_dropped_with_its_reason(closing, staleness, inflight):
    runner, tasks = FakeRunner(failures=0.2), stream_of()
    rounds = rounds_of(runner, tasks, staleness=staleness, inflight=inflight, left=40)
    closing((rounds, runner))
    fate = Counter()
    for number in range(40):
        played = rounds.next(Laps())
        if number % 7 == 0:
            time.sleep(0.004)  # a long step
        assert len(played.groups) == 3
        fate.update(group.task.position for group in (*played.groups, *played.dropped, *played.stale))
        oldest = min(version for group in played.groups for one in group.episodes for version in one.versions[1:])
        assert runner.version - oldest <= 2 * staleness
        assert rounds.metrics["async/staleness_max"] <= staleness and not played.stale
        assert rounds.metrics["async/buffer_size"] + rounds.metrics["async/in_flight"] <= staleness * 3
    assert set(fate.values()) == {1} and set(fate) == set(runner.played), "none beyond the run's end"
    assert sum(fate.values()) == tasks.position and rounds.unused == 0
    if not inflight:
        spans = [set(one.versions[1:]) for group in played.groups for one in group.episodes]
        assert all(len(span) == 1 for span in spans)


def test_an_end_of_data_ends_the_run_with_a_short_round(closing):
    runner, tasks = FakeRunner(failures=0.3), stream_of(4)
    rounds = rounds_of(runner, tasks, limit=10)
    closing((rounds, runner))
    taken, dropped = [], []
    while (played := rounds.next(Laps())).groups:
        taken += [group.task.position for group in played.groups]
        dropped += [group.task.position for group in played.dropped]
    assert sorted(taken + dropped + [group.task.position for group in played.dropped]) == list(range(10))
    assert len(runner.played) == 10 and tasks.passes == 2.5


def test_concurrency_is_bounded(closing):
    runner = FakeRunner()
    rounds = rounds_of(runner, stream_of(), staleness=4, most=2)
    closing((rounds, runner))
    for _ in range(5):
        rounds.next(Laps())
    assert runner.most_running == 2


def test_a_synchronous_run_draws_again_what_was_in_flight_or_waited(closing):
    runner, tasks = FakeRunner(), stream_of(50)
    rounds = rounds_of(runner, tasks, staleness=2)
    closing((rounds, runner))
    done = [group.task for _ in range(4) for group in rounds.next(Laps()).groups]
    rounds.keep()
    state, unused = rounds.state().drawn_again(), rounds.unused
    assert unused > 0
    resumed = stream_of(50)
    resumed.load_state_dict(state)
    whole = stream_of(50)
    assert resumed.position == len(done)
    again = resumed.take(30)
    expected = {task.position: task for task in whole.take(60)}
    seen = [*done, *again]
    assert len({task.position for task in seen}) == len(seen) == 42
    assert all(expected[task.position] == task for task in seen), "the same tasks, rows and seeds included"
    assert max(task.position for task in seen) == 41, "and none is left out"


def test_a_resumed_stream_can_be_saved_before_it_is_drawn_from(closing):
    tasks = stream_of(50)
    drawn = [tasks.draw() for _ in range(6)]
    state = tasks.state_dict([drawn[2][1], drawn[4][1]])
    first = stream_of(50)
    first.load_state_dict(state)
    assert first.state_dict() == state and first.position == 4
    second = stream_of(50)
    second.load_state_dict(first.state_dict())
    assert [task.position for task in second.take(3)] == [2, 4, 6]
    runner = FakeRunner()
    rounds = rounds_of(runner, first)
    closing((rounds, runner))
    inline = InlineRounds(rounds._plan)
    assert inline.state() == rounds.state() == RoundsState(tasks=state) and inline.unused == rounds.unused == 0


def test_the_error_of_a_group_is_raised_where_the_trainer_waits(closing):
    def fail(task):
        if task.position == 7:
            raise ZeroDivisionError("on the eighth")

    runner = FakeRunner(at_end=fail)
    rounds = rounds_of(runner, stream_of())
    closing((rounds, runner))
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="on the eighth"):
        for _ in range(20):
            rounds.next(Laps())
    assert time.monotonic() - began < 20 and runner.running == 0, "the others are cancelled"
    with pytest.raises(ZeroDivisionError):
        rounds.next(Laps())


def test_an_error_of_the_runner_or_the_tasks_ends_it_too(closing):
    class Stops(FakeRunner):
        def is_of_use(self, group, policy):
            raise TooManyFailures("16 in a row")

    runner = Stops()
    rounds = rounds_of(runner, stream_of())
    closing((rounds, runner))
    with pytest.raises(TooManyFailures, match="16 in a row"):
        rounds.next(Laps())


def test_a_system_exit_in_a_group_ends_the_wait(closing):
    def leave(task):
        raise SystemExit(3)

    runner = FakeRunner(at_end=leave)
    rounds = rounds_of(runner, stream_of())
    closing((rounds, runner))
    began = time.monotonic()
    with pytest.raises(SystemExit):
        rounds.next(Laps())
    assert time.monotonic() - began < 10


def test_closing_cancels_what_is_in_play(closing):
    runner = FakeRunner(longest=0.002)
    rounds = rounds_of(runner, stream_of(), staleness=2)
    closing((rounds, runner))
    rounds.next(Laps())
    runner._longest = 1000.0
    rounds.next(Laps())
    while runner.quick or runner.running < 3:
        time.sleep(0.005)
    running, unused = runner.running, rounds.unused
    rounds.close()
    rounds.close()
    assert runner.running == 0 and runner.cancelled == running > 0
    assert rounds.unused == unused >= running, "it is still to be drawn again"


def test_groups_that_teach_nothing_are_replaced_within_bounds(closing):
    def decides(group):
        return group.task.position % 3 == 0

    runner = FakeRunner()
    dynamic = DynamicSampling(teaches=decides, max_rounds=5)
    rounds = rounds_of(runner, stream_of(), dynamic=dynamic)
    closing((rounds, runner))
    for _ in range(6):
        played = rounds.next(Laps())
        assert played.dynamic and played.unteaching == 0 and all(decides(group) for group in played.groups)
        assert not any(decides(group) for group in played.filtered)
        assert len(played.scored) == len(played.groups) + len(played.filtered)


def test_where_nothing_teaches_a_round_is_filled_all_the_same(closing):
    runner = FakeRunner()
    dynamic = DynamicSampling(teaches=lambda group: False, max_rounds=2)
    rounds = rounds_of(runner, stream_of(), dynamic=dynamic)
    closing((rounds, runner))
    for _ in range(3):
        played = rounds.next(Laps())
        assert played.unteaching == 3 and len(played.filtered) <= 6
