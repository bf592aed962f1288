from __future__ import annotations

import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envgrad.environments.contract import inspect_environment
from envgrad.environments.start import (
    StartMode,
    compare_starts,
    copy_hazard,
    decide_start,
    fingerprint,
    fork_instance,
    is_copy_safe,
)
from envgrad.environments.state_walk import Walker, first_difference
from envgrad.errors import EnvironmentContractError
from envgrad.types import Task

MESSAGES = [{"role": "user", "content": "Go."}]


class Color(Enum):
    RED = 1
    BLUE = 2


class Point(NamedTuple):
    x: int
    y: object


@dataclass
class Cell:
    value: object = 0


@dataclass(frozen=True, slots=True)
class FrozenSlots:
    value: object


class Slots:
    __slots__ = ("hidden", "unset")

    def __init__(self, hidden: object) -> None:
        self.hidden = hidden


class Env:
    def reset(self) -> str:
        return "Go."


def holding(**state: object) -> Env:
    env = Env()
    vars(env).update(state)
    return env


def task(row: dict[str, object] | None = None) -> Task:
    return Task(position=0, split="train", environment="e", group_id=5, seed=6, row=row)


def compare(first: object, other: object) -> str | None:
    spec, _ = inspect_environment("env", Env)
    return compare_starts(fingerprint(first, spec, MESSAGES, []), fingerprint(other, spec, MESSAGES, []))


class TestDecision:
    def mode(self, kind: Callable[[], object], row: dict[str, object] | None = None) -> StartMode:
        columns = frozenset(row) if row is not None else None
        spec, probe = inspect_environment("e", kind, columns=columns)
        return decide_start(spec, task(row), probe)

    def test_named_identity_comes_first(self) -> None:
        class Seeded(Env):
            def reset(self, seed: int = 0, word: str = "") -> str:
                return ""

            def fork(self) -> Seeded:
                return Seeded()

        assert self.mode(Seeded, {"word": "x"}) is StartMode.IDENTITY

    def test_a_named_column_makes_the_row_the_task(self) -> None:
        class Word(Env):
            def reset(self, word: str = "") -> str:
                return word

            def fork(self) -> Word:
                return Word()

        assert self.mode(Word, {"word": "x", "prompt": "p"}) is StartMode.ROW
        assert self.mode(Word, {"other": "x", "prompt": "p"}) is StartMode.FORK
        assert self.mode(Word) is StartMode.FORK

    def test_prompt_environment_and_kwargs_do_not_name_a_task(self) -> None:
        class Takes(Env):
            def reset(self, prompt: object = None, environment: str = "", **kwargs: object) -> str:
                return ""

        assert self.mode(Takes, {"prompt": "p", "environment": "e", "word": "x"}) is StartMode.COPY

    def test_copy_only_where_safe(self) -> None:
        class Closes(Env):
            def close(self) -> None: ...

        class Client(Env):
            def __init__(self) -> None:
                self.events = iter([1])

        assert self.mode(Env) is StartMode.COPY
        assert self.mode(Closes) is StartMode.INDEPENDENT
        assert self.mode(Client) is StartMode.INDEPENDENT
        assert decide_start(inspect_environment("e", Client)[0], task()) is StartMode.COPY  # not known without one
        assert decide_start(inspect_environment("e", Closes)[0], task()) is StartMode.INDEPENDENT
        assert [mode.resets_each for mode in StartMode] == [True, True, False, False, True]


SAFE: dict[str, object] = {
    "scalars": [None, True, 1, 2.5, 1j, "text", b"bytes", Color.RED, date(2020, 1, 2), datetime.now(UTC), uuid.uuid4()],
    "dict": {"a": {1: (2, {3}, frozenset({4}))}, (1, "x"): deque([1]), Color.BLUE: [Color.RED]},
    "collections": [defaultdict(list, a=[1]), Counter("aab"), OrderedDict(a=1), array("d", [1.0]), bytearray(b"x")],
    "numpy": [np.zeros((2, 2)), np.float32(1), np.random.default_rng(0), np.array([{"a": 1}], dtype=object)],
    "random": random.Random(3),
    "named tuple": Point(1, [2]),
    "dataclass": Cell(Cell([1])),
    "frozen slots": FrozenSlots([1]),
    "slots": Slots({"a": 1}),
    "namespace class": Cell,
    "function": len,
    "plain function": holding,
    "another temporary name": tempfile.gettempdir() + "/does-not-exist-anywhere",
}


