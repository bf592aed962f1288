from __future__ import annotations

import numpy as np
import pytest

from envgrad.environments.contract import inspect_environment
from envgrad.errors import EnvironmentContractError
from envgrad.types import Task

ROW = {"prompt": "p", "environment": "e", "board": [[1], [2]], "cells": np.zeros(2), "level": 3}


def task(row=None, task_index=None):
    return Task(position=4, split="eval", environment="e", group_id=11, seed=12, task_index=task_index, row=row)


def spec_of(cls, **kwargs):
    return inspect_environment("e", cls, **kwargs)[0]


def test_reset_gets_only_what_it_names():
    class Named:
        def reset(self, level, seed, split="x", colour="red"): ...

    assert spec_of(Named).reset_arguments(task(ROW)) == {"level": 3, "seed": 12, "split": "eval"}


def test_kwargs_get_all_and_a_routing_column_is_dropped():
    class All:
        def reset(self, **kwargs): ...

    identity = {"group_id", "seed", "task_index", "split"}
    assert spec_of(All).reset_arguments(task(ROW)).keys() == ROW.keys() | identity
    assert spec_of(All, routed=True).reset_arguments(task(ROW)).keys() == (ROW.keys() | identity) - {"environment"}
    assert spec_of(All).reset_arguments(task()) == {"group_id": 11, "seed": 12, "task_index": None, "split": "eval"}


def test_a_default_stands_where_there_is_no_task_index():
    class Index:
        def reset(self, task_index=7): ...

    assert spec_of(Index).reset_arguments(task()) == {}
    assert spec_of(Index).reset_arguments(task(task_index=0)) == {"task_index": 0}


def test_a_missing_required_column_is_named():
    class Named:
        def reset(self, question): ...

    with pytest.raises(EnvironmentContractError, match=r"requires \['question'\], but the row of task eval/4 has only"):
        spec_of(Named).reset_arguments(task(ROW))


def test_siblings_never_share_the_rows_containers():
    class Board:
        def reset(self, board, cells): ...

    spec, shared = spec_of(Board), task(ROW)
    first = spec.reset_arguments(shared)
    first["board"][0].append(9)
    first["cells"][0] = 5.0
    second = spec.reset_arguments(shared)
    assert second["board"] == [[1], [2]] and second["cells"].tolist() == [0.0, 0.0]


class Shop:
    def reset(self, level):
        self.level = level

    @property
    def tools(self):
        return [self.buy, "sell", helper] if self.level else []

    def buy(self, name: str) -> str:
        return f"{self.level}:{name}"

    def sell(self) -> str:
        return "sold"

    def untyped_helper(self, x): ...


def helper(n: int) -> int:
    return n


def test_tools_may_depend_on_the_task():
    spec, first = inspect_environment("shop", Shop)
    second = spec.factory()
    first.reset(1)
    second.reset(0)
    assert spec.dynamic_tools and spec.may_reward and spec.tools == () and not spec.step_protocol
    tools = spec.tools_of(first)
    assert [t.name for t in tools] == ["buy", "sell", "helper"]
    second.level = 2
    assert tools[0].bind(second)(name="x") == "2:x"  # not tied to the instance it was read from
    second.level = 0
    assert spec.tools_of(second) == ()


def test_tools_set_in_reset_count_too():
    class Late:
        def reset(self):
            self.tools = [lambda_free]

        def look(self) -> str: ...

    def lambda_free() -> str: ...

    spec, probe = inspect_environment("e", Late)
    assert [t.name for t in spec.tools_of(probe)] == ["look"]
    probe.reset()
    assert [t.name for t in spec.tools_of(probe)] == ["lambda_free"]


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (["nope"], "names 'nope', which is no method"),
        (["reset"], "'reset', a reserved name"),
        (["buy", "buy"], "two tools are called 'buy'"),
        ("buy", "must be a list"),
        (3, "must be a list"),
        ([3], "names 3, which is no method"),
    ],
)
def test_wrong_tools_are_named(value, match):
    class Wrong(Shop):
        tools = value

    spec, probe = inspect_environment("e", Wrong)
    with pytest.raises(EnvironmentContractError, match=match):
        spec.tools_of(probe)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(True, True), (False, False), (None, False), (1, True), (np.bool_(True), True), (lambda: True, True)],
)
def test_done_is_read_however_it_is_kept(value, expected):
    class Late:
        def reset(self):
            self.done = value

    spec, probe = inspect_environment("e", Late)
    assert spec.read_done(probe) is False
    probe.reset()
    assert spec.read_done(probe) is expected


def test_done_that_is_no_truth_value_is_an_error():
    class Wrong:
        done = "yes"

        def reset(self): ...

    spec, probe = inspect_environment("e", Wrong)
    assert spec.has_done
    with pytest.raises(EnvironmentContractError, match="done must be true or false, got 'yes'"):
        spec.read_done(probe)
