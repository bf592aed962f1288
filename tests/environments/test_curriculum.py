from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envgrad.environments.contract import inspect_environment
from envgrad.environments.curriculum import MILLION, Curriculum, CurriculumOptions, Signal
from envgrad.environments.spec import EnvironmentSpec
from envgrad.environments.tasks import TaskStream, build_task_stream
from envgrad.errors import ConfigurationError
from envgrad.types import Episode, Group, StopReason, Task


class Endless:
    def reset(self, seed: int) -> str:
        return f"Task {seed}"


class Ten:
    def reset(self, task_index: int) -> str:
        return f"Task {task_index}"

    @classmethod
    def num_tasks(cls, split: str) -> int:
        return 10


def spec_of(name: str, factory: type = Endless) -> EnvironmentSpec:
    return inspect_environment(name, factory)[0]


def stream_of(
    names: Sequence[str], weights: Sequence[float] | None = None, min_share: float = 0.01, **changes: float
) -> TaskStream:
    return build_task_stream(
        {name: spec_of(name) for name in names},
        seed=0,
        split="train",
        weights=None if weights is None else dict(zip(names, weights, strict=True)),
        curriculum=CurriculumOptions(min_share=min_share, **changes),
    )


def group_of(task: Task, rewards: Sequence[float | None]) -> Group:
    episodes = tuple(
        Episode(
            task=task, sibling=number, token_ids=(1, 2), mask=(0, 1), logprobs=(0.0, -1.0), versions=(-1, 0),
            prompt_length=1, messages=(), turns=(), stop_reason=StopReason.ANSWER, reward=reward,
        )
        for number, reward in enumerate(rewards)
    )  # fmt: skip
    return Group(task=task, episodes=episodes)


class TestSignal:
    def test_by_hand(self) -> None:
        signal = Signal()
        # rewards in [0, 4], so the largest variance is 4; population variance of (0, 4, 2, 2) is 2
        signal.observe([0.0, 4.0, 2.0, 2.0], decay=0.75)
        assert signal.value == pytest.approx(0.75 * 1 + 0.25 * 2 / 4)
        # the range stays: variance of (4, 2) is 1, a quarter of the largest
        signal.observe([4.0, 2.0], decay=0.5)
        assert signal.value == pytest.approx(0.5 * 0.875 + 0.5 * 0.25)
        assert (signal.low, signal.high) == (0.0, 4.0)

    def test_a_probability_gives_its_learnability(self) -> None:
        signal = Signal(low=0.0, high=1.0)
        signal.observe([1.0, 0.0, 0.0, 0.0], decay=0.0)
        assert signal.value == pytest.approx(4 * 0.25 * 0.75)

    @pytest.mark.parametrize("rewards", [[], [1.0]])
    def test_fewer_than_two_rewards_say_nothing(self, rewards: list[float]) -> None:
        signal = Signal()
        signal.observe(rewards, decay=0.0)
        assert (signal.value, signal.low) == (1.0, None)

    @given(
        groups=st.lists(
            st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2, max_size=5), min_size=1, max_size=5
        ),
        decay=st.floats(0.0, 0.99),
    )
    def test_it_stays_between_0_and_1_for_any_finite_rewards(self, groups: list[list[float]], decay: float) -> None:
        signal = Signal()
        for rewards in groups:
            signal.observe(rewards, decay)
            assert 0.0 <= signal.value <= 1.0

    @given(rewards=st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=6))
    def test_it_does_not_depend_on_the_scale_of_rewards(self, rewards: list[float]) -> None:
        small, large = Signal(), Signal()
        small.observe(rewards, decay=0.5)
        large.observe([64 * reward - 8 for reward in rewards], decay=0.5)
        assert small.value == pytest.approx(large.value)