@pytest.mark.parametrize("state", SAFE.values(), ids=SAFE.keys())
def test_plain_state_is_copied_and_independent(state: object) -> None:
    env = holding(state=state, before=1)
    assert copy_hazard(env) is None
    copied = fork_instance(env)
    assert copied is not env
    assert compare(env, copied) is None


def test_a_copy_has_its_own_generator_and_containers() -> None:
    env = holding(rng=random.Random(1), numpy_rng=np.random.default_rng(1), board=[[0]], grid=np.zeros(2))
    copied: Any = fork_instance(env)
    copied.board[0][0] = copied.grid[0] = 1
    assert env.__dict__["board"] == [[0]] and env.__dict__["grid"].sum() == 0
    assert copied.rng.random() == env.__dict__["rng"].random()
    assert copied.numpy_rng.random() == env.__dict__["numpy_rng"].random()


def unsafe_values(folder: Path) -> dict[str, object]:
    class Custom:
        def __deepcopy__(self, memo: object) -> Custom:
            return self

    class Reduced:
        def __reduce__(self) -> tuple[object, ...]:
            return (Reduced, ())

    class Singleton:
        only: Singleton | None = None

        def __new__(cls) -> Singleton:
            cls.only = cls.only or super().__new__(cls)
            return cls.only

    class Pickled:
        def __getstate__(self) -> object:
            return {}

    class Proxy:
        def __getattr__(self, name: str) -> object:
            raise AttributeError(name)

    class Handle:
        def __exit__(self, *error: object) -> None: ...

    deep: list[object] = []
    for _ in range(500):
        deep = [deep]
    counter = [0]
    return {
        "deepcopy hook": Custom(),
        "reduce hook": Reduced(),
        "own __new__": Singleton(),
        "state hook": Pickled(),
        "proxy": Proxy(),
        "handle": Handle(),
        "folder": tempfile.TemporaryDirectory(dir=folder),
        "path": Path("x"),
        "lock": threading.Lock(),
        "thread": threading.Thread(),
        "event": threading.Event(),
        "generator": (x for x in [1]),
        "iterator": iter([1]),
        "module": random,
        "closure": lambda: counter,
        "bound method": Env().reset,
        "bound builtin": [].append,
        "memmap": np.memmap(folder / "map", dtype="uint8", mode="w+", shape=(3,)),
        "object array": np.array([threading.Lock()], dtype=object),
        "in a slot": Slots(threading.Lock()),
        "in a default dict": defaultdict([].copy),
        "in a set": {Env().reset},
        "as a key": {threading.Lock(): 1},
        "too deep": deep,
        "system random": random.SystemRandom(),
        "exception": ValueError("x"),
    }


def test_what_is_not_plain_is_not_copied(tmp_path: Path) -> None:
    for name, value in unsafe_values(tmp_path).items():
        hazard = copy_hazard(holding(board=[1], held={"a": [value]}))
        assert hazard is not None and hazard.startswith("held['a'][0]"), name
    with socket.socket() as connection, open(tmp_path / "file", "w") as file:
        assert not is_copy_safe(holding(held=connection))
        assert not is_copy_safe(holding(held=file))
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert not is_copy_safe(holding(held=process))


def test_a_temporary_folder_kept_as_text_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tempfile.mkdtemp()
    assert copy_hazard(holding(folder=folder)) == "folder is a path in the temporary folder, which copies would share"
    assert not is_copy_safe(holding(names=["a", folder]))
    assert is_copy_safe(holding(folder=folder + "-gone"))


