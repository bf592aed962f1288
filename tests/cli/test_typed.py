from __future__ import annotations

from enum import Enum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envgrad.cli.typed import Answer, Form, NotUnderstood, read_arguments, read_line, read_value
from envgrad.environments.tools import build_tool, check_arguments


class Side(Enum):
    LEFT = "left"


def move(direction: str, steps: int = 1) -> str:
    """Move."""
    return ""


def say(text: str) -> str:
    """Say."""
    return ""


def look() -> str:
    """Look."""
    return ""


def put(cells: list[int], where: dict[str, int], side: Side = Side.LEFT, hard: bool = False) -> str:
    """Put."""
    return ""


def free(**more: Any) -> str:
    """Free."""
    return ""


TOOLS = [build_tool(function.__name__, function) for function in (move, say, look, put, free)]


def called(line: str) -> tuple[str | None, Any]:
    answer = read_line(line, TOOLS)
    assert isinstance(answer, Answer) and len(answer.calls) == 1 and not answer.text
    return answer.calls[0].name, answer.calls[0].arguments


@pytest.mark.parametrize(
    ("line", "name", "arguments"),
    [
        ("move direction=north steps=2", "move", {"direction": "north", "steps": 2}),
        ("move(direction=north, steps=2)", "move", {"direction": "north", "steps": 2}),
        ('move {"direction": "north"}', "move", {"direction": "north"}),
        ("move far north", "move", {"direction": "far north"}),  # the only one that is required
        ("say it is steps=2", "say", {"text": "it is steps=2"}),  # no argument of this tool
        ("say x=2", "say", {"text": "x=2"}),
        ('say "3"', "say", {"text": "3"}),
        ("say 3", "say", {"text": "3"}),
        ('say text="a  steps=1 b"', "say", {"text": "a  steps=1 b"}),
        ("look", "look", {}),
        ("look()", "look", {}),
        (
            'put cells=[1, 2] where={"a": 1} side=left hard=true',
            "put",
            {"cells": [1, 2], "where": {"a": 1}, "side": "left", "hard": True},
        ),
        ("free a=1 b=two words", "free", {"a": 1, "b": "two words"}),
    ],
)
def test_calls(line: str, name: str, arguments: dict[str, object]) -> None:
    assert called(line) == (name, arguments)


def test_a_tool_without_its_arguments_is_a_form() -> None:
    form = read_line("move", TOOLS)
    assert isinstance(form, Form) and form.tool.name == "move"


def test_calls_as_a_model_writes_them_are_not_checked() -> None:
    assert called('{"name": "move", "arguments": {"steps": "many"}}') == ("move", {"steps": "many"})
    assert called('{"name": "nothing"}') == ("nothing", {})
    assert called('{"name": 3}') == (None, {})
    both = read_line('[{"name": "look"}, {"name": "move", "arguments": 5}]', TOOLS)
    assert isinstance(both, Answer) and [call.arguments for call in both.calls] == [{}, 5]


@pytest.mark.parametrize("line", ["I give up", "the answer is 42", "[1, 2]", '{"result": 3}', "lookout tower far away"])
def test_all_else_is_text(line: str) -> None:
    assert read_line(line, TOOLS) == Answer(text=line)


def test_text_can_look_like_anything() -> None:
    assert read_line("= move north", TOOLS) == Answer(text="move north")
    assert read_line("move north", []) == Answer(text="move north")
    assert read_line("= q", []) == Answer(text="q")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("mvoe north", "did you mean move?"),
        ("jump(high)", "the tools are move, say, look, put, free"),
        ("jump height=3", "begin the line with '='"),
        ("move direction=north steps=many", "argument 'steps' must be an integer"),
        ("move steps=2", "missing argument 'direction'"),
        ("move()", "missing argument 'direction'"),
        ("move speed=2", "move has no argument 'speed'"),
        ("put 1 2", "Say which arguments these are: name=value"),
        ("look around", "Say which arguments"),
    ],
)
def test_what_is_probably_a_slip_is_asked_again(line: str, message: str) -> None:
    with pytest.raises(NotUnderstood, match=None) as raised:
        read_line(line, TOOLS)
    assert message in str(raised.value)


@given(st.text())
def test_no_line_breaks_it(line: str) -> None:
    try:
        answer = read_line(line, TOOLS)
    except NotUnderstood:
        return
    assert isinstance(answer, Form) or answer.calls or answer.text is not None


@given(
    st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters="\"'[{(=,"), min_size=1),
    st.integers(),
)
def test_words_and_numbers_arrive_as_they_are(word: str, number: int) -> None:
    arguments = read_arguments(TOOLS[0], f"direction={word} steps={number}")
    assert check_arguments(TOOLS[0], arguments) == {"direction": word, "steps": number}


def test_values() -> None:
    assert read_value("true", {"type": "boolean"}) is True
    assert read_value("true", {"type": "string"}) == "true"
    assert read_value("'a b'", {"type": "string"}) == "a b"
    assert read_value("1.5", {"type": ["integer", "number"]}) == 1.5
    assert read_value("2", {"type": "integer", "enum": [1, 2]}) == 2
    assert read_value("null", {"type": "integer", "nullable": True}) is None
