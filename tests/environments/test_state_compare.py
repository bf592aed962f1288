from __future__ import annotations

import copy
import random
import tempfile
import threading
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envgrad.environments import state_compare
from envgrad.environments.state_compare import same_state
from envgrad.environments.state_walk import Walker, first_difference


class Color(Enum):
    RED = 1
    BLUE = 2


class Point(NamedTuple):
    x: int
    y: object


@dataclass
class Cell:
    value: object = 0


class Slots:
    __slots__ = ("hidden", "unset")

    def __init__(self, hidden: object) -> None:
        self.hidden = hidden


class Text(str):
    """Reads as text, but its ``==`` is the user's."""

    __slots__ = ()
    asked = 0

    def __eq__(self, other: object) -> bool:
        type(self).asked += 1
        return True

    __hash__ = str.__hash__


class Weird:
    """Answers every question with yes, as some mocks do."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        raise AssertionError("user code must not run")

    __hash__ = None  # type: ignore[assignment]


EQUAL = [
    None, True, 3, 2.5, float("nan"), 1j, "text", b"bytes", range(3), Color.RED, Cell, len, Cell().__init__,
    [1, "a", None], [1.0, float("nan")], [[1, 2], [3]], (1, (2, [3])), {"a": {"b": [1]}}, {(1, 2): "x", 3: "y"},
    {1, 2}, frozenset({(1, 2)}), deque([1]), defaultdict(list, a=[1]), Counter("aab"), OrderedDict(a=1),
    bytearray(b"x"), Point(1, [2]), Cell(Cell([1])), Slots({"a": 1}), random.Random(4),
    np.random.default_rng(4), np.random.RandomState(4),
    np.zeros((2, 3)), np.array([float("nan")]), np.float32(1), np.array([{"a": 1}], dtype=object), Path("x/y"),
    {Color.RED: [1]}, {"weird": [Weird(1)]},
]  # fmt: skip


@pytest.mark.parametrize("value", EQUAL, ids=lambda value: type(value).__name__)
def test_a_copy_is_the_same(value):
    copied = copy.deepcopy(value)
    assert same_state({"held": value, "again": value}, {"held": copied, "again": copied})


DIFFERENT = [
    (1, 2), (1, "1"), (None, 0), ([1, 2], [1, 3]), ([1], [1, 2]), ([[1]], [[2]]), ((1, [2]), (1, [3])),
    ({"a": 1}, {"a": 2}),
    ({"a": 1}, {"b": 1}), ({"a": 1}, {}), ({1}, {2}), (Cell(1), Cell(2)), (Cell([1]), Slots([1])), (Slots(1), Slots(2)),
    (Point(1, 2), Point(1, 3)), (deque([1]), deque([2])), (Color.RED, Color.BLUE), (Cell, Slots), (len, max),
    (random.Random(1), random.Random(2)), (np.random.default_rng(1), np.random.default_rng(2)),
    (np.random.RandomState(1), np.random.RandomState(2)), (np.zeros(2), np.zeros(3)), (np.zeros(2), np.ones(2)),
    (np.zeros(2), np.zeros(2, dtype=int)), (np.float32(1), np.float32(2)), ({(1, 2): 1}, {(1, 2): 2}), ("cat", "dog"),
    (Weird(1), Weird(2)), (bytearray(b"a"), bytearray(b"b")), (Path("a"), Path("b")), (float("nan"), 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("first", "other"), DIFFERENT, ids=lambda value: type(value).__name__)
def test_a_difference_is_never_passed_over(first, other):
    assert not same_state({"held": [first]}, {"held": [other]})
    assert not same_state(Cell(first), Cell(other))


def test_user_code_is_not_run():
    assert same_state([Text("a")], [Text("a")]) and Text.asked == 0
    assert same_state([1, Weird(1)], [1, Weird(1)])
    assert not same_state([None], [np.zeros(2)]), "None == array has no truth value"
    assert not same_state([Text("a")], [Text("b")]) and not same_state({Text("a"): 1}, {Text("a"): 2})


def test_what_is_skipped_by_the_picture_is_skipped_here(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    class MyClient:
        def __init__(self):
            self.token = random.random()

    def state():
        return {"id": uuid.uuid4(), "lock": threading.Lock(), "folder": tempfile.mkdtemp(), "client": MyClient(),
                "events": iter([1]), "path": Path(tempfile.mkdtemp()), "nothing": object()}  # fmt: skip

    assert same_state(state(), state())


def test_shared_objects_must_be_shared_alike():
    def world(shared):
        a, b = [1], [1]
        return {"a": a, "b": b, "c": a if shared == "a" else b}

    assert same_state(world("a"), world("a"))
    assert not same_state(world("a"), world("b"))
    cycle, other = [1], [1]
    cycle.append(cycle)
    other.append(other)
    assert same_state(cycle, other)


def test_bounds_end_the_walk(monkeypatch):
    def nested(depth, leaf):
        value = [leaf]
        for _ in range(depth):
            value = [value]
        return value

    assert not same_state(nested(100, 1), nested(100, 2))
    assert same_state(nested(400, 1), nested(400, 2)), "deeper than the bound"
    monkeypatch.setattr(state_compare, "MAX_NODES", 10)
    assert not same_state([[i] for i in range(5)], [[i if i < 4 else 9] for i in range(5)])
    assert same_state([[i] for i in range(20)], [[i if i < 19 else 99] for i in range(20)])


leaves = st.none() | st.booleans() | st.integers(-2, 2) | st.floats(width=16) | st.sampled_from(["", "a", "b"])
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.sampled_from("abc") | st.integers(0, 2), inner, max_size=3)
        | st.builds(Cell, inner)
        | st.builds(Slots, inner)
        | st.sets(st.integers(0, 3), max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(values, values)
def test_a_yes_is_a_yes_of_the_picture(first, other):
    def picture(value):
        return Walker().walk(value, "")

    if same_state(first, other):
        assert first_difference(picture(first), picture(other)) is None
    assert same_state(first, copy.deepcopy(first))
