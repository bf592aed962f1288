from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envgrad.environments.tasks import TaskStream, build_task_stream
from envgrad.errors import ConfigurationError, TooManyFailures
from envgrad.rollout.group import GroupPolicy
from envgrad.rollout.runner import DynamicSampling, RolloutRunner, Round
from envgrad.types import Group
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

    def get_reward(self) -> float | None:
        return None if self.message == "none" else float(self.message)


def rewards_vary(group: Group) -> bool:
    return len(set(group.scored_rewards)) > 1


def script(kinds: str) -> Callable[..., list[int]]:
    """Groups by position: ``v`` their rewards vary, ``e`` all earn the same, ``d`` none is scored; then all vary."""

    def answer(prompt: Sequence[int], params: object, session: object) -> list[int]:
        position, sibling, _ = session.order  # type: ignore[attr-defined]
        kind = kinds[position] if position < len(kinds) else "v"
        return turn({"v": str(sibling), "e": "1", "d": "none"}[kind])

    return answer


def tasks_of(runner: RolloutRunner) -> TaskStream:
    return build_task_stream({"env": runner.contexts["env"].spec}, seed=0, split="train")


def positions(groups: Sequence[Group]) -> list[int]:
    return [group.task.position for group in groups]


def play(kinds: str, count: int, rounds: int | None, max_draws: int | None = None) -> Round:
    dynamic = None if rounds is None else DynamicSampling(teaches=rewards_vary, max_rounds=rounds)
    with world(Says, script(kinds)) as (runner, tasks, _):
        played = runner.play(tasks, count, TWO, max_draws, dynamic)
        drawn = len(played.groups) + len(played.filtered) + len(played.dropped)
        assert tasks.position == drawn
    return played


class TestDynamicSampling:
    def test_groups_that_teach_nothing_are_replaced(self) -> None:
        played = play("evee" + "v" * 4, 4, rounds=3)
        assert positions(played.groups) == [1, 4, 5, 6]
        assert positions(played.filtered) == [0, 2, 3]
        assert positions(played.scored) == [0, 1, 2, 3, 4, 5, 6]
        assert (played.unteaching, played.dynamic) == (0, True)

    def test_at_the_bound_the_earliest_of_them_fill_the_round(self) -> None:
        # 4, then 3 for the three, then 2 for the two: position 7 teaches, 8 does not; one place is left
        played = play("evee" + "vee" + "ve", 4, rounds=2)
        assert positions(played.groups) == [0, 1, 4, 7]
        assert positions(played.filtered) == [2, 3, 5, 6, 8]
        assert played.unteaching == 1

    def test_where_nothing_teaches_it_ends(self) -> None:
        played = play("e" * 99, 3, rounds=3)
        assert positions(played.groups) == [0, 1, 2] and positions(played.filtered) == list(range(3, 12))
        assert played.unteaching == 3

    def test_dropped_groups_are_replaced_beyond_the_bound(self) -> None:
        # 2; then one for the "e"; it is dropped, and again, and the last one fills
        played = play("ve" + "dd" + "v", 2, rounds=1)
        assert (positions(played.groups), positions(played.dropped), positions(played.filtered)) == (
            [0, 4],
            [2, 3],
            [1],
        )

    def test_finite_data_fills_with_what_there_is(self) -> None:
        played = play("eev", 3, rounds=3, max_draws=4)
        assert positions(played.groups) == [0, 2, 3] and positions(played.filtered) == [1]
        assert play("eee", 3, rounds=3, max_draws=3).unteaching == 3

    def test_without_it_nothing_is_replaced(self) -> None:
        played = play("eeve", 4, rounds=None)
        assert (positions(played.groups), played.filtered, played.dynamic) == ([0, 1, 2, 3], (), False)

    def test_the_bound_must_be_positive(self) -> None:
        with pytest.raises(ConfigurationError, match="max_dynamic_rounds=0"):
            DynamicSampling(teaches=rewards_vary, max_rounds=0)

    def test_every_drawn_task_is_in_one_place_and_no_draw_is_wasted(self) -> None:
        kinds = ""

        def answer(*arguments: object) -> list[int]:
            return script(kinds)(*arguments)

        @settings(max_examples=60, deadline=None)
        @given(
            pattern=st.text("veed", max_size=12),
            count=st.integers(1, 5),
            rounds=st.integers(1, 3),
            max_draws=st.none() | st.integers(1, 12),
        )
        def check(pattern: str, count: int, rounds: int, max_draws: int | None) -> None:
            nonlocal kinds
            kinds = pattern
            tasks = tasks_of(runner)
            dynamic = DynamicSampling(teaches=rewards_vary, max_rounds=rounds)
            played = runner.play(tasks, count, TWO, max_draws, dynamic)
            places = sorted(positions((*played.groups, *played.filtered, *played.dropped)))
            assert places == list(range(tasks.position))
            assert positions(played.groups) == sorted(positions(played.groups))
            assert all(rewards_vary(group) for group in played.groups) == (played.unteaching == 0)
            assert played.unteaching == sum(not rewards_vary(group) for group in played.groups)
            assert not any(rewards_vary(group) for group in played.filtered)
            assert len(places) - len(played.dropped) <= count * (1 + rounds)
            if len(played.groups) < count or (played.unteaching and len(played.scored) < count + rounds):
                assert len(places) == max_draws

        with world(Says, answer, max_consecutive_failed_groups=99) as (runner, _, _):
            check()


