"""Several samplers as one: who serves which group, and what happens when one of them fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from envgrad.errors import ConfigurationError, WeightTransferError
from envgrad.sampling.replicas import ReplicaSampler
from envgrad.sampling.sampler import SamplingParams, Session
from envgrad.sampling.scripted import ScriptedSampler


def session(group: int, sibling: int = 0) -> Session:
    return Session(key=f"{group}/{sibling}", group=f"{group}", order=(group, sibling, 0))


class Replica(ScriptedSampler):
    """Answers with its number."""

    def __init__(self, number: int, max_context: int = 64) -> None:
        super().__init__(lambda *_: [number], max_context=max_context)
        self.fails = False

    def update_weights(self, version: int, named_tensors: Any) -> None:
        if self.fails:
            raise WeightTransferError("torn")
        super().update_weights(version, named_tensors)


def numbered(count: int, **options: Any) -> tuple[ReplicaSampler, list[Replica]]:
    made = [Replica(number, 64 + number) for number in range(count)]
    waiting = list(made)
    sampler = ReplicaSampler(lambda: waiting.pop(0), count, **options)
    ordered = sorted(made, key=lambda one: sampler._samplers.index(one))
    return sampler, ordered


def asked(sampler: ReplicaSampler, *sessions: Session) -> list[int]:
    async def ask() -> list[int]:
        answers = [sampler.sample([1], SamplingParams(max_tokens=4), one) for one in sessions]
        return [answer.token_ids[0] for answer in await asyncio.gather(*answers)]

    return asyncio.run(ask())


def test_siblings_stay_together_and_groups_go_to_whom_has_the_fewest():
    sampler, replicas = numbered(2)
    for sibling in range(3):
        sampler.begin(session(0, sibling))
    sampler.begin(session(1))
    sampler.begin(session(2))
    sampler.begin(session(3))
    assert [len(one.open_sessions) for one in replicas] == [3, 3]
    one = asked(sampler, session(0, 0), session(0, 1), session(0, 2))
    others = asked(sampler, session(1), session(2), session(3))
    assert len(set(one)) == 1 and len(set(others)) == 1 and one[0] != others[0]


def test_a_group_may_be_chosen_anew_when_it_has_ended():
    sampler, replicas = numbered(2)
    sampler.begin(session(0))
    sampler.begin(session(1))
    sampler.end(session(1))
    sampler.end(session(1))
    assert [len(one.open_sessions) for one in replicas] == [1, 0]
    sampler.begin(session(2))
    sampler.begin(session(1))
    assert [len(one.open_sessions) for one in replicas] == [2, 1] or [len(one.open_sessions) for one in replicas] == [
        1,
        2,
    ]


def test_by_position_no_load_decides():
    sampler, replicas = numbered(3, by_position=True)
    for group in (0, 3, 6, 1):
        sampler.begin(session(group))
    assert [len(one.open_sessions) for one in replicas] == [3, 1, 0]


def test_weights_go_to_all_and_the_oldest_version_counts():
    sampler, replicas = numbered(2)
    sampler.update_weights(1, None)
    assert [one.policy_version for one in replicas] == [1, 1] and sampler.policy_version == 1
    replicas[0].fails = True
    with pytest.raises(WeightTransferError, match="torn"):
        sampler.update_weights(2, None)
    assert sampler.policy_version == 1 and replicas[1].policy_version == 2


def test_limits_are_the_smallest_and_all_are_closed():
    sampler, replicas = numbered(2)
    assert sampler.max_context == 64 and sampler.exact_logprobs
    sampler.close()
    assert all(one.closed for one in replicas)


def test_what_was_made_is_closed_where_another_could_not_be():
    made: list[Replica] = []

    def make() -> Replica:
        if len(made) == 1:
            raise ConfigurationError("no room for the second")
        made.append(Replica(0))
        return made[-1]

    in_turn: Callable[[], Replica] = make
    with pytest.raises(ConfigurationError, match="no room"):
        ReplicaSampler(in_turn, 2)
    assert len(made) == 1 and made[0].closed


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigurationError, match="at least 1, got 0"):
        ReplicaSampler(lambda: Replica(0), 0)
    sampler, _ = numbered(1)
    with pytest.raises(ConfigurationError, match="has not begun"):
        asked(sampler, session(0))