class TestShares:
    def test_by_hand(self) -> None:
        weights = {"a": Fraction(1, 2), "b": Fraction(1, 4), "c": Fraction(1, 4)}
        curriculum = Curriculum(weights, CurriculumOptions(min_share=0.1, decay=0.5))
        assert curriculum.shares == {"a": 0.5, "b": 0.25, "c": 0.25}
        curriculum.signals["a"].value = 0.5
        curriculum.update()
        # in proportion 1/4 : 1/4 : 1/4
        assert curriculum.millionths == {"a": 333_334, "b": 333_333, "c": 333_333}
        curriculum.signals["c"].value = 0.0
        curriculum.update()
        # c is lifted to a tenth; the rest is halved between a and b
        assert curriculum.shares == {"a": 0.45, "b": 0.45, "c": 0.1}

    def test_lifting_one_can_push_another_below(self) -> None:
        # in proportion 0.02 : 0.105 : 0.875; lifting the first to 0.1 leaves the second 0.9 * 0.105 / 0.98 < 0.1
        weights = {"a": Fraction(20, 1000), "b": Fraction(105, 1000), "c": Fraction(875, 1000)}
        assert Curriculum(weights, CurriculumOptions(min_share=0.1)).shares == {"a": 0.1, "b": 0.1, "c": 0.8}

    def test_without_any_signal_the_weights_hold(self) -> None:
        curriculum = Curriculum({"a": Fraction(3, 4), "b": Fraction(1, 4)}, CurriculumOptions())
        for signal in curriculum.signals.values():
            signal.value = 0.0
        curriculum.update()
        assert curriculum.shares == {"a": 0.75, "b": 0.25}

    @settings(max_examples=60)
    @given(
        weights=st.lists(st.integers(1, 10**6), min_size=2, max_size=20),
        signals=st.lists(st.floats(0.0, 1.0), min_size=20, max_size=20),
        part=st.floats(0.001, 1.0),
    )
    def test_they_add_up_to_one_and_keep_the_least(self, weights: list[int], signals: list[float], part: float) -> None:
        least = round(part / len(weights), 6) - 1e-6
        if least <= 0:
            return
        names = [f"e{number}" for number in range(len(weights))]
        exact = {name: Fraction(weight, sum(weights)) for name, weight in zip(names, weights, strict=True)}
        curriculum = Curriculum(exact, CurriculumOptions(min_share=least))
        for name, value in zip(names, signals, strict=False):
            curriculum.signals[name].value = value
        curriculum.update()
        assert sum(curriculum.millionths.values()) == MILLION
        assert min(curriculum.millionths.values()) >= least * MILLION - 1e-6


MOVES = st.lists(st.tuples(st.integers(1, 12), st.lists(st.sampled_from([0.0, 0.1, 1.0]), min_size=9, max_size=9)),
                 min_size=1, max_size=12)  # fmt: skip
"""stretches of draws, and the signals that are set behind each"""


class TestDraws:
    @settings(max_examples=60, deadline=None)
    @given(
        weights=st.lists(st.sampled_from([1e-3, 0.1, 1.0, 7.0, 99.7]), min_size=2, max_size=9),
        moves=MOVES,
        adversary=st.booleans(),
    )
    def test_what_is_owed_stays_within_the_bound_however_shares_move(
        self, weights: list[float], moves: list[tuple[int, list[float]]], adversary: bool
    ) -> None:
        names = [f"e{number}" for number in range(len(weights))]
        harmonic = sum(1 / number for number in range(1, len(names) + 1))
        stream = stream_of(names, weights, min_share=0.01)
        curriculum = stream._source.curriculum  # type: ignore[attr-defined]
        owed, counts = dict.fromkeys(names, 0.0), Counter[str]()
        for number, signals in moves:
            start, shares = Counter(counts), stream.shares
            for drawn in range(1, number + 1):
                for name, share in stream.shares.items():
                    owed[name] += share
                counts[stream.take(1)[0].environment] += 1
                for name in names:
                    lag = owed[name] - counts[name]
                    assert -1 < lag <= harmonic - 1 + 1e-9
                    assert abs(counts[name] - start[name] - drawn * shares[name]) < harmonic + 1e-9
            for name, value in zip(names, signals, strict=False):
                # the adversary gives all to those that are owed most
                curriculum.signals[name].value = float(owed[name] > counts[name]) if adversary else value
            curriculum.update()

    def test_every_environment_is_drawn_however_little_it_teaches(self) -> None:
        stream = stream_of("abc", min_share=0.1, decay=0.0)
        task = stream.take(1)[0]
        for name in "ab":
            stream._source.curriculum.signals[name].value = 0.0  # type: ignore[attr-defined]
        stream.observe([group_of(task, [1.0])])
        assert stream.shares == {"a": 0.1, "b": 0.1, "c": 0.8}
        counts = Counter(task.environment for task in stream.take(1000))
        assert all(abs(counts[name] - 1000 * share) < 11 / 6 for name, share in stream.shares.items())

    def test_results_move_the_shares_in_the_order_given(self) -> None:
        stream = stream_of("ab", min_share=0.05, decay=0.5)
        tasks = {task.environment: task for task in stream.take(2)}
        stream.observe(
            [group_of(tasks["a"], [1.0, 1.0, None]), group_of(tasks["b"], [0.0, 1.0, None, float("nan")])]
        )  # fmt: skip
        # a: half of 1; b: as it was. 0.5 : 1
        assert stream.shares == pytest.approx({"a": 1 / 3, "b": 2 / 3}, abs=1e-6)

    @settings(max_examples=20, deadline=None)
    @given(before=st.integers(0, 9), after=st.integers(1, 9))
    def test_a_resumed_stream_goes_on_exactly(self, before: int, after: int) -> None:
        def rounds(stream: TaskStream, first: int, last: int) -> list[Task]:
            drawn: list[Task] = []
            for number in range(first, last):
                tasks = stream.take(3)
                drawn += tasks
                stream.observe([group_of(task, [number % 3, task.position % 2, 0.3]) for task in tasks])
            return drawn

        whole, stopped, resumed = (stream_of("abcd", [1, 2, 3, 0.1], decay=0.7) for _ in range(3))
        expected = rounds(whole, 0, before + after)[3 * before :]
        rounds(stopped, 0, before)
        resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
        assert resumed.shares == stopped.shares
        assert rounds(resumed, before, before + after) == expected
        assert resumed.state_dict() == whole.state_dict()

    def test_finite_environments_run_through_their_tasks_and_there_is_no_pass(self) -> None:
        given = {"a": spec_of("a", Ten), "b": spec_of("b", Ten)}
        stream = build_task_stream(given, seed=0, split="train", curriculum=CurriculumOptions())
        own = [task for task in stream.take(60) if task.environment == "a"][:20]
        assert [sorted(task.task_index or 0 for task in own[half : half + 10]) for half in (0, 10)] == [
            [*range(10)]
        ] * 2
        assert (stream.epoch_length, stream.passes) == (None, 0.0)


