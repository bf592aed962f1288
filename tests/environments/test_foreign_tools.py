from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envgrad.environments.arguments import fit
from envgrad.environments.contract import inspect_environment
from envgrad.environments.foreign_tools import foreign_tool, plain_schema
from envgrad.environments.tools import check_arguments
from envgrad.errors import EnvironmentContractError, ToolCallError

PYDANTIC = {
    "title": "Move", "type": "object", "additionalProperties": False, "required": ["to", "how"],
    "$defs": {
        "How": {"title": "How", "enum": ["fast", "slow"], "type": "string"},
        "Place": {"title": "Place", "type": "object", "properties": {"x": {"type": "integer", "title": "X"}}},
    },
    "properties": {
        "to": {"$ref": "#/$defs/Place", "description": "Where."},
        "how": {"allOf": [{"$ref": "#/$defs/How"}]},
        "times": {"anyOf": [{"type": "integer", "maximum": 3}, {"type": "null"}], "default": None, "title": "Times"},
        "kind": {"const": "move", "default": "move", "title": "Kind"},
    },
}  # fmt: skip


def test_a_schema_of_pydantic_is_shown_and_checked() -> None:
    tool = foreign_tool("move", " Move there. ", PYDANTIC, method="_call")
    assert tool.schema["function"]["description"] == "Move there."
    assert tool.parameters == {
        "type": "object",
        "required": ["to", "how"],
        "properties": {
            "to": {"type": "object", "properties": {"x": {"type": "integer"}}, "description": "Where."},
            "how": {"description": "", "enum": ["fast", "slow"], "type": "string"},
            "times": {"description": "", "type": "integer", "maximum": 3, "default": None, "nullable": True},
            "kind": {"description": "", "default": "move", "enum": ["move"]},
        },
    }
    assert check_arguments(tool, {"to": {"x": 1}, "how": "fast", "times": None}) == {
        "to": {"x": 1}, "how": "fast", "times": None,
    }  # fmt: skip
    with pytest.raises(ToolCallError, match=r"'how' must be \"fast\" or \"slow\", got the string \"well\""):
        check_arguments(tool, {"to": {}, "how": "well"})
    with pytest.raises(ToolCallError, match="unexpected argument 'speed'"):
        check_arguments(tool, {"to": {}, "how": "fast", "speed": 3})


def test_free_arguments_are_passed_on_where_the_schema_allows_them() -> None:
    tool = foreign_tool("free", "", {"type": "object", "additionalProperties": True}, method="_call")
    assert check_arguments(tool, {"anything": [1]}) == {"anything": [1]}


def test_a_schema_that_contains_itself_ends() -> None:
    tree = {"$ref": "#/$defs/T", "$defs": {"T": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/T"}}, {}]}}}
    assert plain_schema(tree) == {"anyOf": [{"type": "array", "items": {}}, {}]}


@pytest.mark.parametrize("bad", [{"type": "string"}, {"properties": ["a"]}])
def test_what_is_no_object_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(EnvironmentContractError, match=r"'odd'.*describes no object"):
        foreign_tool("odd", "", bad, method="_call")
    with pytest.raises(EnvironmentContractError, match="it needs a name"):
        foreign_tool("", "", {}, method="_call")


def test_one_method_runs_every_tool_and_equal_descriptions_are_equal_tools() -> None:
    class Remote:
        def reset(self) -> str:
            return "Go."

        @property
        def tools(self) -> list[Any]:
            names = ("left", "step")  # a server's tool may be called as it likes
            return [
                foreign_tool(name, "", {"properties": {"self": {"type": "integer"}}}, method="_call") for name in names
            ]

        async def _call(self, tool: str, /, **arguments: Any) -> str:
            return f"{tool} {arguments}"

    spec, first = inspect_environment("remote", Remote)
    tools, others = spec.tools_of(first), spec.tools_of(Remote())
    assert tools == others and [tool.name for tool in tools] == ["left", "step"]
    assert asyncio.run(tools[1].bind(first)(**{"self": 3})) == "step {'self': 3}"  # type: ignore[arg-type]


SCHEMAS = st.recursive(
    st.sampled_from(
        [{}, {"type": "integer"}, {"type": "weird"}, {"const": 1}, {"enum": [[1]]}, {"$ref": "#/$defs/No"}]
    ),
    lambda inner: st.one_of(
        st.builds(lambda items: {"type": "array", "items": items}, inner),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, max_size=3)),
        st.builds(lambda options: {"oneOf": [*options, {"type": "null"}]}, st.lists(inner, max_size=2)),
        st.builds(lambda value: {"properties": {"a": value}, "additionalProperties": False}, inner),
    ),
    max_leaves=6,
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 2), st.text(max_size=2)),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=1), inner, max_size=2)),
    max_leaves=4,
)


@given(SCHEMAS, VALUES)
def test_any_schema_can_be_checked_against(schema: dict[str, Any], value: Any) -> None:
    fitted, problem = fit(value, plain_schema(schema), "it")
    assert problem is not None or fitted == value