def test_a_cycle_is_walked_once() -> None:
    env = holding(rooms=[Room() for _ in range(3)])
    rooms = vars(env)["rooms"]
    for room in rooms:
        room.exits = rooms
    assert is_copy_safe(env)
    vars(rooms[2])["lock"] = threading.Lock()
    assert copy_hazard(env) is not None


class Room:
    exits: list[Room]


class TestFork:
    def test_fork_is_used_before_deepcopy(self) -> None:
        class Forks(Env):
            forked_from: Forks | None = None

            def fork(self) -> Forks:
                new = Forks()
                new.forked_from = self
                return new

        env = Forks()
        forked = fork_instance(env)
        assert isinstance(forked, Forks) and forked.forked_from is env

    def test_a_fork_that_is_no_new_instance_is_an_error(self) -> None:
        class Same(Env):
            def fork(self) -> Same:
                return self

        class Nothing(Env):
            def fork(self) -> None: ...

        class Async(Env):
            async def fork(self) -> Async:
                return Async()

        with pytest.raises(EnvironmentContractError, match=r"fork\(\) of .*Same returned the instance itself"):
            fork_instance(Same())
        with pytest.raises(EnvironmentContractError, match=r"Nothing returned None"):
            fork_instance(Nothing())
        with pytest.raises(EnvironmentContractError, match=r"Async is async"):
            fork_instance(Async())


DIFFERENT: list[tuple[dict[str, object], dict[str, object], str]] = [
    ({"hidden": 3}, {"hidden": 7}, "hidden: 3 != 7"),
    ({"a": 1, "b": [1, [2, 3]]}, {"a": 1, "b": [1, [2, 4]]}, "b[1][1]: 3 != 4"),
    ({"board": Cell([Cell(1)])}, {"board": Cell([Cell(2)])}, "board.value[0].value: 1 != 2"),
    ({"d": {"x": 1, "y": 2}}, {"d": {"y": 2, "x": 0}}, "d['x']: 1 != 0"),
    ({"d": {"x": 1}}, {"d": {}}, "d['x']: 1 != (missing)"),
    ({"d": {(1, 2): "a"}}, {"d": {(1, 2): "b"}}, "d[(1, 2)]: 'a' != 'b'"),
    ({"only": 1}, {}, "only: 1 != (missing)"),
    ({"s": {1, 2}}, {"s": {2, 3}}, "s: [1] != [3]"),
    ({"l": [1, 2]}, {"l": [1, 2, 3]}, "l: 2 items != 3 items"),
    ({"l": [1]}, {"l": (1,)}, "l: list of 1 items != tuple of 1 items"),
    ({"x": Slots(1)}, {"x": Slots(2)}, "x.hidden: 1 != 2"),
    ({"x": Point(1, 2)}, {"x": Point(1, 3)}, "x[1]: 2 != 3"),
    ({"g": np.array([[1, 2], [3, 4]])}, {"g": np.array([[1, 2], [3, 5]])}, "g[1][1]: 4 != 5"),
    (
        {"g": np.zeros(2)},
        {"g": np.zeros(3)},
        "g: ndarray of float64 (2,) of 2 items != ndarray of float64 (3,) of 3 items",
    ),
    ({"c": Color.RED}, {"c": Color.BLUE}, "c: <Color.RED: 1> != <Color.BLUE: 2>"),
    ({"k": Cell}, {"k": Slots}, f"k: reference to {__name__}.Cell != reference to {__name__}.Slots"),
    ({"n": float("nan")}, {"n": 0.0}, "n: nan != 0.0"),
    ({"t": "x" * 80 + "cat" + "z" * 80}, {"t": "x" * 80 + "dog" + "z" * 80}, "t: ...'" + "x" * 20 + "cat" + "z" * 33),
]


@pytest.mark.parametrize(("first", "other", "expected"), DIFFERENT, ids=[case[2][:20] for case in DIFFERENT])
def test_the_difference_is_named(first: dict[str, object], other: dict[str, object], expected: str) -> None:
    text = compare(holding(**first), holding(**other))
    assert text is not None and text.startswith(expected)
    assert compare(holding(**first), holding(**first)) is None


