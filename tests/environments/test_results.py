from __future__ import annotations

import copy
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envgrad.environments.members import StepResult
from envgrad.environments.results import opening_messages, read_group_rewards, read_reward, read_step
from envgrad.errors import EnvironmentContractError, EnvironmentFailure

USER = {"role": "user", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}
BLOCK = {"type": "text", "text": "b"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (2, 2.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.array(3), 3.0),
        (Fraction(1, 4), 0.25),
        (float("nan"), None),
        ({}, None),
        ({"a": 1, "b": None, "c": math.nan}, {"a": 1.0, "b": None, "c": None}),
    ],
)
def test_rewards(value, expected):
    result = read_reward(value, "w")
    assert result == expected and type(result) is type(expected)


@pytest.mark.parametrize(
    "value", ["1", [1.0], math.inf, -math.inf, np.zeros(1), 10**400, 1j, object(), {"a": "x"}, {1: 1}]
)
def test_what_is_no_reward_is_the_environments_failure(value):
    with pytest.raises(EnvironmentFailure, match=r"env\.get_reward.* returned"):
        read_reward(value, "env.get_reward")


def test_a_zero_dimensional_tensor_is_a_reward():
    torch = pytest.importorskip("torch")
    assert read_reward(torch.tensor(1.5), "w") == 1.5
    with pytest.raises(EnvironmentFailure):
        read_reward(torch.tensor([1.5]), "w")


def test_group_rewards_must_be_one_each():
    assert read_group_rewards((1, None, math.nan), 3, "w") == [1.0, None, None]
    assert read_group_rewards(np.array([1.0, 2.0]), 2, "w") == [1.0, 2.0]
    with pytest.raises(EnvironmentFailure, match="returned 1 rewards for 6 environments"):
        read_group_rewards([1.0], 6, "w")
    for wrong in (1.0, np.array(1.0), "12", None, {"a": 1}):
        with pytest.raises(EnvironmentFailure, match="must return a list"):
            read_group_rewards(wrong, 2, "w")


def test_step_results():
    assert read_step("o", "w") == StepResult("o")
    assert read_step(("o", np.bool_(True)), "w") == StepResult("o", done=True)
    assert read_step(StepResult("o", np.float64(0.5), 1, {"k": 1}), "w") == StepResult("o", 0.5, True, {"k": 1})
    assert read_step(StepResult("o", math.nan), "w").reward is None


@pytest.mark.parametrize("value", [None, 3, ("o", 1.0, False, {}), ("o", "yes"), ([BLOCK], True), StepResult(None)])
def test_wrong_step_results_are_named(value):
    with pytest.raises(EnvironmentContractError, match=r"e\.step returned"):
        read_step(value, "e.step")


@pytest.mark.parametrize(
    ("result", "prompt", "expected"),
    [
        ("x", None, [{"role": "user", "content": "x"}]),
        ("x", "p", [{"role": "user", "content": "px"}]),
        ("x", [SYSTEM, USER], [SYSTEM, {"role": "user", "content": "ax"}]),
        ("x", [SYSTEM], [SYSTEM, {"role": "user", "content": "x"}]),
        ("x", [], [{"role": "user", "content": "x"}]),
        (
            "x",
            [{"role": "user", "content": [BLOCK]}],
            [{"role": "user", "content": [BLOCK, {"type": "text", "text": "x"}]}],
        ),
        (None, "p", [{"role": "user", "content": "p"}]),
        (None, [USER], [USER]),
        ([SYSTEM, USER], "p", [SYSTEM, USER]),
        ([SYSTEM, USER], [USER, USER], [SYSTEM, USER]),
        ([BLOCK], None, [{"role": "user", "content": [BLOCK]}]),
        ([BLOCK], "p", [{"role": "user", "content": [{"type": "text", "text": "p"}, BLOCK]}]),
        ([BLOCK], [SYSTEM], [SYSTEM, {"role": "user", "content": [BLOCK]}]),
    ],
)
def test_the_opening(result, prompt, expected):
    before = copy.deepcopy((result, prompt))
    opening = opening_messages(result, prompt, "e.reset")
    assert opening == expected
    for message in opening:
        message["content"] = "changed"
        message["extra"] = 1
    assert (result, prompt) == before


def test_calls_survive_and_filled_up_keys_go():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"n": 1}}}]}
    opening = opening_messages([USER | {"tool_calls": None}, call, {"role": "tool", "content": "1"}], None, "reset")
    assert opening == [USER, call, {"role": "tool", "content": "1"}]
    opening[1]["tool_calls"][0]["function"]["arguments"]["n"] = 2
    assert call["tool_calls"][0]["function"]["arguments"] == {"n": 1}


@pytest.mark.parametrize(
    ("result", "prompt", "match"),
    [
        (None, None, "e.reset returned None and the task has no prompt"),
        (None, [], "has no prompt"),
        ([], "p", "empty list"),
        (3, "p", "returned 3"),
        ({"role": "user", "content": "x"}, None, "a list of messages"),
        (["x"], None, "a list of messages"),
        ([USER, BLOCK], None, "1 of 2 entries have a 'role'"),
        ([{"role": "player", "content": "x"}], None, "message 0 has the role 'player'"),
        ([USER, {"role": "user"}], None, "message 1 has no content"),
        ([{"role": "user", "content": 3}], None, "content 3"),
        ([{"role": "user", "content": "x", "tool_calls": []}], None, "tool_calls"),
        ([{"role": "assistant", "content": "x", "tool_calls": [5]}], None, "tool_calls"),
        ([{"type": "image", "image": None}], None, "block of type 'image', but prompts are text only"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], None, "'image_url', but prompts are text only"),
        ([{"type": "text"}], None, "the block"),
        ("x", [{"role": "user"}], "the row's prompt, message 0 has no content"),
    ],
)
def test_openings_that_cannot_be(result, prompt, match):
    with pytest.raises(EnvironmentContractError, match=match):
        opening_messages(result, prompt, "e.reset")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type", "x"]), inner)
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(result=JSON, prompt=st.none() | st.text(max_size=3) | st.lists(JSON, max_size=2))
def test_any_value_opens_an_episode_or_is_refused(result, prompt):
    try:
        opening = opening_messages(result, prompt, "reset")
    except EnvironmentContractError:
        return
    assert opening and all(
        message["role"] and isinstance(message["content"], str | list | type(None)) for message in opening
    )
