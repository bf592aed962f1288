from __future__ import annotations

from typing import Any

import pytest

from envgrad.environments.adapters.openenv_text import new_part, observation_text, read_action
from envgrad.environments.adapters.task_splits import task_ranges
from envgrad.errors import ConfigurationError, EnvironmentContractError, EnvironmentFailure

UNION = {
    "$defs": {
        "Move": {"title": "Move", "type": "object", "required": ["kind", "to"],
                 "properties": {"kind": {"const": "move"}, "to": {"type": "string"}, "metadata": {}}},
        "Wait": {"title": "WaitAction", "type": "object", "properties": {"turns": {"type": "integer"}}},
    },
    "oneOf": [{"$ref": "#/$defs/Move"}, {"$ref": "#/$defs/Wait"}],
}  # fmt: skip


def test_an_action_that_is_one_of_several_becomes_a_tool_each() -> None:
    form = read_action(UNION, None, None)
    assert [tool.signature for tool in form.tools] == ["move(to: string)", "wait(turns?: integer)"]
    assert form.fixed == {"move": {"kind": "move"}, "wait": {}}
    with pytest.raises(EnvironmentContractError, match="one of several"):
        read_action(UNION, None, "act")


@pytest.mark.parametrize(
    ("properties", "required", "field"),
    [
        ({"code": {"type": "string"}, "metadata": {}}, ["code"], "code"),
        ({"code": {"type": "string"}, "timeout": {"type": "number"}}, ["code"], "code"),
        ({"code": {"type": "string"}, "to": {"type": "string"}}, ["code", "to"], None),
        ({"way": {"enum": ["n", "s"], "type": "string"}}, ["way"], None),
        ({"cell": {"type": "integer"}}, ["cell"], None),
        ({"code": {"type": "string"}}, [], None),
    ],
)
def test_text_where_the_action_needs_one_string_and_nothing_else(
    properties: dict[str, Any], required: list[str], field: str | None
) -> None:
    schema = {"title": "DoItAction", "properties": properties, "required": required}
    form = read_action(schema, None, None)
    assert form.text_field == field
    assert [tool.name for tool in form.tools] == ([] if field else ["do_it"])
    assert [tool.name for tool in read_action(schema, False, None).tools] == ["do_it"]
    assert [tool.name for tool in read_action(schema, None, "mine").tools] == ["mine"]


def test_a_schema_that_is_none_is_refused() -> None:
    with pytest.raises(EnvironmentContractError, match="must be a JSON schema"):
        read_action(None, None, None)


@pytest.mark.parametrize(
    ("observation", "show", "text"),
    [
        ({"done": True, "reward": 1, "metadata": {"a": 1}}, None, ""),
        ({"board": [[1, 2]], "done": False}, None, "[[1, 2]]"),
        ({"a": "x", "b": None}, None, '{"a": "x", "b": null}'),
        ({"a": "x", "b": "y"}, "b", "y"),
        ({"a": "x"}, lambda seen: seen["a"] * 2, "xx"),
        ({"tool_name": "t", "result": None, "error": {"message": "too slow"}}, None, "too slow"),
        ({"tool_name": "t", "result": {"content": [{"type": "image"}, {"type": "text", "text": "b"}]}}, None,
         "(image content)\nb"),
        ({"tool_name": "t", "result": 3}, None, "3"),
    ],
)  # fmt: skip
def test_observations_in_words(observation: dict[str, Any], show: Any, text: str) -> None:
    assert observation_text(observation, show) == text


def test_an_observation_that_cannot_be_shown_is_a_failure() -> None:
    with pytest.raises(EnvironmentFailure, match="has \\['a'\\]"):
        observation_text({"a": 1}, "b")
    with pytest.raises(EnvironmentFailure, match="KeyError"):
        observation_text({"a": 1}, lambda seen: seen["b"])


def test_only_what_is_new_is_shown() -> None:
    assert [new_part("", "a"), new_part("a", "a\n\nb"), new_part("a", "a"), new_part("ab", "a")] == ["a", "b", "", "a"]


def test_a_servers_tasks_are_divided() -> None:
    sizes = {"train": 25, "test": 4}
    found = task_ranges("train", None, list(sizes), sizes.__getitem__)
    assert (found["train"].count, found["eval"].name, found["eval"].count) == (25, "test", 4)
    alone = task_ranges("train", None, ["train"], lambda name: 25)
    assert (alone["train"].count, alone["eval"].start, alone["eval"].count) == (23, 23, 2)
    assert alone["eval"].index(1) == 24
    one = task_ranges("train", None, ["train"], lambda name: 1)
    assert one["train"] == one["eval"]
    part = task_ranges("train[10:]", "train[:10]", list(sizes), sizes.__getitem__)
    assert (part["train"].index(0), part["train"].count, part["eval"].count) == (10, 15, 10)
    with pytest.raises(ConfigurationError, match=r"eval_split='test\[4:\]' has no task: .* has 4"):
        task_ranges("train", "test[4:]", list(sizes), sizes.__getitem__)
