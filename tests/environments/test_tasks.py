from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envgrad.environments.contract import inspect_environment
from envgrad.environments.sources import SHUFFLED_AS_LIST, EpochOrder, MixtureTasks, hash63
from envgrad.environments.spec import EnvironmentSpec
from envgrad.environments.tasks import TaskStream, build_task_stream
from envgrad.errors import ConfigurationError
from envgrad.types import Task


class Endless:
    def reset(self, seed: int) -> str:
        return f"Task {seed}"


def endless(name: str) -> EnvironmentSpec:
    return inspect_environment(name, Endless)[0]


def finite(name: str, train: int, evaluation: int = 3) -> EnvironmentSpec:
    class Finite:
        def reset(self, task_index: int) -> str:
            return f"Task {task_index}"

        @classmethod
        def num_tasks(cls, split: str) -> int:
            return train if split == "train" else evaluation

    return inspect_environment(name, Finite)[0]


def specs(*given: EnvironmentSpec) -> dict[str, EnvironmentSpec]:
    return {spec.name: spec for spec in given}


def indices(tasks: Iterable[Task]) -> list[int]:
    return [task.task_index for task in tasks if task.task_index is not None]


class Stream:
    """Rows without a length, which can be iterated again."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({"prompt": str(number)} for number in range(self.count))


ROWS = [{"prompt": f"{number}?", "environment": "ab"[number % 2]} for number in range(7)]

STREAMS: dict[str, Callable[[str], TaskStream]] = {
    "endless": lambda split: build_task_stream(specs(endless("a")), seed=3, split=split),
    "finite": lambda split: build_task_stream(specs(finite("a", 5)), seed=3, split=split),
    "mixture": lambda split: build_task_stream(
        specs(finite("a", 5), endless("b"), finite("c", 2)), seed=3, split=split, weights={"a": 0.5, "b": 0.3, "c": 0.2}
    ),
    "rows": lambda split: build_task_stream({}, seed=3, split=split, dataset=ROWS),
    "routed rows": lambda split: build_task_stream(
        specs(endless("a"), endless("b")), seed=3, split=split, dataset=datasets.Dataset.from_list(ROWS)
    ),
    "streaming": lambda split: build_task_stream({}, seed=3, split=split, dataset=Stream(4)),
}


class TestHash:
    def test_it_is_stable_across_processes(self) -> None:
        code = "from envgrad.environments.sources import hash63; print(hash63('seed', 7, 'train'))"
        printed = {
            subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
            ).stdout.strip()
            for seed in ("1", "2")
        }
        assert printed == {str(hash63("seed", 7, "train"))} == {"2754286626513064967"}

    @given(first=st.lists(st.integers() | st.text(), max_size=4), other=st.lists(st.integers() | st.text(), max_size=4))
    def test_different_parts_give_different_hashes_of_63_bits(
        self, first: list[int | str], other: list[int | str]
    ) -> None:
        assert 2 < hash63(*first) < 1 << 63
        assert (hash63(*first) == hash63(*other)) == ([*map(repr, first)] == [*map(repr, other)])

    def test_parts_are_kept_apart(self) -> None:
        assert (
            len({hash63("ab", "c"), hash63("a", "bc"), hash63("abc"), hash63("a;str:1:b", "c"), hash63(1), hash63("1")})
            == 6
        )


@pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS.keys())
class TestEveryStream:
    def test_taking_in_parts_is_taking_at_once(self, make: Callable[[str], TaskStream]) -> None:
        parts = make("train")
        assert [*parts.take(3), *parts.take(0), *parts.take(1), *parts.take(9)] == make("train").take(13)

    @settings(max_examples=20, deadline=None)
    @given(before=st.integers(0, 15), after=st.integers(0, 15))
    def test_a_resumed_stream_equals_the_uninterrupted_one(
        self, make: Callable[[str], TaskStream], before: int, after: int
    ) -> None:
        uninterrupted = make("train")
        expected = uninterrupted.take(before + after)[before:]
        stopped, resumed = make("train"), make("train")
        stopped.take(before)
        resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
        assert resumed.position == before
        assert resumed.take(after) == expected
        assert resumed.passes == uninterrupted.passes
        assert resumed.state_dict() == uninterrupted.state_dict()

    def test_ids_are_those_of_the_position(self, make: Callable[[str], TaskStream]) -> None:
        for number, task in enumerate(make("train").take(12)):
            assert task.position == number
            assert task.group_id == hash63(3, "train", task.environment, number)
            assert task.seed == hash63("seed", task.group_id)

    def test_state_of_another_split_or_seed_is_refused(self, make: Callable[[str], TaskStream]) -> None:
        state = make("train").state_dict()
        with pytest.raises(ConfigurationError, match=r"the split: the checkpoint has 'train', this run has 'eval'"):
            make("eval").load_state_dict(state)
        with pytest.raises(ConfigurationError, match=r"the run's seed: the checkpoint has 4, this run has 3"):
            make("train").load_state_dict({**state, "seed": 4})


def test_ids_never_meet() -> None:
    train, evaluation = STREAMS["endless"]("train").take(10_000), STREAMS["endless"]("eval").take(10_000)
    other_run = build_task_stream(specs(endless("a")), seed=4, split="train").take(10_000)
    every = [*train, *evaluation, *other_run]
    assert len({task.group_id for task in every}) == len({task.seed for task in every}) == 30_000


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 5), train=st.integers(1, 30), evaluation=st.integers(1, 30), epochs=st.integers(1, 3),
    others=st.booleans(),
)  # fmt: skip
def test_train_and_eval_visit_all_their_tasks_and_share_no_id(
    seed: int, train: int, evaluation: int, epochs: int, others: bool
) -> None:
    given = specs(finite("a", train, evaluation), *([finite("b", evaluation, train)] if others else []))
    lengths = {"train": {"a": train, "b": evaluation}, "eval": {"a": evaluation, "b": train}}
    ids: list[set[int]] = []
    for split, shuffle in (("train", True), ("eval", False)):
        stream = build_task_stream(given, seed=seed, split=split, shuffle=shuffle)
        assert stream.epoch_length is not None
        tasks = stream.take(epochs * stream.epoch_length)
        assert stream.passes == epochs
        for name in given:
            own = indices(task for task in tasks if task.environment == name)
            length = lengths[split][name]
            # equal shares: the longer environment is visited once per pass, the shorter one at least as often
            for start in range(0, length * epochs, length):
                assert sorted(own[start : start + length]) == list(range(length))
        ids.append({task.group_id for task in tasks} | {task.seed for task in tasks})
        assert len(ids[-1]) == 2 * len(tasks)
    assert not ids[0] & ids[1]


class TestFinite:
    def test_each_task_comes_once_per_epoch_in_another_order(self) -> None:
        stream = build_task_stream(specs(finite("a", 40)), seed=0, split="train")
        assert (stream.epoch_length, stream.passes) == (40, 0.0)
        tasks = stream.take(120)
        assert stream.passes == 3.0
        orders = [indices(task for task in tasks if task.epoch == epoch) for epoch in range(3)]
        assert [sorted(order) for order in orders] == [list(range(40))] * 3
        assert orders[0] != orders[1] != orders[2] != list(range(40))
        assert [task.epoch for task in tasks] == [0] * 40 + [1] * 40 + [2] * 40
        assert len({task.group_id for task in tasks}) == 120

    def test_without_shuffle_in_order(self) -> None:
        stream = build_task_stream(specs(finite("a", 3)), seed=0, split="train", shuffle=False)
        assert [task.task_index for task in stream.take(5)] == [0, 1, 2, 0, 1]

    def test_each_split_has_its_own_number(self) -> None:
        assert build_task_stream(specs(finite("a", 5, 2)), seed=0, split="eval").epoch_length == 2

    def test_endless_tasks_have_no_index_and_no_epoch(self) -> None:
        stream = STREAMS["endless"]("train")
        assert {(task.task_index, task.epoch) for task in stream.take(20)} == {(None, 0)}
        assert (stream.epoch_length, stream.passes) == (None, 0.0)

    @pytest.mark.parametrize("length", [0, -1, True, "3", 2.0])
    def test_num_tasks_must_be_a_positive_int(self, length: Any) -> None:
        class Odd(Endless):
            @classmethod
            def num_tasks(cls, split: str) -> Any:
                return 3 if split == "other" else length

        with pytest.raises(ConfigurationError, match=r"num_tasks\('train'\)"):
            build_task_stream(specs(inspect_environment("a", Odd)[0]), seed=0, split="train")

    def test_a_changed_number_of_tasks_is_refused(self) -> None:
        state = build_task_stream(specs(finite("a", 5)), seed=0, split="train").state_dict()
        with pytest.raises(
            ConfigurationError, match="num_tasks of environment 'a': the checkpoint has 5, this run has 6"
        ):
            build_task_stream(specs(finite("a", 6)), seed=0, split="train").load_state_dict(state)
        with pytest.raises(ConfigurationError, match="the kind of task source"):
            build_task_stream({}, seed=0, split="train", dataset=ROWS).load_state_dict(state)
        with pytest.raises(ConfigurationError, match=r"has no 'position'"):
            build_task_stream(specs(finite("a", 5)), seed=0, split="train").load_state_dict(
                {key: value for key, value in state.items() if key != "position"}
            )


class TestOrder:
    @pytest.mark.parametrize("length", [1, 2, 3, 17, SHUFFLED_AS_LIST, SHUFFLED_AS_LIST + 1])
    def test_every_index_once(self, length: int) -> None:
        order = EpochOrder(length, ("key",))
        assert sorted(order.at(number)[1] for number in range(length)) == list(range(length))

    def test_long_orders_differ_by_epoch_and_key_and_scatter(self) -> None:
        length = 10**9
        first = [EpochOrder(length, (1,)).at(number)[1] for number in range(500)]
        epoch = [EpochOrder(length, (1,)).at(length + number)[1] for number in range(500)]
        key = [EpochOrder(length, (2,)).at(number)[1] for number in range(500)]
        assert len({*first, *epoch, *key}) > 1490
        assert 0.4 < sum(first) / 500 / length < 0.6
        assert 200 < sum(a < b for a, b in itertools.pairwise(first)) < 300


class TestMixture:
    @settings(max_examples=25, deadline=None)
    @given(weights=st.lists(st.sampled_from([0.1, 0.2, 0.3, 1.0, 2.0, 7.0, 99.7, 1e-3]), min_size=1, max_size=9))
    def test_every_share_is_kept_within_one_at_all_times(self, weights: list[float]) -> None:
        names = [f"e{number}" for number in range(len(weights))]
        mixture = MixtureTasks([endless(name) for name in names], weights, seed=0, split="train")
        counts = Counter[str]()
        for number in range(1, 150):
            counts[mixture.draw().environment] += 1
            for name, weight in zip(names, weights, strict=True):
                assert abs(counts[name] - number * weight / sum(weights)) < 1 + 1e-9

    @settings(max_examples=15, deadline=None)
    @given(
        exponents=st.lists(st.integers(-9, 9), min_size=2, max_size=40),
        before=st.integers(0, 200),
        finite_ones=st.booleans(),
    )
    def test_extreme_weights_and_a_resume_keep_the_shares(
        self, exponents: list[int], before: int, finite_ones: bool
    ) -> None:
        weights = {f"e{number}": 10.0**exponent for number, exponent in enumerate(exponents)}
        given = specs(*(finite(name, 3) if finite_ones else endless(name) for name in weights))
        stopped, resumed = (
            build_task_stream(given, seed=0, split="train", weights=weights, shuffle=False) for _ in range(2)
        )
        counts = Counter(task.environment for task in stopped.take(before))
        resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
        total = sum(weights.values())
        for number in range(before + 1, before + 60):
            counts[resumed.take(1)[0].environment] += 1
            for name, weight in weights.items():
                assert abs(counts[name] - number * weight / total) < 1 + 1e-9

    def test_by_hand(self) -> None:
        # shares 1/2, 1/3, 1/6: draws are due by a: 2 4 6, b: 3 6, c: 6, and may come once their share has begun,
        # a: from 1 3 5, b: from 1 4, c: from 1; so 1 a, 2 b, 3 a, 4 b (before c by order), 5 a, 6 c
        stream = build_task_stream(
            specs(endless("a"), endless("b"), endless("c")), seed=0, split="train", weights={"a": 3, "b": 2, "c": 1}
        )
        assert "".join(task.environment for task in stream.take(12)) == "ababac" * 2

    def test_equal_weights_alternate_in_order(self) -> None:
        stream = build_task_stream(specs(endless("b"), endless("a")), seed=0, split="train")
        assert "".join(task.environment for task in stream.take(6)) == "bababa"

    def test_each_environment_runs_through_its_own_tasks(self) -> None:
        stream = build_task_stream(
            specs(finite("a", 4), finite("b", 2)), seed=0, split="train", weights={"a": 2, "b": 1}
        )
        assert stream.epoch_length == 6
        tasks = stream.take(12)
        assert stream.passes == 2.0
        for name, length in (("a", 4), ("b", 2)):
            own = indices(task for task in tasks if task.environment == name)
            assert sorted(own[:length]) == sorted(own[length:]) == list(range(length))
            assert [task.epoch for task in tasks if task.environment == name] == [0] * length + [1] * length

    def test_a_pass_runs_through_all(self) -> None:
        stream = build_task_stream(
            specs(finite("a", 10), finite("b", 3)), seed=0, split="train", weights={"a": 0.3, "b": 0.7}
        )
        assert stream.epoch_length == 34  # 10 / 0.3 = 33.3; b needs only 3 / 0.7
        tasks = stream.take(34)
        assert len({task.task_index for task in tasks if task.environment == "a"}) == 10
        assert len({task.task_index for task in tasks if task.environment == "b"}) == 3

    def test_one_endless_member_makes_it_endless(self) -> None:
        stream = STREAMS["mixture"]("train")
        stream.take(5)
        assert (stream.epoch_length, stream.passes) == (None, 0.0)

    def test_state_of_other_weights_is_refused(self) -> None:
        given = specs(endless("a"), endless("b"))
        state = build_task_stream(given, seed=0, split="train", weights={"a": 1, "b": 2}).state_dict()
        build_task_stream(given, seed=0, split="train", weights={"a": 0.5, "b": 1}).load_state_dict(state)
        with pytest.raises(ConfigurationError, match="the environments and their weights"):
            build_task_stream(given, seed=0, split="train", weights={"a": 1, "b": 1}).load_state_dict(state)

    @pytest.mark.parametrize(
        ("weights", "message"),
        [
            ({"a": 1.0, "c": 1.0}, r"names 'c', which is none of the environments \(a, b\)"),
            ({"a": 1.0}, r"no weight for 'b'"),
            ({"a": 1.0, "b": 0.0}, r"weight of environment 'b' is 0.0; weights must be positive"),
            ({"a": -1.0, "b": 1.0}, r"weight of environment 'a' is -1.0"),
            ({"a": float("nan"), "b": 1.0}, r"weight of environment 'a' is nan"),
            ({"a": float("inf"), "b": 1.0}, r"weight of environment 'a' is inf"),
        ],
    )
    def test_bad_weights(self, weights: dict[str, float], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            build_task_stream(specs(endless("a"), endless("b")), seed=0, split="train", weights=weights)

    def test_weights_beside_a_dataset(self) -> None:
        with pytest.raises(ConfigurationError, match="beside a dataset"):
            build_task_stream(specs(endless("a")), seed=0, split="train", weights={"a": 1.0}, dataset=ROWS)


class Indexed:
    """A dataset that counts what is read."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.read = rows, 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read += 1
        return self.rows[index]