def test_an_environment_has_groups_of_its_own_size() -> None:
    policy = GroupPolicy(num_generations=2, sizes={"b": 3})
    assert (policy.of("a"), policy.of("b").num_generations) == (policy, 3)
    with world({"a": Says, "b": Says}, script("")) as (runner, tasks, _):
        groups = runner.play(tasks, 4, policy).groups
    assert [(group.task.environment, len(group.episodes)) for group in groups] == [("a", 2), ("b", 3)] * 2


def test_a_group_is_of_use_by_its_own_size() -> None:
    def answer(prompt: Sequence[int], params: object, session: object) -> list[int]:
        return turn("1" if session.order[1] == 0 else "none")  # type: ignore[attr-defined]

    # one scored episode of one is enough, one of two is not
    with world({"a": Says, "b": Says}, answer, max_consecutive_failed_groups=3) as (runner, tasks, _):
        played = runner.play(tasks, 2, GroupPolicy(num_generations=2, sizes={"a": 1}), max_draws=4)
    assert [group.task.environment for group in played.groups] == ["a", "a"]
    assert [group.task.environment for group in played.dropped] == ["b"]
    with (
        world({"a": Says, "b": Says}, answer, max_consecutive_failed_groups=2) as (runner, tasks, _),
        pytest.raises(TooManyFailures),
    ):
        runner.play(tasks, 2, TWO)


@pytest.mark.parametrize(("in_waves", "expected"), [(True, {0, 1}), (False, {0, 1, 2})])
def test_in_waves_a_group_starts_when_all_before_it_have_ended(in_waves: bool, expected: set[int]) -> None:
    """Group 1 ends at once; group 0 waits until a third group has begun, or for a quarter of a second if it cannot."""
    begun: set[int] = set()
    seen: list[set[int]] = []

    class Waits(Says):
        async def step(self, message: str) -> tuple[str, bool]:
            self.message = message
            if message == "0":
                for _ in range(25 if in_waves else 2000):
                    if len(begun) > 2:
                        break
                    await asyncio.sleep(0.01)
                seen.append(set(begun))
            return "", True

    def answer(prompt: Sequence[int], params: object, session: object) -> list[int]:
        begun.add(session.order[0])  # type: ignore[attr-defined]
        return turn(str(session.order[0]))  # type: ignore[attr-defined]

    with world(Waits, answer, max_groups=2) as (runner, tasks, _):
        runner.in_waves = in_waves
        groups = runner.play(tasks, 3, GroupPolicy(num_generations=1)).groups
    assert seen == [expected] and positions(groups) == [0, 1, 2]
