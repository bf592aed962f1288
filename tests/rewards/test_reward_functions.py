from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from envgrad.errors import ConfigurationError, RewardFailure, RewardTimeout
from envgrad.rewards import RewardFunction
from helpers.rewards import answered, batch, called, plain, score, task


def source(function, name="f", **options):
    options.setdefault("columns", None)
    return RewardFunction(function, name, **options)


def seen_by(episodes, *, environments=None, state=None, **options):
    """The keyword arguments that a function with ``**kwargs`` gets."""
    seen = {}

    def spy(**kwargs):
        seen.update(kwargs)
        return [0.0] * len(kwargs["completions"])

    score(source(spy, trainer_state=lambda: state, **options), batch(episodes, environments=environments))
    return seen


def test_a_chat_function_gets_what_trl_gives():
    state = object()
    seen = seen_by([answered("a"), answered("b", ids=(5,))], state=state)
    assert set(seen) == {"prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra"}
    assert seen["prompts"] == [[{"role": "user", "content": "Say."}]] * 2
    assert seen["completions"] == [[{"role": "assistant", "content": text}] for text in "ab"]
    assert seen["completion_ids"] == [[7, 8, 9], [5]]
    assert seen["trainer_state"] is state


def test_plain_text_comes_as_strings():
    seen = seen_by([plain(" x"), plain(" y")])
    assert (seen["prompts"], seen["completions"]) == (["Say", "Say"], [" x", " y"])


def test_tools_decide_where_reasoning_stands():
    assert seen_by([called()], has_tools=True)["completions"][0][2]["content"] == "done"
    assert seen_by([called()])["completions"][0][2]["content"] == "<think>enough</think>done"


def test_columns_come_as_lists_but_prompt_completion_and_their_ids():
    row = {"prompt": "p", "completion": "c", "completion_ids": [1], "solution": "4", "tags": ["x"], "environments": 3}
    seen = seen_by([answered("a", task=task(row))] * 3)
    assert seen["solution"] == ["4"] * 3 and seen["tags"] == [["x"]] * 3 and seen["environments"] == [3] * 3
    assert "prompt" not in seen and "completion" not in seen and seen["completion_ids"] == [[7, 8, 9]] * 3


def test_environments_are_the_live_ones_in_order():
    alive = [object(), object()]
    seen = seen_by([answered("a"), answered("b")], environments=alive)
    assert seen["environments"] == alive and seen["environments"][1] is alive[1]


def test_the_state_is_read_at_each_call():
    steps = iter([1, 2])
    states = []

    def f(completions, trainer_state):
        states.append(trainer_state)
        return [0.0]

    reward = source(f, trainer_state=lambda: next(steps))
    score(reward, [answered("a")])
    score(reward, [answered("a")])
    assert states == [1, 2]


def test_a_function_without_kwargs_gets_what_it_names():
    def length(completions, *, limit, completion_ids, weight=2.0):
        return [weight * (len(ids) - most) for ids, most in zip(completion_ids, limit, strict=True)]

    episodes = [answered("a", task=task({"limit": 1, "other": 0}), ids=range(n)) for n in (1, 4)]
    assert score(source(length), episodes) == [0.0, 6.0]
    assert score(source(partial(length, weight=1.0)), episodes) == [0.0, 3.0]


def test_async_functions_and_callable_objects():
    class Judge:
        async def __call__(self, completions, log_metric, **kwargs):
            await asyncio.sleep(0)
            log_metric("seen", len(completions))
            return [threading.current_thread() is threading.main_thread()] * len(completions)

    group = batch([answered("a"), answered("b")])
    assert score(source(Judge()), group) == [1.0, 1.0]  # on the loop, which the test runs in the main thread
    assert group.log.metrics == {"seen": [2.0]}

    def sync(completions):
        return [threading.current_thread() is threading.main_thread()]

    assert score(source(sync), [answered("a")]) == [0.0]


def test_none_does_not_apply():
    assert score(source(lambda completions: (None, np.nan)), [answered("a")] * 2) == [None, None]