class TestRows:
    @pytest.mark.parametrize("dataset", [ROWS, datasets.Dataset.from_list(ROWS), Indexed(ROWS)])
    def test_each_row_once_per_epoch(self, dataset: Any) -> None:
        stream = build_task_stream({}, seed=1, split="train", dataset=dataset)
        assert stream.epoch_length == 7
        tasks = stream.take(14)
        assert stream.passes == 2.0
        for epoch in (0, 1):
            own = [task for task in tasks if task.epoch == epoch]
            assert sorted(task.task_index for task in own if task.task_index is not None) == list(range(7))
            assert all(task.row == ROWS[task.task_index or 0] and task.environment == "" for task in own)
        assert [task.task_index for task in tasks[:7]] != [task.task_index for task in tasks[7:]]
        assert [task.task_index for task in tasks[:7]] != list(range(7))

    def test_the_environment_column_routes(self) -> None:
        given = specs(endless("a"), endless("b"))
        for dataset in (ROWS, datasets.Dataset.from_list(ROWS)):
            stream = build_task_stream(given, seed=0, split="train", dataset=dataset, shuffle=False)
            assert "".join(task.environment for task in stream.take(7)) == "abababa"
        one = build_task_stream(specs(endless("x")), seed=0, split="train", dataset=ROWS)
        assert {task.environment for task in one.take(7)} == {"x"}
        with pytest.raises(ConfigurationError, match=r"row 1 of the dataset has environment='b'.*use one of a$"):
            build_task_stream(specs(endless("a")), seed=0, split="train", dataset=ROWS, routed=True)

    @pytest.mark.parametrize("name", ["B", None, 3, ["a"], ""])
    def test_an_unknown_environment_is_found_at_construction(self, name: object) -> None:
        rows: list[Mapping[str, Any]] = [*ROWS, {"prompt": "?", "environment": name}]
        with pytest.raises(ConfigurationError) as raised:
            build_task_stream(specs(endless("a"), endless("b")), seed=0, split="train", dataset=rows)
        assert f"row 7 of the dataset has environment={name!r}" in str(raised.value)
        assert "use one of a, b" in str(raised.value)

    def test_an_unknown_environment_is_found_in_a_columnar_dataset_reading_one_column(self) -> None:
        read: list[list[str]] = []

        class Columns(datasets.Dataset):  # type: ignore[misc]
            def select_columns(self, column_names: Any, new_fingerprint: Any = None) -> Any:
                read.append(list(column_names))
                return super().select_columns(column_names)

            def __getitem__(self, key: Any) -> Any:
                assert not isinstance(key, str), "a whole column was read"
                return super().__getitem__(key)

        table = datasets.Dataset.from_list([*ROWS, {"prompt": "?", "environment": None}]).data
        with pytest.raises(ConfigurationError, match="row 7 of the dataset has environment=None"):
            build_task_stream(specs(endless("a"), endless("b")), seed=0, split="train", dataset=Columns(table))
        assert read == [["environment"]]

    @pytest.mark.parametrize("make", [list, datasets.Dataset.from_list])
    def test_a_dataset_may_hold_nothing_but_the_routing_column(self, make: Callable[..., Any]) -> None:
        dataset = make([{"environment": "b"}, {"environment": "a"}])
        stream = build_task_stream(
            specs(endless("a"), endless("b")), seed=0, split="train", dataset=dataset, shuffle=False
        )
        assert [(task.environment, task.row) for task in stream.take(3)] == [
            ("b", {"environment": "b"}), ("a", {"environment": "a"}), ("b", {"environment": "b"}),
        ]  # fmt: skip

    def test_a_dict_of_one_environment_routes_too(self) -> None:
        one = specs(endless("a"))
        rows = [{"environment": "a"}]
        assert build_task_stream(one, seed=0, split="train", dataset=rows, routed=True).take(1)[0].environment == "a"
        with pytest.raises(ConfigurationError, match="no column 'environment'"):
            build_task_stream(one, seed=0, split="train", dataset=[{"prompt": "?"}], routed=True)

    def test_plain_and_conversational_prompts_need_no_environment(self) -> None:
        for prompt in ("1+1?", [{"role": "user", "content": "1+1?"}]):
            for dataset in ([{"prompt": prompt}], datasets.Dataset.from_list([{"prompt": prompt}])):
                task = build_task_stream({}, seed=0, split="train", dataset=dataset).take(1)[0]
                assert (task.environment, task.row) == ("", {"prompt": prompt})

    def test_without_routing_one_row_is_read(self) -> None:
        dataset = Indexed(ROWS)
        build_task_stream(specs(endless("a")), seed=0, split="train", dataset=dataset)
        assert dataset.read == 1

    def test_several_environments_need_the_routing_column(self) -> None:
        given = specs(endless("a"), endless("b"))
        for dataset in ([{"prompt": "?"}], datasets.Dataset.from_list([{"prompt": "?"}])):
            with pytest.raises(ConfigurationError, match=r"no column 'environment'.*one of a, b"):
                build_task_stream(given, seed=0, split="train", dataset=dataset)
        with pytest.raises(ConfigurationError, match=r"row 1 of the dataset has no column 'environment'"):
            build_task_stream(given, seed=0, split="train", dataset=[ROWS[0], {"prompt": "?"}])

    def test_a_missing_prompt_is_a_key_error_only_without_environment(self) -> None:
        rows = [{"question": "1+1?"}]
        for dataset in (rows, datasets.Dataset.from_list(rows), datasets.Dataset.from_list(rows).to_iterable_dataset()):
            with pytest.raises(KeyError, match="prompt: the dataset has no column 'prompt'"):
                build_task_stream({}, seed=0, split="train", dataset=dataset)
            stream = build_task_stream(specs(endless("a")), seed=0, split="train", dataset=dataset)
            assert stream.take(1)[0].row == rows[0]
        ragged: list[Mapping[str, Any]] = [{"prompt": "?"}, {"question": "?"}]
        with pytest.raises(KeyError, match="row 1 of the dataset has no column 'prompt'"):
            build_task_stream({}, seed=0, split="train", dataset=ragged).take(2)
        with pytest.raises(KeyError, match="row 0 of the dataset has prompt=None"):
            build_task_stream({}, seed=0, split="train", dataset=[{"prompt": None}]).take(1)

    @pytest.mark.parametrize("name", ["group_id", "seed", "task_index", "split"])
    def test_a_column_that_reset_would_confuse_with_the_task(self, name: str) -> None:
        class TakesAll:
            def reset(self, **kwargs: object) -> str:
                return ""

        class TakesNone:
            def reset(self) -> str:
                return ""

        rows = [{"prompt": "?", name: 1}]
        for dataset in (rows, datasets.Dataset.from_list(rows)):
            with pytest.raises(ConfigurationError, match=rf"column '{name}'.*rename the column"):
                build_task_stream(specs(inspect_environment("a", TakesAll)[0]), seed=0, split="train", dataset=dataset)
            quiet = specs(inspect_environment("a", TakesNone)[0])
            assert build_task_stream(quiet, seed=0, split="train", dataset=dataset).take(1)
            assert build_task_stream({}, seed=0, split="train", dataset=dataset).take(1)

    @pytest.mark.parametrize("dataset", [{"train": ROWS}, "rows", 3])
    def test_what_is_no_dataset(self, dataset: Any) -> None:
        with pytest.raises(ConfigurationError, match=f"the dataset is a {type(dataset).__name__}"):
            build_task_stream({}, seed=0, split="train", dataset=dataset)

    def test_rows_that_are_no_dicts(self) -> None:
        bad: Any = ["a", "b"]
        with pytest.raises(ConfigurationError, match="row 0 of the dataset is a str"):
            build_task_stream({}, seed=0, split="train", dataset=bad)
        later: Any = [{"environment": "a"}, 5]
        with pytest.raises(ConfigurationError, match="row 1 of the dataset is a int"):
            build_task_stream(specs(endless("a")), seed=0, split="train", dataset=later, routed=True)

    @pytest.mark.parametrize("again", [[3], ["x"], [None]])
    def test_a_state_that_is_none(self, again: Any) -> None:
        tasks = build_task_stream({}, seed=0, split="train", dataset=ROWS)
        with pytest.raises(ConfigurationError, match="must be a mapping"):
            tasks.load_state_dict(tasks.state_dict() | {"again": again})

    def test_an_empty_dataset(self) -> None:
        with pytest.raises(ConfigurationError, match="the dataset has no rows"):
            build_task_stream({}, seed=0, split="train", dataset=[])

    def test_a_changed_dataset_is_refused(self) -> None:
        state = build_task_stream({}, seed=0, split="train", dataset=ROWS).state_dict()
        with pytest.raises(ConfigurationError, match="number of rows: the checkpoint has 7, this run has 6"):
            build_task_stream({}, seed=0, split="train", dataset=ROWS[:6]).load_state_dict(state)