def test_random_generators_compare_by_state() -> None:
    makers: list[Callable[[int], Any]] = [random.Random, np.random.default_rng, np.random.RandomState]
    for make in makers:
        first, same, other = make(1), make(1), make(2)
        assert compare(holding(rng=first), holding(rng=same)) is None
        assert (compare(holding(rng=first), holding(rng=other)) or "").startswith("rng: ")
        same.random()
        assert "in state" in (compare(holding(rng=first), holding(rng=same)) or "")


def test_large_arrays_compare_by_digest() -> None:
    first, other = np.zeros(100_000), np.zeros(100_000)
    assert compare(holding(g=first), holding(g=other)) is None
    other[-1] = 1
    assert (compare(holding(g=first), holding(g=other)) or "").startswith("g: ndarray of float64 (100000,)")


def test_the_picture_is_not_changed_by_later_turns() -> None:
    spec, _ = inspect_environment("env", Env)
    env = holding(board=[[1], {2}], grid=np.zeros(2), cell=Cell([1]), text=bytearray(b"a"))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
    before = fingerprint(env, spec, messages, [])
    state = vars(env)
    same = fingerprint(holding(**fork_instance(env).__dict__), spec, MESSAGES, [])
    state["board"][0][0] = 9
    state["grid"][0] = 9
    state["cell"].value.append(9)
    state["text"][0] = 9
    messages[0]["content"] = "changed"
    assert compare_starts(before, same) is None


def test_messages_and_tools_are_compared_first() -> None:
    spec, _ = inspect_environment("env", Env)
    env, other = holding(hidden=1), holding(hidden=2)
    tools: list[dict[str, object]] = [{"type": "function", "function": {"name": "guess"}}]

    def start(instance: object, content: str, schemas: list[dict[str, object]]) -> Any:
        return fingerprint(instance, spec, [{"role": "user", "content": content}], schemas)

    first = start(env, "A", tools)
    assert compare_starts(first, start(other, "B", tools)) == "messages[0]['content']: 'A' != 'B'"
    assert compare_starts(first, start(other, "A", [])) == "tools: 1 items != 0 items"
    renamed: list[dict[str, object]] = [{"type": "function", "function": {"name": "look"}}]
    assert compare_starts(first, start(env, "A", renamed)) == "tools[0]['function']['name']: 'guess' != 'look'"
    assert compare_starts(first, start(other, "A", tools)) == "hidden: 1 != 2"


def test_start_state_overrides_the_attributes() -> None:
    class Told(Env):
        def __init__(self) -> None:
            self.clock = time.perf_counter_ns()
            self.word = "cat"

        def start_state(self) -> object:
            return {"word": self.word}

    class Async(Env):
        async def start_state(self) -> object:
            return 1

    spec, first = inspect_environment("told", Told)
    other = Told()
    assert compare(first, other) == f"clock: {vars(first)['clock']} != {other.clock}"
    assert compare_starts(fingerprint(first, spec, MESSAGES, []), fingerprint(other, spec, MESSAGES, [])) is None
    other.word = "dog"
    text = compare_starts(fingerprint(first, spec, MESSAGES, []), fingerprint(other, spec, MESSAGES, []))
    assert text == "start_state()['word']: 'cat' != 'dog'"


def test_a_deterministic_environment_raises_no_false_alarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    class Client:
        def __init__(self) -> None:
            self.request_id = random.random()

    def instance(seed: int) -> Env:
        rng = random.Random(seed)
        env = holding(
            rng=rng, board=[[rng.random() for _ in range(3)]], gaps=[float("nan"), np.array([np.nan])],
            run_id=uuid.uuid4(), started=datetime.now(UTC), lock=threading.RLock(), event=threading.Event(),
            folder=tempfile.mkdtemp(), path=Path(tempfile.mkdtemp()), client=Client(), events=iter([1]),
            nothing=object(), call=Env().reset, words={"b", "a", "c"},
        )  # fmt: skip
        vars(env)["self"] = env
        return env

    assert compare(instance(4), instance(4)) is None
    assert (compare(instance(4), instance(5)) or "").startswith("board[0][0]: ")
    spec, _ = inspect_environment("env", Env)
    not_compared = fingerprint(instance(4), spec, MESSAGES, []).not_compared
    assert [text.split(" ")[0] for text in not_compared] == ["client", "events", "nothing"]


