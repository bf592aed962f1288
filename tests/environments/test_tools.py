from __future__ import annotations

import copy
import enum
import functools
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils import get_json_schema

from envgrad.environments.tools import (
    build_tool,
    build_tools,
    check_arguments,
    combine_tools,
    find_tool,
    result_text,
    unknown_tool,
)
from envgrad.errors import ConfigurationError, EnvironmentContractError, ToolCallError


class Way(enum.Enum):
    NORTH = "north"
    SOUTH = "south"


def documented(number: int, way: Literal["up", "down"], words: list[str] | None = None) -> str:
    """
    Guess the number.

    Args:
        number: Your guess,
            from 1 to 16.
        way: Where (choices: ["up", "down"])
        words: More words.

    Returns:
        Whether it is higher.
    """
    return f"{number} {way} {words}"


def inc(n: int) -> int:
    return n + 1


def optional(n: int, word: str | None = None, limit: int = None) -> str:  # noqa: RUF013 - what users write
    return "x"


def nested(rows: list[list[int]], table: dict[str, float], pair: tuple[int, str], either: int | str, any: Any) -> str:
    return "x"


def extras(n: int, **kwargs: int) -> dict[str, int]:
    return {"n": n} | kwargs


def walk(way: Way, back: Way | None = None) -> Way:
    return way


def tool_of(function):
    return build_tool(function.__name__, function)


def test_a_documented_tool_has_exactly_the_schema_of_transformers():
    assert tool_of(documented).schema == get_json_schema(documented)


def test_a_methods_self_is_not_a_parameter():
    class Room:
        def walk(self, steps: int) -> str:
            """Walk.

            Args:
                steps: How many.
            """

    expected = get_json_schema(Room().walk)
    spec = build_tool("walk", Room().walk, method="walk")
    assert spec.schema == expected and list(spec.parameters["properties"]) == ["steps"]


def test_missing_docs_are_left_empty():
    def half(a: int, b: str = "x"):
        """Half documented.

        Args:
            a: The first.
        """

    assert tool_of(inc).schema == {
        "type": "function",
        "function": {
            "name": "inc",
            "description": "",
            "parameters": {
                "type": "object",
                "properties": {"n": {"type": "integer", "description": ""}},
                "required": ["n"],
            },
            "return": {"type": "integer"},
        },
    }
    function = tool_of(half).schema["function"]
    assert function["description"] == "Half documented."
    assert [p["description"] for p in function["parameters"]["properties"].values()] == ["The first.", ""]


def test_signatures_for_messages():
    assert tool_of(optional).signature == "optional(n: integer, word?: string or null, limit?: integer)"
    assert tool_of(extras).signature == "extras(n: integer, ...)"
    assert (
        tool_of(documented).signature
        == 'documented(number: integer, way: "up" or "down", words?: list of string or null)'
    )


def test_tools_that_cannot_be_are_named_with_their_parameter():
    def untyped(a: int, b): ...

    def custom(a: int, b: object): ...

    def positional(a: int, /): ...

    def unresolved(a: Unknown): ...  # noqa: F821

    def choices(a: str):
        """Pick.

        Args:
            a: One (choices: [x, y])
        """

    for function, match in [
        (untyped, "tool 'untyped': parameter 'b' has no type annotation.*'b: str'"),
        (custom, "tool 'custom': parameter 'b' has the type <class 'object'>, which JSON cannot carry"),
        (positional, "tool 'positional': parameter 'a' is positional-only"),
        (unresolved, "tool 'unresolved': its type annotations cannot be resolved.*Unknown"),
        (choices, "tool 'choices': a '.choices: ....' list in its docstring is not JSON"),
    ]:
        with pytest.raises(EnvironmentContractError, match=match):
            tool_of(function)


def test_partials_and_async_functions():
    async def later(a: int, b: int) -> int:
        return a + b

    spec = build_tool("add", functools.partial(later, 1))
    assert spec.is_async and list(spec.parameters["properties"]) == ["b"]


def test_tools_from_functions():
    assert [spec.name for spec in build_tools([inc, extras])] == ["inc", "extras"]
    assert build_tools([inc])[0].bind(None)(n=1) == 2
    with pytest.raises(ConfigurationError, match="functions with a name, got <function"):
        build_tools([lambda: 1])
    with pytest.raises(ConfigurationError, match="got 'inc'"):
        build_tools(["inc"])
    with pytest.raises(EnvironmentContractError, match="two tools are called 'inc'"):
        combine_tools(build_tools([inc]), build_tools([inc]), where="tools")


@pytest.mark.parametrize(
    ("function", "given_arguments", "expected"),
    [
        (inc, {"n": 1}, {"n": 1}),
        (inc, '{"n": 1}', {"n": 1}),
        (optional, {"n": 1}, {"n": 1}),
        (optional, {"n": 1, "word": None, "limit": None}, {"n": 1, "word": None, "limit": None}),
        (extras, {"n": 1, "x": [2]}, {"n": 1, "x": [2]}),
        (walk, {"way": "north", "back": None}, {"way": Way.NORTH, "back": None}),
        (walk, {"way": "north", "back": "south"}, {"way": Way.NORTH, "back": Way.SOUTH}),
        (
            nested,
            {"rows": [[1.0]], "table": {"x": 1}, "pair": [1, "a"], "either": "s", "any": {"k": []}},
            {"rows": [[1]], "table": {"x": 1}, "pair": [1, "a"], "either": "s", "any": {"k": []}},
        ),
    ],
)
def test_calls_that_fit(function, given_arguments, expected):
    before = copy.deepcopy(given_arguments)
    assert check_arguments(tool_of(function), given_arguments) == expected
    assert given_arguments == before


