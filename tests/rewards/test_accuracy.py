from __future__ import annotations

import pickle
import threading

import pytest

from envgrad.errors import ConfigurationError
from envgrad.rewards import accuracy_reward, get_cosine_scaled_reward, math_answers, reasoning_accuracy_reward
from envgrad.rewards.accuracy import needs_math
from envgrad.rewards.build import build_reward_sources
from helpers.rewards import answered, batch, called, score, task

THIRD = r"\frac{1}{3}"


def boxed(text):
    return rf"My answer is \boxed{{{text}}}"


def test_accuracy():
    answers = [boxed(THIRD), boxed("2/6"), boxed(r"\frac{1}{2}"), "no idea", "The final answer is $1/3$", "1/3"]
    assert accuracy_reward(answers, [THIRD] * 6) == [1.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    assert accuracy_reward([], []) == []


def test_a_solution_that_cannot_be_read_says_nothing():
    assert accuracy_reward([boxed("4"), boxed("4")], [r"\text{no number}", "4"]) == [None, 1.0]


def test_the_last_answer_of_a_chat_counts():
    chat = [
        {"role": "assistant", "content": boxed("1"), "tool_calls": [{}]},
        {"role": "tool", "content": boxed("2")},
        {"role": "assistant", "content": boxed("3")},
    ]
    assert accuracy_reward([chat, [{"content": boxed("3")}]], ["3", "3"]) == [1.0, 1.0]


def test_reasoning_is_left_out_and_must_end():
    answers = [
        f"<think>{boxed('1')}</think> {boxed('2')}",
        f"<think>{boxed('2')}</think> {boxed('1')}",
        f"<think>{boxed('2')}",
        f"a</think>b</think>{boxed('2')}",
    ]
    assert reasoning_accuracy_reward(answers, ["2"] * 4) == [1.0, 0.0, 0.0, 1.0]
    assert reasoning_accuracy_reward([f"x FINAL {boxed('2')}", answers[0]], ["2"] * 2, ["END", "FINAL"]) == [1.0, 0.0]
    # Reasoning that does not end is wrong, whatever the solution is.
    assert reasoning_accuracy_reward(["<think>"], [r"\text{none}"]) == [0.0]
    apart = [{"role": "assistant", "content": boxed("2"), "reasoning_content": boxed("1")}]
    assert reasoning_accuracy_reward([apart], ["2"]) == [1.0]


def test_what_is_logged():
    logged = {}
    answers = [f"<think>a</think>{boxed('2')}", "<think>", "</think>nothing", f"</think>{boxed('2')}"]
    golds = ["2", "2", "2", r"\text{none}"]
    assert reasoning_accuracy_reward(answers, golds, log_extra=logged.__setitem__) == [1.0, 0.0, 0.0, None]
    incomplete = "[incomplete reasoning]"
    assert logged["solution"] == golds
    assert logged["gold_parsed"] == ["[2, '2']", incomplete, "[2, '2']", "[unparseable]"]
    assert logged["answer_parsed"] == ["[2, '2']", incomplete, "[unparseable]", "[skipped]"]


def test_cosine_scaled():
    reward = get_cosine_scaled_reward(100)
    right, wrong = boxed("2"), boxed("3")
    ids = [[1] * n for n in (0, 50, 100, 150)]
    assert reward([right] * 4, ["2"] * 4, ids) == pytest.approx([1.0, 0.75, 0.5, 0.5])
    assert reward([wrong] * 4, ["2"] * 4, ids) == pytest.approx([-1.0, -0.75, -0.5, -0.5])
    # A third of the way the cosine is 1/2: three quarters of the shortest one's value.
    own = get_cosine_scaled_reward(30, min_value_wrong=-8, max_value_wrong=-4, min_value_correct=4, max_value_correct=8)
    assert own([right, wrong], ["2", "2"], [[1] * 10] * 2) == pytest.approx([7.0, -7.0])
    assert own([right], [r"\text{none}"], completion_ids=[[1]], prompts=[]) == [None]
    assert reward.__name__ == "cosine_scaled_reward"
    assert pickle.loads(pickle.dumps(reward))([right], ["2"], [[1] * 50]) == [0.75]
    with pytest.raises(ConfigurationError, match="max_len=0"):
        get_cosine_scaled_reward(0)


def test_it_works_in_a_thread_as_the_rollout_calls_it():
    sources, _ = build_reward_sources([accuracy_reward, reasoning_accuracy_reward], columns=frozenset({"solution"}))
    row = task({"prompt": "p", "solution": "2"})
    group = batch([answered(boxed("2"), task=row), called(boxed("2"), task=row)])
    assert score(sources[0], group) == [1.0, 1.0]
    assert group.log.extras["answer_parsed"] == ["[2, '2']"] * 2
    results = []
    thread = threading.Thread(target=lambda: results.append(accuracy_reward([boxed("2")], ["2"])))
    thread.start()
    thread.join(60)
    assert results == [[1.0]]


def test_a_missing_solution_column_is_found_at_construction():
    with pytest.raises(ConfigurationError, match="'accuracy_reward' requires 'solution'"):
        build_reward_sources(accuracy_reward, columns=frozenset({"prompt", "answer"}))


def test_one_solution_per_completion():
    with pytest.raises(ConfigurationError, match="accuracy_reward got 1 solutions for 2 completions"):
        accuracy_reward(["a", "b"], ["1"])


def test_without_math_verify_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr(math_answers, "find_spec", lambda name: None)
    fix = r"math-verify package: pip install 'envgrad\[math\]'"
    for use in (
        lambda: accuracy_reward([boxed("1")], ["1"]),
        lambda: get_cosine_scaled_reward(10),
        lambda: build_reward_sources(accuracy_reward, columns=None),
    ):
        with pytest.raises(ConfigurationError, match=fix):
            use()
    assert needs_math(reasoning_accuracy_reward) and not needs_math(boxed)