@pytest.mark.parametrize(("given", "shown"), [([1.0], "1 rewards"), ([1.0] * 5, "5 rewards"), (1.0, "1.0")])
def test_a_wrong_number_of_rewards_names_the_function_and_both_counts(given, shown):
    with pytest.raises(ConfigurationError, match=f"'style' returned {shown}.* for 6 completions"):
        score(source(lambda **kwargs: given, "style"), [answered("a")] * 6)


def test_an_error_is_a_failure_with_its_cause():
    def broken(completions):
        raise KeyError("answer")

    async def broken_async(completions):
        raise KeyError("answer")

    for function in (broken, broken_async):
        with pytest.raises(RewardFailure, match="reward function 'style' raised KeyError: 'answer'") as caught:
            score(source(function, "style"), [answered("a")])
        assert isinstance(caught.value.__cause__, KeyError)


def test_a_function_that_takes_too_long():
    gate = threading.Event()

    def hangs(completions):
        gate.wait(20)
        return [1.0]

    async def hangs_async(completions):
        await asyncio.sleep(20)

    for function in (hangs, hangs_async):
        start = time.monotonic()
        with pytest.raises(RewardTimeout, match=r"'slow' took longer than 0\.05 s"):
            score(source(function, "slow"), batch([answered("a")], timeout=0.05))
        assert time.monotonic() - start < 10
    gate.set()


def test_changing_what_is_given_changes_nothing_of_ours():
    row = {"tags": ["x"], "array": np.zeros(2)}
    episodes = [answered("a", task=task(row)), answered("b", task=task(row))]

    def vandal(prompts, completions, completion_ids, tags, array, environments, **kwargs):
        prompts[0][0]["content"] = completions[0][0]["content"] = "changed"
        tags[0].append("y")
        array[0][0] = 1.0
        for values in (prompts, completions, completion_ids, tags, environments):
            values.pop()
        completion_ids[0].clear()
        assert tags == [["x", "y"]]
        return [0.0, 0.0]

    alive = [object(), object()]
    group = batch(episodes, environments=alive)
    reward = source(vandal)
    assert score(reward, group) == score(reward, batch(episodes, environments=alive)) == [0.0, 0.0]
    assert row["tags"] == ["x"] and not row["array"].any() and group.environments == tuple(alive)
    assert episodes == [answered("a", task=episodes[0].task), answered("b", task=episodes[1].task)]


# -- logging


def test_metrics_and_columns_are_logged():
    def f(completions, log_metric, log_extra):
        log_metric("accuracy", 1)
        log_metric("accuracy", np.float32(0.5))
        log_metric("empty", float("nan"))
        log_extra("parsed", [text[0]["content"].upper() for text in completions])
        log_extra("one_by_one", ["x"])
        log_extra("one_by_one", np.array([3]))
        return [0.0, 1.0]

    group = batch([answered("a"), answered("b")])
    score(source(f), group)
    assert group.log.metrics == {"accuracy": [1.0, 0.5]}
    assert group.log.extras == {"parsed": ["A", "B"], "one_by_one": ["x", 3]}


def test_two_functions_may_log_one_name():
    def f(completions, log_metric, log_extra, mark):
        log_extra("parsed", mark)
        log_metric("m", 1.0)
        return [0.0]

    first = batch([answered("a", task=task({"mark": "x"}))])
    second = replace(batch(first.episodes), log=first.log)
    score(source(f, "f"), first)
    score(source(f, "g"), second)
    assert first.log.extras == {"parsed": ["x"], "g/parsed": ["x"]} and first.log.metrics == {"m": [1.0, 1.0]}


@pytest.mark.parametrize("values", [["x"], ["x"] * 3])
def test_a_column_needs_one_value_per_completion(values):
    group = batch([answered("a")] * 2)
    with pytest.raises(ConfigurationError, match=f"'f' logged {len(values)} values as 'parsed' for 2 completions"):
        score(source(lambda log_extra, **k: log_extra("parsed", values) or [0.0, 0.0]), group)
    assert group.log.extras == {}


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (lambda metric, extra: metric("m", "1"), r"log_metric\('m', ...\) needs a number, got '1'"),
        (lambda metric, extra: metric(3, 1.0), "needs a name, got 3"),
        (lambda metric, extra: extra("c", "xy"), "needs a list"),
        (lambda metric, extra: extra("c", 3), "needs a list"),
        (lambda metric, extra: extra("", [1, 2]), "needs a column"),
    ],
)
def test_what_cannot_be_logged_ends_the_run(log, message):
    def f(log_metric, log_extra, **kwargs):
        log(log_metric, log_extra)
        return [0.0, 0.0]

    with pytest.raises(ConfigurationError, match=message):
        score(source(f), [answered("a")] * 2)


