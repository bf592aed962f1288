from __future__ import annotations

import functools
import subprocess
import sys
import threading

import pytest

from envgrad.environments.contract import Environment, inspect_environment, tool
from envgrad.errors import EnvironmentContractError


class Counter:
    """The smallest useful environment."""

    def reset(self, seed):
        self.n, self.done = 0, False
        return "Count."

    def inc(self, n: int) -> str:
        self.n += n
        return str(self.n)

    def get_reward(self) -> float:
        return float(self.n)


def inspect(cls, **kwargs):
    return inspect_environment("e", cls, **kwargs)[0]


def refuse(factory, match, **kwargs):
    with pytest.raises(EnvironmentContractError, match=match):
        inspect_environment("e", factory, **kwargs)


def test_a_plain_class():
    made = []

    def factory():
        made.append(Counter())
        return made[-1]

    spec, probe = inspect_environment("counter", factory)
    assert made == [probe]
    assert (spec.name, spec.factory) == ("counter", factory)
    assert (spec.reset_names, spec.reset_takes_all, spec.uses_task_identity) == (frozenset({"seed"}), False, True)
    assert [t.name for t in spec.tools] == ["inc"]
    assert (spec.has_get_reward, spec.must_reward, spec.may_reward) == (True, True, True)
    assert not (spec.step_protocol or spec.dynamic_tools or spec.has_close or spec.has_group_reward or spec.has_fork)
    assert spec.tools[0].bind(probe).__self__ is probe


def test_local_classes_closures_and_partials_are_factories():
    class Local:
        def __init__(self, size):
            self.size = size

        def reset(self):
            return "x"

    for factory in (lambda: Local(3), functools.partial(Local, 3)):
        assert inspect_environment("e", factory)[1].size == 3


def test_a_factory_that_cannot_be_called_is_named():
    class Needs:
        def __init__(self, size):
            pass

        def reset(self): ...

    def broken():
        raise OSError("no server")

    async def later():
        return Counter()

    refuse(Needs, r"needs arguments \(size\).*functools.partial")
    refuse(Counter(), "must be callable without arguments, got the Counter.*pass the class itself")
    refuse(broken, "the factory raised OSError: no server")
    refuse(later, "factory is async")
    refuse(lambda: None, "returned None")
    refuse(lambda: Counter, "must return an instance")


def test_reset_must_be_there_and_callable_by_name():
    class NoReset:
        def look(self) -> str: ...

    class Positional:
        def reset(self, seed, /): ...

    class Column:
        def reset(self, question, hint=None): ...

    class Attribute:
        reset = 3

    refuse(NoReset, "no reset method")
    refuse(Attribute, "no reset method")
    refuse(Positional, "'seed' is positional-only")
    refuse(Column, r"reset requires \['question'\], which nothing supplies", columns=frozenset())
    refuse(Column, r"reset requires \['question'\].*'answer'", columns=frozenset({"answer"}))
    assert inspect(Column, columns=frozenset({"question"})).reset_names == {"question", "hint"}
    assert inspect(Column, columns=None).reset_required == {"question"}


def test_a_routing_column_is_not_supplied():
    class Wants:
        def reset(self, environment): ...

    columns = frozenset({"environment"})
    assert inspect(Wants, columns=columns).reset_required == columns
    refuse(Wants, "requires .'environment'.", columns=columns, routed=True)


def test_task_index_needs_tasks_that_are_counted():
    class Endless:
        def reset(self, task_index): ...

    class Finite(Endless):
        @classmethod
        def num_tasks(cls, split):
            return {"train": 5, "eval": 0}[split]

    refuse(Endless, "define 'num_tasks", columns=frozenset())
    spec = inspect(Finite, columns=frozenset())
    assert (spec.num_tasks("train"), spec.num_tasks("eval")) == (5, 0)
    with pytest.raises(EnvironmentContractError, match="KeyError"):
        spec.num_tasks("test")


@pytest.mark.parametrize("wrong", [True, -1, 2.5, None])
def test_num_tasks_must_be_a_count(wrong):
    class Odd:
        def reset(self): ...

        def num_tasks(self, split):
            return wrong

    with pytest.raises(EnvironmentContractError, match="must return how many tasks"):
        inspect(Odd).num_tasks("train")


def test_kwargs_are_not_naming():
    class All:
        def reset(self, **kwargs): ...

    spec = inspect(All, columns=frozenset())
    assert spec.reset_takes_all and not spec.uses_task_identity


def test_tools_are_public_methods_static_ones_too_and_never_properties():
    class Room:
        limit = 3

        def reset(self): ...

        async def walk(self, way: str) -> str: ...

        @staticmethod
        def add(a: int, b: int) -> int:
            return a + b

        @property
        def secret(self):
            raise AssertionError("a property was run")

        @classmethod
        def build(cls): ...

        def _helper(self): ...

        def close(self): ...

        def fork(self): ...

    spec, probe = inspect_environment("e", Room)
    assert [(t.name, t.is_async) for t in spec.tools] == [("add", False), ("walk", True)]
    assert spec.tools[0].bind(probe)(a=1, b=2) == 3
    assert (spec.has_close, spec.has_fork, spec.must_reward, spec.may_reward) == (True, True, False, True)