def test_arguments_are_not_shared_with_the_parsed_call():
    call = {"rows": [[1]], "table": {}, "pair": [1, "a"], "either": 1, "any": {"k": [1]}}
    checked = check_arguments(tool_of(nested), call)
    checked["rows"][0].append(2)
    checked["any"]["k"].append(2)
    assert call["rows"] == [[1]] and call["any"] == {"k": [1]}


@pytest.mark.parametrize(
    ("call_arguments", "text"),
    [
        ([1], "inc: the arguments must be a JSON object, got [1]. Signature: inc(n: integer)"),
        (3, "inc: the arguments must be a JSON object, got 3. Signature: inc(n: integer)"),
        (None, "inc: the arguments must be a JSON object, got null. Signature: inc(n: integer)"),
        ("[1]", "inc: the arguments must be a JSON object, got [1]. Signature: inc(n: integer)"),
        ("{n: 1", 'inc: the arguments must be a JSON object, got the string "{n: 1". Signature: inc(n: integer)'),
        ({}, "inc: missing argument 'n' (integer). Signature: inc(n: integer)"),
        ({"n": 1, "x": 2}, "inc: unexpected argument 'x'. Signature: inc(n: integer)"),
        ({"n": None}, "inc: argument 'n' must be an integer, got null. Signature: inc(n: integer)"),
        ({"n": True}, "inc: argument 'n' must be an integer, got true. Signature: inc(n: integer)"),
        ({"n": 1, 2: 3}, "inc: unexpected argument '2'. Signature: inc(n: integer)"),
        ({"m": 1}, "inc: missing argument 'n' (integer); unexpected argument 'm'. Signature: inc(n: integer)"),
    ],
)
def test_calls_that_do_not_fit_say_why(call_arguments, text):
    with pytest.raises(ToolCallError) as caught:
        check_arguments(tool_of(inc), call_arguments)
    assert str(caught.value) == text


def test_bottomless_nesting_is_refused():
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    spec = tool_of(nested)
    for call in (deep, {"any": deep}, "[" * 100_000, '{"any": ' + "[" * 100_000):
        with pytest.raises(ToolCallError, match="nested"):
            check_arguments(spec, call)
    assert "nested too deeply" in result_text(deep)
    for _ in range(100_000):  # taken apart by hand: the interpreter's own recursion would be deep
        deep = deep[0] if deep else deep


def test_unknown_tools():
    specs = build_tools([inc, extras])
    assert find_tool("inc", specs) is specs[0]
    with pytest.raises(ToolCallError, match=r"Unknown tool 'nope'. Known tools: inc\(n: integer\), extras\("):
        find_tool("nope", specs)
    assert "has no tool name" in unknown_tool(None, specs)
    assert unknown_tool("x", ()) == "Unknown tool 'x'. There are no tools."
    assert len(unknown_tool("x" * 10**6, specs)) < 250


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(["n", "word", "limit", "rows", "table", "pair", "either", "any", "way", "back", "number"])
CALLS = JSON | st.dictionaries(NAMES, JSON, max_size=5)
TOOLS = [tool_of(function) for function in (inc, optional, nested, extras, walk, documented)]


@settings(max_examples=80, deadline=None)
@given(spec=st.sampled_from(TOOLS), call=CALLS)
def test_any_json_value_fits_or_is_refused_with_text(spec, call):
    before = copy.deepcopy(call)
    try:
        checked = check_arguments(spec, call)
    except ToolCallError as error:
        assert str(error).startswith(f"{spec.name}: ") and str(error).encode("utf-8")
    else:
        properties = spec.parameters["properties"]
        assert isinstance(checked, dict) and set(spec.parameters.get("required", ())) <= checked.keys()
        assert spec.takes_extra or checked.keys() <= properties.keys()
        spec.bind(None)(**checked)
    assert repr(call) == repr(before)


@settings(max_examples=50, deadline=None)
@given(value=JSON)
def test_any_result_becomes_text_that_utf8_can_hold(value):
    assert isinstance(result_text(value).encode("utf-8"), bytes)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as is", "as is"),
        (None, ""),
        (3, "3"),
        (True, "True"),
        ({"a": [1, None]}, '{"a": [1, null]}'),
        (["a"], '["a"]'),
        ((1, 2), "[1, 2]"),
        ([], "[]"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([{"type": "circle", "r": 1}], '[{"type": "circle", "r": 1}]'),
        ({(1, 2): 3}, "{(1, 2): 3}"),
        ("\ud800", "?"),
        ("\u00e9", "\u00e9"),
        ({"k": "\u00e9"}, '{"k": "\u00e9"}'),
    ],
)
def test_results_as_text(value, text):
    assert result_text(value) == text


def test_media_results_are_refused():
    with pytest.raises(ToolCallError, match="'image'; only text"):
        result_text([{"type": "text", "text": "see"}, {"type": "image", "image": b""}])
