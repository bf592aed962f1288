"""The bounded, versioned buffer between rollouts that go on and a trainer that takes rounds of groups.

::

    admit() -> Place --(the group is played)--> put(place, group) --> take() -> one round's groups
                                             `-> give_up(place)

Counts only; no threads, no clock, no model. One thread owns it.

**The bound.** Weights are published before each round: round r is trained on groups while r + 1 versions have been
published. A group gets a place only if the round that it would be trained in, counted in places, is at most
``max_staleness`` publishes away; so a group that is used in its turn is never too old, and almost none is thrown away.
Places are at most ``(max_staleness + 1) * groups_per_round``, in play and finished together.

**Whose turn.** Each group has a last round that may train it. A round takes the finished groups whose last round comes
first, and waits until so many of them are finished that those left fit into the rounds left to them. So a slow group is
overtaken while it has time, and waited for when it has none.

**Age.** The number of publishes since the oldest sampled token of a group. Whatever the reason, a group above the bound
is handed back as stale, never as one to train.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, replace

from envgrad.errors import ConfigurationError
from envgrad.types import Episode, Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A group's place in the buffer, from its start on."""

    number: int
    last_round: int
    """the last round that may train it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A group that waits for its round."""

    place: Place
    group: Group
    teaches: bool = True
    """False: nothing is to be learned from it, and it holds its place because no more are replaced"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unconsumed:
    """What was played and is in no round yet: a checkpoint's part of the buffer.

    Rounds are counted from a few before the last, which changes no difference between them.
    """

    published: tuple[int, ...]
    """the last versions"""
    rounds: int
    waiting: tuple[Finished, ...] = ()
    """of use, for a round to come"""
    dropped: tuple[Group, ...] = ()
    """these and the others came to nothing since the last round, with which they will be counted"""
    filtered: tuple[Group, ...] = ()
    stale: tuple[Group, ...] = ()


def sampled_versions(episode: Episode) -> set[int]:
    """The versions of an episode's sampled tokens, those of its parts included; others have -1."""
    rows = [row for one in (episode, *episode.parts) for row in one.rows]
    return {version for row in rows for version in row.versions if version >= 0}