def test_a_call_that_failed_or_came_too_late_logs_nothing():
    gate, done = threading.Event(), threading.Event()

    def fails(completions, log_metric):
        log_metric("m", 1.0)
        raise ValueError

    def late(completions, log_metric):
        gate.wait(20)
        log_metric("m", 1.0)
        done.set()
        return [0.0]

    group = batch([answered("a")])
    with pytest.raises(RewardFailure):
        score(source(fails), group)
    assert group.log.metrics == {}
    group = batch([answered("a")], timeout=0.05)
    with pytest.raises(RewardTimeout):
        score(source(late), group)
    gate.set()
    assert done.wait(10) and group.log.metrics == {}


def test_many_threads_may_log():
    def f(completions, log_metric):
        def work():
            for _ in range(200):
                log_metric("m", 1.0)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [0.0]

    group = batch([answered("a")])
    score(source(f), group)
    assert group.log.metrics == {"m": [1.0] * 800}


# -- construction


def known(function, columns=(), **options):
    return RewardFunction(function, "f", columns=frozenset(columns), **options)


def test_a_parameter_that_is_never_given_is_found_at_construction():
    def f(completions, solutions, **kwargs): ...

    with pytest.raises(ConfigurationError, match=r"'f' requires 'solutions'.*did you mean 'solution'\?"):
        known(f, ["prompt", "solution"])
    known(f, ["solutions"])
    RewardFunction(f, "f", columns=None)
    with pytest.raises(ConfigurationError, match=r"requires 'prompt'.*did you mean 'prompts'\?"):
        known(lambda prompt: [], ["prompt"])


def test_environments_are_given_only_where_there_are_some():
    with pytest.raises(ConfigurationError, match="requires 'environments'"):
        known(lambda environments: [])
    known(lambda environments: [], has_environments=True)
    known(lambda completions, environments=None: [])


def test_where_columns_are_not_known_the_row_decides():
    with pytest.raises(ConfigurationError, match="requires 'solution', which it is never given"):
        score(source(lambda solution: [0.0]), [answered("a", task=task({"prompt": "p"}))])


def test_a_positional_only_parameter_cannot_be_given():
    def f(completions, /): ...

    with pytest.raises(ConfigurationError, match="parameter 'completions' is positional-only"):
        known(f)


@pytest.mark.parametrize("name", ["prompts", "completions", "trainer_state", "log_metric", "log_extra"])
def test_a_column_whose_name_is_taken(name):
    with pytest.raises(ConfigurationError, match=f"a column {name!r}.*rename it"):
        known(lambda **kwargs: [], [name])
    with pytest.raises(ConfigurationError, match=f"a column {name!r}"):
        score(source(lambda **kwargs: [0.0]), [answered("a", task=task({name: 1}))])


def test_a_column_called_environments_collides_with_environments_only():
    known(lambda environments: [], ["environments"])
    with pytest.raises(ConfigurationError, match="a column 'environments'"):
        known(lambda **kwargs: [], ["environments"], has_environments=True)


def test_no_episodes_no_call():
    assert score(source(lambda **kwargs: 1 / 0), []) == []


def test_plain_functions_need_no_torch():
    code = (
        "import sys\nfrom envgrad.rewards import *\nfrom envgrad.rewards.build import build_reward_sources\n"
    ).replace("*", "accuracy_reward, think_format_reward, get_soft_overlong_punishment, RewardFunction")
    code += (
        "build_reward_sources([think_format_reward, accuracy_reward], columns=frozenset({'solution'}))\n"
        "print([m for m in ('torch', 'transformers', 'sympy', 'math_verify') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
