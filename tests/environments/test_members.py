from __future__ import annotations

import pytest

from envgrad.environments.members import RESERVED_NAMES, StepResult, ToolResult, is_marked, tool
from envgrad.errors import EnvironmentContractError


def test_reserved_names_are_the_protocols_members():
    methods = {
        "reset",
        "step",
        "get_reward",
        "group_reward",
        "read_chat",
        "run_agent",
        "get_feedback",
        "close",
        "fork",
        "start_state",
        "num_tasks",
    }
    assert methods | {"state_dict", "load_state_dict", "done", "tools", "determinism"} == RESERVED_NAMES


def test_tool_marks_functions_static_and_class_methods_and_leaves_them_working():
    class Lamp:
        @tool
        async def switch(self) -> str:
            return "on"

        @tool
        @staticmethod
        def outer(number: int) -> int:
            return number + 1

        @staticmethod
        @tool
        def inner(number: int) -> int:
            return number + 2

        @tool
        @classmethod
        def named(cls) -> str:
            return cls.__name__

        def plain(self) -> None: ...

    for name in ("switch", "outer", "inner", "named"):
        assert is_marked(vars(Lamp)[name]), name
    assert not is_marked(vars(Lamp)["plain"])
    assert (Lamp().outer(1), Lamp().inner(1), Lamp().named()) == (2, 3, "Lamp")


@pytest.mark.parametrize("wrong", [property(lambda self: 1), 3, int])
def test_tool_on_what_is_no_function_is_an_error(wrong: object):
    with pytest.raises(EnvironmentContractError, match="@tool marks functions"):
        tool(wrong)


def test_results_default_to_no_reward_and_no_end():
    assert StepResult("x") == StepResult("x", None, False, {})
    assert ToolResult("x").reward is None
