from __future__ import annotations

import enum
import random
from typing import Any, Literal, Optional, Union

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envgrad.environments.check.actions import Hints, random_arguments, random_text, random_value, written_arguments
from envgrad.environments.tools import build_tool, check_arguments


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


def everything(
    a: int,
    b: float,
    c: str,
    d: bool,
    e: Literal["x", "y"],
    f: Color,
    g: list[int],
    h: dict[str, float],
    i: tuple[int, str],
    j: int | str,
    k: Optional[int],  # noqa: UP045
    m: Any,
    n: list[list[str]],
    o: Union[list[int], None] = None,  # noqa: UP007
    p: int = 3,
) -> str: ...


TOOL = build_tool("everything", everything)


@given(seed=st.integers(0, 2**32), prompt=st.text(max_size=80))
def test_random_arguments_fit_every_schema(seed: int, prompt: str) -> None:
    arguments = random_arguments(TOOL, prompt, random.Random(seed))
    assert set("abcdefghijkmn") <= set(arguments)
    check_arguments(TOOL, arguments)  # raises where one does not fit


def test_optional_arguments_are_given_at_times() -> None:
    rng = random.Random(0)
    given_ = [set("op") & set(random_arguments(TOOL, "", rng)) for _ in range(100)]
    assert {frozenset(names) for names in given_} == {frozenset(), frozenset("o"), frozenset("p"), frozenset("op")}


def test_every_kind_of_value_comes_up() -> None:
    rng = random.Random(0)
    values = [random_value({"anyOf": [{"type": "integer"}, {"type": "string"}]}, Hints(), rng) for _ in range(50)]
    assert {type(value) for value in values} == {int, str}
    assert {random_value({"enum": ["n", "s"]}, Hints(), rng) for _ in range(50)} == {"n", "s"}
    assert {random_value({"type": "boolean"}, Hints(), rng) for _ in range(50)} == {True, False}


def test_numbers_and_words_that_are_mentioned_are_likelier() -> None:
    def guess(number: int, word: str) -> str:
        """
        Guess.

        Args:
            number: From 100 to 110.
            word: Like d1d8.
        """
        return ""

    tool = build_tool("guess", guess)
    rng = random.Random(0)
    drawn = [random_arguments(tool, "A number, 7 or 9?", rng) for _ in range(200)]
    numbers = [int(str(arguments["number"])) for arguments in drawn]
    assert 120 < sum(100 <= number <= 110 for number in numbers) < 180  # 3 of 4
    assert any(arguments["word"] == "d1d8" for arguments in drawn)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("from 1 to 16.", (1, 16)), ("-3 to 5", (-3, 5)), ("v1.25 and x2", ()), ("12345678", ()), ("7, 7 and 8", (7, 8))],
)
def test_numbers_in_texts(text: str, numbers: tuple[int, ...]) -> None:
    assert Hints.of(text).numbers == numbers


def test_a_text_fills_every_free_string() -> None:
    def answer(text: str, kind: Literal["a"], sure: bool = False) -> str: ...
    def move(where: Literal["n"]) -> str: ...

    rng = random.Random(0)
    assert written_arguments(build_tool("answer", answer), "hm", "", rng) == {"text": "hm", "kind": "a"}
    assert written_arguments(build_tool("move", move), "hm", "", rng) is None


def test_random_texts_differ_and_repeat_by_seed() -> None:
    texts = [random_text("Say salt or iron.", random.Random(seed)) for seed in range(40)]
    assert len(set(texts)) > 15
    assert texts == [random_text("Say salt or iron.", random.Random(seed)) for seed in range(40)]
    assert any("salt" in text for text in texts)