def test_marked_tools_are_the_only_ones():
    class Room:
        def reset(self): ...

        def helper(self, anything): ...

        @tool
        def walk(self, way: str) -> str: ...

        @tool
        @classmethod
        def build(cls, size: int) -> str: ...

    assert [t.name for t in inspect(Room).tools] == ["build", "walk"]


def test_a_mark_on_a_reserved_name_is_an_error():
    class Wrong:
        def reset(self): ...

        @tool
        def close(self): ...

    refuse(Wrong, "'close' is a reserved name and carries @tool")


def test_a_tool_without_annotation_is_named_with_its_parameter():
    class Wrong:
        def reset(self): ...

        def walk(self, way, steps: int = 1): ...

    refuse(Wrong, r"environment 'e' \(Wrong\): tool 'walk': parameter 'way' has no type annotation")


def test_step_is_the_protocol_only_alone():
    class Text:
        def reset(self): ...

        def step(self, message): ...

    class Both(Text):
        def look(self) -> str: ...

        def step(self, message: str) -> str: ...

    class Marked(Text):
        @tool
        def step(self, message: str) -> str: ...

    class Untyped(Text):
        def look(self) -> str: ...

    class NoMessage:
        def reset(self): ...

        def step(self): ...

    assert (inspect(Text).step_protocol, inspect(Text).tools, inspect(Text).may_reward) == (True, (), True)
    assert ([t.name for t in inspect(Both).tools], inspect(Both).step_protocol) == (["look", "step"], False)
    assert ([t.name for t in inspect(Marked).tools], inspect(Marked).step_protocol) == (["step"], False)
    refuse(Untyped, r"tool 'step': parameter 'message' has no type annotation.*reads free text only.*\['look'\]")
    refuse(NoMessage, r"step is called with 1 argument, but its signature is step\(\)")


def test_neither_tools_nor_step_is_a_single_turn_environment():
    class Quiz:
        def reset(self): ...

        def get_reward(self): ...

    spec = inspect(Quiz)
    assert (spec.tools, spec.step_protocol, spec.must_reward) == ((), False, True)


def test_reserved_methods_with_the_wrong_form():
    class GetReward:
        def reset(self): ...

        def get_reward(self, completion): ...

    class GroupReward:
        def reset(self): ...

        def group_reward(self, environments): ...

    class GoodGroup:
        def reset(self): ...

        @classmethod
        def group_reward(cls, environments): ...

    class Done:
        def reset(self): ...

        def done(self, answer): ...

    class CloseNumber:
        def __init__(self):
            self.close = 12.5

        def reset(self): ...

    class AsyncFork:
        def reset(self): ...

        async def fork(self): ...

    class HalfState:
        def reset(self): ...

        def state_dict(self): ...

    class Determinism:
        determinism = True

        def reset(self): ...

    refuse(GetReward, "get_reward is called with no arguments")
    refuse(GroupReward, "must be a classmethod")
    assert inspect(GoodGroup).has_group_reward and inspect(GoodGroup).must_reward
    refuse(Done, r"done must be an attribute or property, got the method done\(answer\)")
    refuse(CloseNumber, "'close' is a reserved name for a method, got 12.5")
    refuse(AsyncFork, "fork must not be async")
    refuse(HalfState, "go together")
    refuse(Determinism, "'determinism' is a reserved name")


def test_a_subclass_of_the_protocol_has_only_what_it_defines():
    class Mine(Environment):
        def reset(self):
            return "x"

        def look(self) -> str:
            return "wall"

    spec, probe = inspect_environment("e", Mine)
    assert [t.name for t in spec.tools] == ["look"]
    assert not (spec.has_get_reward or spec.has_close or spec.dynamic_tools or spec.step_protocol or spec.has_done)
    assert not (spec.has_group_reward or spec.has_state or spec.has_fork) and spec.num_tasks is None
    assert spec.read_done(probe) is False and spec.tools_of(probe) == spec.tools


def test_the_probe_is_closed_once_if_a_check_fails():
    closed = []

    class Wrong:
        def reset(self, /, x): ...

        def walk(self, way): ...

        async def close(self):
            closed.append(threading.current_thread())

    refuse(Wrong, "walk")
    assert len(closed) == 1


def test_inspection_loads_no_torch_where_there_are_no_tools():
    code = (
        "import sys; from envgrad.environments import inspect_environment\n"
        "class Quiz:\n    def reset(self): ...\n    def get_reward(self): ...\n"
        "inspect_environment('q', Quiz)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
