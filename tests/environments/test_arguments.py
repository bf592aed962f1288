from __future__ import annotations

import math

import pytest

from envgrad.environments.arguments import describe, fit, shorten

INTEGER, NUMBER, STRING = {"type": "integer"}, {"type": "number"}, {"type": "string"}
ROWS = {"type": "array", "items": {"type": "array", "items": INTEGER}}
PAIR = {"type": "array", "prefixItems": [INTEGER, STRING]}
ENUM = {"enum": ["a", 1, None]}
MAP = {"type": "object", "additionalProperties": NUMBER}
ANY_OF = {"anyOf": [{"type": "array", "items": INTEGER}, {"enum": ["all"]}]}


@pytest.mark.parametrize(
    ("value", "schema", "expected"),
    [
        (3, INTEGER, 3),
        (3.0, INTEGER, 3),
        (3, NUMBER, 3),
        ("3", STRING, "3"),
        (None, {"type": "integer", "nullable": True}, None),
        (3.0, {"type": ["integer", "number"]}, 3.0),
        (3.0, {"type": ["integer", "string"]}, 3),
        ([[1, 2.0], []], ROWS, [[1, 2], []]),
        ([1, "x"], PAIR, [1, "x"]),
        ("a", ENUM, "a"),
        (1.0, ENUM, 1),
        (None, ENUM, None),
        ({"x": 1.5}, MAP, {"x": 1.5}),
        ([1], ANY_OF, [1]),
        ("all", ANY_OF, "all"),
        ({"x": [1, {"y": None}]}, {}, {"x": [1, {"y": None}]}),
    ],
)
def test_what_fits(value, schema, expected):
    fitted, problem = fit(value, schema, "n")
    assert problem is None and fitted == expected and type(fitted) is type(expected)
    assert not isinstance(value, list | dict) or fitted is not value


@pytest.mark.parametrize(
    ("value", "schema", "problem"),
    [
        ("3", INTEGER, 'n must be an integer, got the string "3"'),
        (True, INTEGER, "n must be an integer, got true"),
        (3.5, INTEGER, "n must be an integer, got 3.5"),
        (math.inf, INTEGER, "n must be an integer, got Infinity"),
        (math.nan, NUMBER, "n must be a number, got NaN"),
        (False, NUMBER, "n must be a number, got false"),
        (None, INTEGER, "n must be an integer, got null"),
        (3, STRING, "n must be a string, got 3"),
        (1, {"type": "boolean"}, "n must be true or false, got 1"),
        (True, {"type": ["integer", "string"], "nullable": True}, "n must be an integer or a string or null, got true"),
        ([[1], ["x"]], ROWS, 'n[1][0] must be an integer, got the string "x"'),
        ([1], PAIR, "n must have 2 items, got 1"),
        ({"x": "y"}, MAP, 'n["x"] must be a number, got the string "y"'),
        (True, ENUM, 'n must be "a" or 1 or null, got true'),
        (["x"], ANY_OF, 'n must be list of integer or "all", got ["x"]'),
    ],
)
def test_what_does_not_fit(value, schema, problem):
    assert fit(value, schema, "n")[1] == problem


def test_shown_values_are_short():
    assert len(shorten("x" * 1000)) == 80
    assert len(fit("x" * 100_000, INTEGER, "n")[1]) < 130


def test_schemas_in_words():
    assert describe(ROWS) == "list of list of integer"
    assert describe(PAIR) == "[integer, string]"
    assert describe({"type": "array", "nullable": True}) == "list or null"
    assert describe({}) == "anything"