class TestStreaming:
    def test_passes_and_positions(self) -> None:
        stream = build_task_stream({}, seed=0, split="train", dataset=Stream(3))
        assert stream.epoch_length is None
        tasks = stream.take(3)
        assert stream.passes == 0.0  # the stream has not said yet that it is through
        tasks += stream.take(3)
        assert stream.passes == 2.0
        assert [(task.epoch, task.task_index, task.row) for task in tasks] == [
            (epoch, number, {"prompt": str(number)}) for epoch in (0, 1) for number in range(3)
        ]

    def test_a_datasets_stream(self) -> None:
        def make() -> TaskStream:
            dataset = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
            return build_task_stream(specs(endless("a"), endless("b")), seed=0, split="train", dataset=dataset)

        stream, resumed = make(), make()
        assert "".join(task.environment for task in stream.take(9)) == "abababaab"
        resumed.load_state_dict(stream.state_dict())
        assert resumed.take(8) == stream.take(8)

    def test_bad_rows_are_found_when_drawn(self) -> None:
        rows = [{"prompt": "?", "environment": "a"}, {"prompt": "?", "environment": "c"}]
        stream = build_task_stream(specs(endless("a"), endless("b")), seed=0, split="train", dataset=iter(rows))
        stream.take(1)
        with pytest.raises(ConfigurationError, match="row 1 of the dataset has environment='c'"):
            stream.take(1)
        with pytest.raises(KeyError, match="row 0 of the dataset has no column 'prompt'"):
            build_task_stream({}, seed=0, split="train", dataset=iter([{"text": "?"}])).take(1)

    def test_a_datasets_stream_that_knows_its_columns_is_checked_at_construction(self) -> None:
        known = datasets.Dataset.from_list([{"prompt": "?", "seed": 1}]).to_iterable_dataset()
        with pytest.raises(ConfigurationError, match=r"no column 'environment', only \['prompt', 'seed'\]; .* of a, b"):
            build_task_stream(specs(endless("a"), endless("b")), seed=0, split="train", dataset=known)
        with pytest.raises(ConfigurationError, match="the dataset has a column 'seed', but reset gets 'seed' from the"):
            build_task_stream(specs(endless("a")), seed=0, split="train", dataset=known)

    @pytest.mark.parametrize("name", ["c", None])
    def test_a_datasets_stream_names_the_row_with_an_unknown_environment_before_it_is_used(
        self, name: str | None
    ) -> None:
        rows = datasets.Dataset.from_list([{"environment": "b"}, {"environment": name}]).to_iterable_dataset()
        stream = build_task_stream(specs(endless("a"), endless("b")), seed=0, split="train", dataset=rows)
        assert stream.take(1)[0].environment == "b"
        message = f"row 1 of the dataset has environment={name!r}, which is none of the environments; use one of a, b"
        with pytest.raises(ConfigurationError, match=message):
            stream.take(1)

    def test_a_datasets_stream_of_unknown_columns_is_checked_row_by_row(self) -> None:
        def rows() -> Iterator[dict[str, Any]]:
            yield {"prompt": "?", "environment": "a"}
            yield {"prompt": "?"}

        made = datasets.IterableDataset.from_generator(rows)
        assert made.column_names is None
        stream = build_task_stream(specs(endless("a"), endless("b")), seed=0, split="train", dataset=made)
        stream.take(1)
        with pytest.raises(ConfigurationError, match="row 1 of the dataset has no column 'environment'"):
            stream.take(1)

    def test_an_iterator_that_ends(self) -> None:
        stream = build_task_stream({}, seed=0, split="train", dataset=iter([{"prompt": "?"}]))
        with pytest.raises(ConfigurationError, match=r"ended after 1 rows and gives none when iterated again"):
            stream.take(2)
        with pytest.raises(ConfigurationError, match="has no rows"):
            build_task_stream({}, seed=0, split="train", dataset=iter([])).take(1)

    def test_loading_needs_an_unread_iterator_that_is_long_enough(self) -> None:
        def rows() -> Iterator[dict[str, Any]]:
            return iter([{"prompt": str(number)} for number in range(4)])

        stream = build_task_stream({}, seed=0, split="train", dataset=rows())
        stream.take(2)
        fresh = build_task_stream({}, seed=0, split="train", dataset=rows())
        fresh.load_state_dict(stream.state_dict())
        assert fresh.take(2) == stream.take(2)
        with pytest.raises(ConfigurationError, match="an iterator that has been read from"):
            stream.load_state_dict(fresh.state_dict())
        with pytest.raises(ConfigurationError, match=r"stands at row 4 .* ends after 3"):
            build_task_stream({}, seed=0, split="train", dataset=Stream(3)).load_state_dict(fresh.state_dict())


def test_neither_environment_nor_dataset() -> None:
    with pytest.raises(ValueError, match="neither a dataset nor an environment"):
        build_task_stream({}, seed=0, split="train")


def test_a_spec_under_another_name() -> None:
    with pytest.raises(ConfigurationError, match="environment 'b' was inspected under the name 'a'"):
        build_task_stream({"b": endless("a")}, seed=0, split="train")


def test_a_negative_take() -> None:
    with pytest.raises(ConfigurationError, match=r"take\(-1\)"):
        STREAMS["endless"]("train").take(-1)