class GroupBuffer:
    """Groups between their start and their training.

    Args:
        groups_per_round: Of a whole round.
        max_staleness: Most publishes between a group's oldest token and its training.
        max_rounds: No group is started for a round beyond these; None: there is no last one.

    Raises:
        ConfigurationError: a size or bound that cannot work.

    Example:
        >>> from envgrad.types import Task
        >>> buffer = GroupBuffer(groups_per_round=2, max_staleness=1)
        >>> _ = buffer.publish(0)
        >>> places = [buffer.admit() for _ in range(buffer.room)]
        >>> len(places), [place.last_round for place in places]
        (4, [1, 1, 1, 1])
        >>> for place in places[1:]:
        ...     task = Task(position=place.number, split="train", environment="", group_id=1, seed=2)
        ...     _ = buffer.put(place, Group(task=task, episodes=()))
        >>> buffer.ready(), [one.group.task.position for one in buffer.take()], buffer.ready()
        (True, [1, 2], False)
        >>> buffer.room  # until the next weights are published
        0
    """

    def __init__(self, *, groups_per_round: int, max_staleness: int, max_rounds: int | None = None) -> None:
        if groups_per_round < 1 or max_staleness < 0:
            raise ConfigurationError(
                f"groups_per_round={groups_per_round} must be at least 1, and max_staleness={max_staleness} at least 0"
            )
        self.groups_per_round = groups_per_round
        self.max_staleness = max_staleness
        self.max_rounds = max_rounds
        self.rounds = 0
        """rounds taken"""
        self._published: list[int] = []
        self._playing: dict[int, Place] = {}
        self._finished: dict[int, Finished] = {}
        self._admitted = 0

    # -- versions

    def publish(self, version: int) -> list[Group]:
        """Policy ``version`` is served from now on. Returns finished groups that are too old by it.

        The last version again, where no step was made since, changes nothing.

        Raises:
            AssertionError: a version below the last one.
        """
        if self._published and version < self._published[-1]:
            raise AssertionError(f"version {version} was published after {self._published[-1]}")
        if version not in self._published[-1:]:
            self._published.append(version)
        stale = [one for one in self._finished.values() if self.age(one.group) > self.max_staleness]
        for one in stale:
            del self._finished[one.place.number]
        return [one.group for one in stale]

    def age(self, group: Group) -> int:
        """Publishes since the oldest sampled token of ``group``; 0 without one."""
        return max((self.age_of(episode) for episode in group.episodes), default=0)

    def age_of(self, episode: Episode) -> int:
        """Publishes since the oldest sampled token of ``episode``, in any of its rows; 0 without one."""
        versions = sampled_versions(episode)
        return len(self._published) - bisect_right(self._published, min(versions)) if versions else 0

    # -- checkpoints

    def state(self) -> Unconsumed:
        """Its finished groups, the rounds and versions that they are counted in."""
        kept = self._published[-(self.max_staleness + 2) :]
        shift = len(self._published) - len(kept)
        waiting = [
            replace(one, place=replace(one.place, last_round=one.place.last_round - shift))
            for one in self._finished.values()
        ]
        return Unconsumed(published=tuple(kept), rounds=self.rounds - shift, waiting=tuple(waiting))

    def restore(self, state: Unconsumed) -> None:
        """Go on where ``state`` was taken, with another ``max_staleness`` or size of rounds too. Groups that were in
        play then are not in play here. ``max_rounds`` counts from here on.

        Raises:
            AssertionError: something has begun.
        """
        if self._published or self._admitted:
            raise AssertionError("a buffer is restored before it is used")
        self._published, self.rounds = list(state.published), state.rounds
        if self.max_rounds is not None:
            self.max_rounds += state.rounds
        latest = len(self._published) - 1 + self.max_staleness
        for one in state.waiting:
            place = Place(number=self._admitted, last_round=min(one.place.last_round, latest))
            self._finished[place.number] = replace(one, place=place)
            self._admitted += 1

    # -- the rollouts' side

    @property
    def room(self) -> int:
        """How many groups may start now."""
        rounds = len(self._published) + self.max_staleness if self._published else 0
        if self.max_rounds is not None:
            rounds = min(rounds, self.max_rounds)
        return max(0, (rounds - self.rounds) * self.groups_per_round - self.playing - self.waiting)

    def admit(self) -> Place:
        """A place for a group that starts now.

        Raises:
            AssertionError: there is no room.
        """
        if self.room < 1:
            raise AssertionError("there is no room for another group")
        place = Place(number=self._admitted, last_round=len(self._published) - 1 + self.max_staleness)
        self._admitted += 1
        self._playing[place.number] = place
        return place

    def put(self, place: Place, group: Group, *, teaches: bool = True) -> bool:
        """The group is finished and of use; False if it is too old, and its place is free again.

        Raises:
            AssertionError: nothing is played in this place.
        """
        self.give_up(place)
        if self.age(group) > self.max_staleness:
            return False
        self._finished[place.number] = Finished(place=place, group=group, teaches=teaches)
        return True

    def give_up(self, place: Place) -> None:
        """The group came to nothing; its place is free for another.

        Raises:
            AssertionError: nothing is played in this place.
        """
        if self._playing.pop(place.number, None) is None:
            raise AssertionError(f"nothing is played in place {place.number}")

    @property
    def playing(self) -> int:
        """Groups in play."""
        return len(self._playing)

    @property
    def waiting(self) -> int:
        """Finished groups that wait for their round."""
        return len(self._finished)

    # -- the trainer's side

    def ready(self, *, no_more: bool = False) -> bool:
        """Whether the next round can be taken. ``no_more``: the tasks have ended, so a round may be short."""
        if self.max_rounds is not None and self.rounds >= self.max_rounds:
            return True
        if not self._leaves_time():
            return False
        return self.waiting >= self.groups_per_round or (no_more and not self._playing)

    def _leaves_time(self) -> bool:
        """Whether, when this round has taken its groups, all others can still be trained in time."""
        finished = Counter(one.place.last_round for one in self._finished.values())
        known = finished + Counter(place.last_round for place in self._playing.values())
        due = done = 0
        for last_round in sorted(known):
            due, done = due + known[last_round], done + finished[last_round]
            later = (last_round - self.rounds) * self.groups_per_round
            if min(due - later, self.groups_per_round) > done:
                return False
        return True

    def take(self) -> list[Finished]:
        """The next round's groups in the order of their tasks; fewer than a round only where tasks or rounds have
        ended."""
        by_turn = sorted(self._finished.values(), key=lambda one: (one.place.last_round, one.group.task.position))
        chosen = by_turn[: self.groups_per_round]
        for one in chosen:
            del self._finished[one.place.number]
        self.rounds += 1
        return sorted(chosen, key=lambda one: one.group.task.position)