class TestWhatCannotWork:
    @pytest.mark.parametrize("value", [0.0, -0.1, 1.0, float("nan")])
    def test_min_share(self, value: float) -> None:
        with pytest.raises(ConfigurationError, match=f"curriculum_min_share={value!r} must be above 0"):
            CurriculumOptions(min_share=value)

    @pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
    def test_decay(self, value: float) -> None:
        with pytest.raises(ConfigurationError, match=f"curriculum_decay={value!r} must be at least 0 and below 1"):
            CurriculumOptions(decay=value)

    def test_least_shares_that_add_up_to_more_than_there_is(self) -> None:
        with pytest.raises(ConfigurationError, match=r"0\.4 for 3 environments .* at most 0\.333333"):
            stream_of("abc", min_share=0.4)

    def test_one_environment_or_a_dataset(self) -> None:
        with pytest.raises(ConfigurationError, match="there is only a; give several"):
            stream_of("a")
        with pytest.raises(ConfigurationError, match="a curriculum beside a dataset"):
            build_task_stream(
                {name: spec_of(name) for name in "ab"}, seed=0, split="train",
                dataset=[{"environment": "a"}], curriculum=CurriculumOptions(),
            )  # fmt: skip

    def test_a_bad_weight(self) -> None:
        with pytest.raises(ConfigurationError, match="weight of environment 'b' is 0"):
            stream_of("ab", [1.0, 0.0])

    def test_a_checkpoint_of_another_curriculum(self) -> None:
        state = stream_of("ab").state_dict()
        with pytest.raises(ConfigurationError, match="the environments and their weights"):
            stream_of("ab", [1, 2]).load_state_dict(state)
        with pytest.raises(ConfigurationError, match="curriculum_min_share and curriculum_decay"):
            stream_of("ab", decay=0.5).load_state_dict(state)
        plain = build_task_stream({name: spec_of(name) for name in "ab"}, seed=0, split="train")
        with pytest.raises(ConfigurationError, match="the kind of task source"):
            plain.load_state_dict(state)


def test_without_a_curriculum_results_change_nothing() -> None:
    stream = build_task_stream({name: spec_of(name) for name in "ab"}, seed=0, split="train")
    task = stream.take(1)[0]
    before = stream.state_dict()
    stream.observe([group_of(task, [0.0, 1.0])])
    assert (stream.shares, stream.state_dict()) == ({}, before)
