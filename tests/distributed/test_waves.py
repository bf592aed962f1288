"""Who plays which group: no task twice, none lost, the same round on every rank, whatever fails and whoever is slow."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envgrad.distributed.waves import SharedWaves
from envgrad.errors import EnvironmentFailure, RankFailed, RankStopped, SamplerDied, StoppedTogether, TooManyFailures
from envgrad.rollout.group import GroupPolicy
from envgrad.rollout.runner import DynamicSampling, Round
from envgrad.types import Group
from helpers.thread_ranks import ThreadRanks, on_threads
from helpers.world import turn, world

TWO = GroupPolicy(num_generations=2, max_episode_retries=0)


class Says:
    """The answer is the reward."""

    def reset(self, seed: int) -> str:
        self.message = ""
        return "How much?"

    def step(self, message: str) -> tuple[str, bool]:
        self.message = message
        return "", True

    def get_reward(self) -> float:
        if self.message == "none":
            raise EnvironmentFailure("nobody knows")
        return float(self.message)


def script(kinds: str) -> Callable[..., list[int]]:
    """Groups by position: ``v`` their rewards vary, ``e`` all earn the same, ``d`` none is scored; then all vary."""

    def answer(prompt: Sequence[int], params: object, session: Any) -> list[int]:
        position, sibling, _ = session.order
        kind = kinds[position] if position < len(kinds) else "v"
        return turn({"v": str(sibling), "e": "1", "d": "none"}[kind])

    return answer


def positions(groups: Sequence[Group]) -> list[int]:
    return [group.task.position for group in groups]


def numbers(played: Round) -> tuple[list[int], ...]:
    return positions(played.groups), positions(played.dropped), positions(played.filtered)


def varies(group: Group) -> bool:
    return len(set(group.scored_rewards)) > 1


Rounds = list[tuple[list[int], ...]]


def play_rounds(
    ranks: ThreadRanks | None,
    kinds: str,
    rounds: int,
    *,
    seed: int = 0,
    static: bool = False,
    state: Any = None,
    at_once: int = 64,
    latency: Callable[[Any], float] | None = None,
) -> tuple[Rounds, Any, list[int]]:
    """Rounds of three groups as one rank sees them, where the tasks then are, and what it played itself."""
    rank = 0 if ranks is None else ranks.rank

    def speed(session: Any) -> float:
        return random.Random(f"{seed}/{rank}/{session.order}").choice((0.0, 0.0, 0.001, 0.003))

    with world(Says, script(kinds), max_groups=at_once, latency=latency or speed) as (runner, tasks, sampler):
        if state is not None:
            tasks.load_state_dict(state)
        if ranks is not None:
            runner.waves = SharedWaves(ranks=ranks, static=static)
        dynamic = DynamicSampling(teaches=varies, max_rounds=2)
        seen = [numbers(runner.play(tasks, 3, TWO, dynamic=dynamic)) for _ in range(rounds)]
        mine = [request.session.order[0] for request in sampler.requests if not request.session.order[1]]
        return seen, tasks.state_dict(), mine


@settings(max_examples=25, deadline=None)
@given(
    before=st.integers(1, 8), after=st.integers(1, 8), kinds=st.text("veed", max_size=14), seed=st.integers(0, 99),
    static=st.booleans(), at_once=st.sampled_from((1, 2, 64)),
)  # fmt: skip
def test_no_task_is_played_twice_or_lost_on_any_number_of_ranks(
    before: int, after: int, kinds: str, seed: int, static: bool, at_once: int
) -> None:
    alone, end, _ = play_rounds(None, kinds, 4)
    options = {"seed": seed, "static": static, "at_once": at_once}
    first = on_threads(before, lambda ranks: play_rounds(ranks, kinds, 2, **options))
    middle = first[0][1]
    second = on_threads(after, lambda ranks: play_rounds(ranks, kinds, 2, state=middle, **options))
    assert all(one[0] == first[0][0] and one[1] == middle for one in first), "every rank has the same rounds"
    assert all(one[0] == second[0][0] and one[1] == end for one in second), "and the same place among the tasks"
    assert first[0][0] + second[0][0] == alone, "those of a single process"
    played = Counter(position for _, _, mine in first + second for position in mine)
    assert played == Counter(range(end["position"])), "each task drawn was played once"


def test_a_rank_that_is_done_takes_what_a_slow_one_has_left() -> None:
    def run(ranks: ThreadRanks) -> tuple[Rounds, Any, list[int]]:
        # Two groups at once on each rank at the most: twelve are in play or wait for whoever is done.
        return play_rounds(ranks, "", 4, at_once=1, latency=lambda _: 0.0 if ranks.rank else 0.3)

    slow, quick = on_threads(2, run)
    assert len(slow[2]) + len(quick[2]) == 12 and len(quick[2]) > len(slow[2])
    assert slow[0] == quick[0]


def test_deterministic_runs_say_beforehand_who_plays_what() -> None:
    found = on_threads(3, lambda ranks: play_rounds(ranks, "", 2, static=True, seed=ranks.rank)[2])
    assert [sorted(mine) for mine in found] == [[0, 3], [1, 4], [2, 5]]


class Fails(Says):
    def reset(self, seed: int) -> str:
        raise OSError("the simulator burnt down")


def _ending(ranks: ThreadRanks, factory: type, script: Any, **options: Any) -> tuple[type, str]:
    with world(factory, script, **options) as (runner, tasks, _):
        runner.waves = SharedWaves(ranks=ranks, static=True)
        with pytest.raises(Exception) as found:
            for _ in range(9):
                runner.play(tasks, 4, TWO)
        return found.type, str(found.value)


def test_failures_are_counted_over_all_ranks() -> None:
    endings = on_threads(2, lambda ranks: _ending(ranks, Fails, [turn("1")], max_consecutive_failed_groups=6))
    assert [kind for kind, _ in endings] == [TooManyFailures] * 2
    assert all("6 groups in a row" in text and "the simulator burnt down" in text for _, text in endings)


@pytest.mark.parametrize(("error", "told"), [(SamplerDied, RankStopped), (ZeroDivisionError, RankFailed)])
def test_an_error_of_one_rank_ends_all_and_says_whose_it_is(error: type[Exception], told: type[Exception]) -> None:
    def answer(prompt: Any, params: Any, session: Any) -> list[int]:
        if session.order[0] == 5:
            raise error("no more memory")
        return turn(str(session.order[1]))

    endings = on_threads(3, lambda ranks: _ending(ranks, Says, answer))
    assert [kind for kind, _ in endings] == [told, error, told]
    assert endings[0][1] == f"rank 1 failed: {error.__name__}: no more memory"


def test_an_error_stops_ranks_that_still_play() -> None:
    def answer(prompt: Any, params: Any, session: Any) -> list[int]:
        if session.order[0] == 1:
            raise ZeroDivisionError("at once")
        return turn(str(session.order[1]))

    def run(ranks: ThreadRanks) -> tuple[type, str]:
        return _ending(ranks, Says, answer, latency=3600.0 if ranks.rank == 0 else 0.0)

    assert [kind for kind, _ in on_threads(2, run)] == [RankFailed, ZeroDivisionError]


def test_a_signal_to_one_rank_stops_all() -> None:
    def run(ranks: ThreadRanks) -> int:
        with world(Says, lambda *_: turn("1"), latency=3600.0) as (runner, tasks, _):
            arrived = signal.SIGTERM if ranks.rank == 1 else None
            runner.waves = SharedWaves(ranks=ranks, static=False, arrived=lambda: arrived)
            with pytest.raises(StoppedTogether) as found:
                runner.play(tasks, 4, TWO)
            return found.value.signal

    assert on_threads(3, run) == [signal.SIGTERM] * 3


@pytest.mark.parametrize("static", [True, False])
def test_a_signal_to_a_rank_that_has_played_its_part_stops_those_that_still_play(static: bool) -> None:
    def run(ranks: ThreadRanks) -> int:
        began = time.monotonic()
        latency = 0.0 if ranks.rank == 1 else 3600.0
        # One group at once: rank 1 has long played what is left when its signal comes.
        with world(Says, lambda *_: turn("1"), latency=latency, max_groups=1) as (runner, tasks, sampler):
            arrived = lambda: None if ranks.rank != 1 or time.monotonic() - began < 1.0 else signal.SIGTERM  # noqa: E731
            runner.waves = SharedWaves(ranks=ranks, static=static, arrived=arrived)
            with pytest.raises(StoppedTogether) as found:
                runner.play(tasks, 4, TWO)
            if ranks.rank == 1:
                assert sampler.requests, "it has played"
            return found.value.signal

    assert on_threads(3, run) == [signal.SIGTERM] * 3


def test_a_signal_behind_the_last_group_is_left_for_the_step() -> None:
    """All have played when it comes: the round is whole, and the run stops behind the next step."""

    def run(ranks: ThreadRanks) -> list[int]:
        with world(Says, lambda *_: turn("1")) as (runner, tasks, _):
            waves = runner.waves = SharedWaves(ranks=ranks, static=True)
            exchange = ranks.exchange_async

            async def late(data: bytes, while_waiting: Any = None) -> list[bytes]:
                waves.arrived = lambda: signal.SIGTERM
                return await exchange(data, while_waiting)

            ranks.exchange_async = late  # type: ignore[method-assign]
            return positions(runner.play(tasks, 4, TWO).groups)

    assert on_threads(2, run) == [[0, 1, 2, 3]] * 2
