"""The buffer's promises, over many random runs of it: none too old, none twice, none lost, never too many."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envgrad.errors import ConfigurationError
from envgrad.training.buffer import GroupBuffer
from envgrad.types import Episode, EpisodeRow, Group, StopReason, Task


def group_of(position: int, versions: tuple[int, ...] = (0,)) -> Group:
    task = Task(position=position, split="train", environment="e", group_id=3, seed=4)
    tokens = (5, *range(6, 6 + len(versions)))
    episode = Episode(
        task=task, sibling=0, token_ids=tokens, mask=(0, *[1] * len(versions)), logprobs=(0.0,) * len(tokens),
        versions=(-1, *versions), prompt_length=1, messages=(), turns=(), stop_reason=StopReason.ANSWER, reward=1.0,
    )  # fmt: skip
    return Group(task=task, episodes=(episode,))


class World:
    """Rollouts and a trainer around a buffer, driven by dice; keeps its own account of everything."""

    def __init__(self, seed: int, *, count: int, staleness: int, lag: float, failures: float, inflight: bool) -> None:
        self.dice = random.Random(seed)
        self.buffer = GroupBuffer(groups_per_round=count, max_staleness=staleness)
        self.count, self.staleness, self.lag, self.failures, self.inflight = count, staleness, lag, failures, inflight
        self.published: list[int] = []
        self.playing: dict[int, tuple] = {}  # position -> place, versions sampled so far, steps left
        self.fate: Counter[int] = Counter()
        self.trained: list[int] = []
        self.lost: dict[str, list[int]] = {"failed": [], "stale": []}
        self.started = self.rounds = 0

    def publish(self) -> None:
        self.published.append((self.published[-1] if self.published else -1) + self.dice.randint(1, 3))
        self.lost["stale"] += [group.task.position for group in self.buffer.publish(self.published[-1])]

    def served(self) -> int:
        """The version that samples now; a server may lag behind."""
        lag = self.dice.randint(1, 3) if self.dice.random() < self.lag else 0
        return self.published[max(0, len(self.published) - 1 - lag)]

    def start(self, most: int) -> None:
        for _ in range(min(self.buffer.room, most)):
            position, self.started = self.started, self.started + 1
            long = self.dice.random() < 0.05
            self.playing[position] = (self.buffer.admit(), [self.served()], self.dice.randint(0, 40 if long else 4))

    def play(self) -> None:
        """Each group in play samples a token or ends."""
        for position, (place, versions, left) in list(self.playing.items()):
            if left:
                self.playing[position] = (place, [*versions, self.served()], left - 1)
                continue
            del self.playing[position]
            if self.dice.random() < self.failures:
                self.buffer.give_up(place)
                self.lost["failed"].append(position)
            elif not self.buffer.put(place, group_of(position, tuple(versions))):
                self.lost["stale"].append(position)

    def train(self) -> None:
        taken = self.buffer.take()
        assert len(taken) == self.count
        self.rounds += 1
        assert len(self.published) == self.rounds
        for one in taken:
            oldest = min(version for version in one.group.episodes[0].versions if version >= 0)
            assert sum(version > oldest for version in self.published) <= self.staleness, "too old"
        positions = [one.group.task.position for one in taken]
        assert positions == sorted(positions)
        self.trained += positions

    def check(self) -> None:
        buffer = self.buffer
        assert buffer.playing == len(self.playing)
        assert buffer.playing + buffer.waiting <= (self.staleness + 1) * self.count, "the buffer is bounded"

    def run(self, groups: int) -> None:
        self.publish()
        for _ in range(200 * groups):
            if len(self.trained) >= groups:
                break
            self.start(self.dice.randint(0, 3 * self.count))
            self.play()
            self.check()
            if self.buffer.ready() and self.dice.random() < 0.7:
                self.train()
                if not self.inflight:
                    while self.playing:
                        self.play()
                self.publish()
            self.check()
        kept = self.buffer.waiting + self.buffer.playing
        account = Counter([*self.trained, *self.lost["failed"], *self.lost["stale"]])
        assert set(account.values()) == {1}, "trained once, or dropped once with its reason"
        assert len(account) + kept == self.started, "none is lost"
        assert len(self.trained) >= groups


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
def test_ten_thousand_groups_with_failures_delays_and_lagging_servers(staleness):
    world = World(staleness, count=4, staleness=staleness, lag=0.02, failures=0.1, inflight=True)
    world.run(2500)
    assert world.lost["failed"], "the dice must have made failures"
    assert world.lost["stale"], "and the lagging server tokens that are too old"


@given(
    seed=st.integers(0, 2**32), count=st.integers(1, 5), staleness=st.integers(0, 4),
    lag=st.sampled_from([0.0, 0.1]), failures=st.sampled_from([0.0, 0.3]), inflight=st.booleans(),
)  # fmt: skip
def test_any_run_keeps_the_promises(seed, count, staleness, lag, failures, inflight):
    world = World(seed, count=count, staleness=staleness, lag=lag, failures=failures, inflight=inflight)
    world.run(40)
    if not lag:
        assert not world.lost["stale"], "what is admitted in its turn is never too old"


class TestTurns:
    def test_a_round_leaves_time_for_those_that_are_left(self):
        """Of four groups that must be trained in rounds 0 to 1, two have to be done for the first; later ones cannot
        stand in for them."""
        buffer = GroupBuffer(groups_per_round=2, max_staleness=1)
        buffer.publish(0)
        old = [buffer.admit() for _ in range(4)]
        buffer.put(old[3], group_of(3))
        assert not buffer.ready()
        buffer.put(old[1], group_of(1))
        assert buffer.ready() and [one.group.task.position for one in buffer.take()] == [1, 3]
        buffer.publish(1)
        for position in (4, 5):
            buffer.put(buffer.admit(), group_of(position, (1,)))
        assert buffer.waiting == 2 and not buffer.ready()

    def test_a_round_waits_for_groups_whose_last_chance_it_is(self):
        buffer = GroupBuffer(groups_per_round=1, max_staleness=1)
        buffer.publish(0)
        slow, quick = buffer.admit(), buffer.admit()
        buffer.put(quick, group_of(1))
        assert buffer.ready() and [one.group.task.position for one in buffer.take()] == [1]
        buffer.publish(5)
        other = buffer.admit()
        buffer.put(other, group_of(2, (5,)))
        assert not buffer.ready(), "the slow one would be too old in the next round"
        buffer.put(slow, group_of(0))
        assert buffer.ready() and [one.group.task.position for one in buffer.take()] == [0]

    def test_nothing_starts_before_weights_are_published(self):
        assert GroupBuffer(groups_per_round=2, max_staleness=3).room == 0

    def test_no_group_is_started_for_rounds_beyond_the_last(self):
        buffer = GroupBuffer(groups_per_round=2, max_staleness=3, max_rounds=2)
        buffer.publish(0)
        assert buffer.room == 4
        for position in range(4):
            buffer.put(buffer.admit(), group_of(position))
        assert len(buffer.take()) == 2 and buffer.room == 0
        buffer.publish(1)
        assert len(buffer.take()) == 2 and buffer.room == 0
        buffer.publish(2)
        assert buffer.ready() and buffer.take() == [], "the trainer that asks once more is not left waiting"

    def test_where_tasks_end_a_round_is_short(self):
        buffer = GroupBuffer(groups_per_round=3, max_staleness=0)
        buffer.publish(0)
        place = buffer.admit()
        assert not buffer.ready(no_more=True), "it is in play"
        buffer.put(place, group_of(0))
        assert not buffer.ready() and buffer.ready(no_more=True) and len(buffer.take()) == 1
        assert buffer.ready(no_more=True) and buffer.take() == []


class TestAge:
    def test_it_counts_publishes_not_steps_from_the_oldest_token(self):
        buffer = GroupBuffer(groups_per_round=1, max_staleness=9)
        for version in (0, 4, 8):
            buffer.publish(version)
        assert [buffer.age(group_of(0, versions)) for versions in ((8,), (4, 8), (8, 0, 4))] == [0, 1, 2]
        assert buffer.age(group_of(0, (6,))) == 1, "weights between two publishes, as an evaluation serves them"
        assert buffer.age(Group(task=group_of(0).task, episodes=())) == 0

    def test_of_all_rows_of_an_agents_episode(self):
        buffer = GroupBuffer(groups_per_round=1, max_staleness=9)
        for version in (0, 4, 8):
            buffer.publish(version)
        episode = group_of(0, (8,)).episodes[0]
        branch = EpisodeRow(
            token_ids=(5, 6), mask=(0, 1), logprobs=(0.0, -1.0), versions=(-1, 0), prompt_length=1
        )  # fmt: skip
        assert buffer.age_of(episode) == 0 and buffer.age_of(replace(episode, branches=(branch,))) == 2

    def test_too_old_when_finished(self):
        buffer = GroupBuffer(groups_per_round=1, max_staleness=1)
        buffer.publish(0)
        place = buffer.admit()
        buffer.publish(1)
        buffer.publish(2)
        room = buffer.room
        assert not buffer.put(place, group_of(0, (0, 2))) and buffer.room == room + 1

    def test_too_old_while_it_waits(self):
        buffer = GroupBuffer(groups_per_round=1, max_staleness=1)
        buffer.publish(0)
        for position in (0, 1):
            buffer.put(buffer.admit(), group_of(position, (0,)))
        buffer.publish(1)
        assert [group.task.position for group in buffer.publish(2)] == [0, 1] and buffer.waiting == 0


class TestMisuse:
    @pytest.mark.parametrize(("count", "staleness"), [(0, 1), (1, -1)])
    def test_sizes(self, count, staleness):
        with pytest.raises(ConfigurationError, match="groups_per_round"):
            GroupBuffer(groups_per_round=count, max_staleness=staleness)

    def test_a_place_is_used_once_and_versions_grow(self):
        buffer = GroupBuffer(groups_per_round=1, max_staleness=0)
        buffer.publish(0)
        place = buffer.admit()
        with pytest.raises(AssertionError, match="no room"):
            buffer.admit()
        buffer.put(place, group_of(0))
        with pytest.raises(AssertionError, match="place 0"):
            buffer.put(place, group_of(0))
        assert buffer.publish(0) == [] and buffer.room == 0, "no step was made: nothing has changed"
        with pytest.raises(AssertionError, match="version -1"):
            buffer.publish(-1)