def test_dictionaries_compare_without_their_order() -> None:
    def world(order: str, value: int) -> Env:
        shared = [value]
        return holding(d=dict.fromkeys(order, shared), e=shared)

    assert compare(world("ab", 1), world("ba", 1)) is None
    assert compare(world("ab", 1), world("ba", 2)) == "d['a'][0]: 1 != 2"


def test_a_goal_that_is_one_of_several_equal_objects_is_told_apart() -> None:
    def world(goal: int) -> Env:
        rooms = [Cell(0), Cell(0), Cell(0)]
        return holding(a_rooms=rooms, goal=rooms[goal])

    assert compare(world(1), world(1)) is None
    assert compare(world(1), world(2)) == "goal: the same object as a_rooms[1] != the same object as a_rooms[2]"


def test_cycles_depth_and_size_are_bounded() -> None:
    def tangle(last: int) -> Env:
        rooms = [Cell() for _ in range(300)]
        for room in rooms:
            room.value = [rooms, room]
        chain: list[object] = [last]
        for _ in range(5000):
            chain = [chain]
        return holding(rooms=rooms, chain=chain, many=[Cell(i) for i in range(20_000)], z=last)

    spec, _ = inspect_environment("env", Env)
    first, other = fingerprint(tangle(1), spec, MESSAGES, []), fingerprint(tangle(1), spec, MESSAGES, [])
    assert compare_starts(first, other) is None
    texts = " ".join(first.not_compared)
    assert "150 levels deep" in texts and "more than 20000 values" in texts


def test_comparing_siblings_of_a_small_environment_is_cheap() -> None:
    spec, _ = inspect_environment("env", Env)

    def instance() -> Env:
        return holding(board=[[0] * 3 for _ in range(3)], hidden="word", rng=random.Random(3), turn=0, log=[])

    siblings = [instance() for _ in range(16)]
    best = min(timed(lambda: pictures(siblings, spec)) for _ in range(5))
    assert best / 16 < 5e-3


def pictures(siblings: list[Env], spec: Any) -> None:
    first, *others = [fingerprint(sibling, spec, MESSAGES, []) for sibling in siblings]
    assert all(compare_starts(first, other) is None for other in others)


def timed(function: Callable[[], None]) -> float:
    started = time.thread_time()
    function()
    return time.thread_time() - started


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


@given(value=JSON)
def test_a_copy_never_differs(value: object) -> None:
    env = holding(value=value)
    assert is_copy_safe(env)
    assert compare(env, fork_instance(env)) is None


def same_value(first: object, other: object) -> bool:
    if isinstance(first, dict) and isinstance(other, dict):
        return first.keys() == other.keys() and all(same_value(first[key], other[key]) for key in first)
    if isinstance(first, list) and isinstance(other, list):
        return len(first) == len(other) and all(same_value(a, b) for a, b in zip(first, other, strict=True))
    return first == other or (first != first and other != other)


@given(first=JSON, other=JSON)
def test_values_differ_exactly_where_python_says_so(first: object, other: object) -> None:
    found = first_difference(Walker().walk(first, "v"), Walker().walk(other, "v"), "v")
    assert (found is None) == same_value(first, other)


@dataclass
class Extended(dict[str, int]):
    extra: list[int] = field(default_factory=list)


def test_attributes_of_container_subclasses_count() -> None:
    assert compare(holding(x=Extended([1])), holding(x=Extended([2]))) == "x.extra[0]: 1 != 2"
    first, other = Extended(), Extended()
    other["a"] = 1
    assert compare(holding(x=first), holding(x=other)) == "x['a']: (missing) != 1"
