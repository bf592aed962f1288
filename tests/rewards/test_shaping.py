from __future__ import annotations

import pickle

import pytest

from envgrad.errors import ConfigurationError
from envgrad.rewards import get_repetition_penalty_reward, get_soft_overlong_punishment, think_format_reward
from envgrad.rewards.exchange import exchange_of
from helpers.rewards import answered, called


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>\nreason\n</think>\nanswer", 1.0),
        ("<think></think>", 1.0),
        ("<think>a</think>b</think>c", 1.0),
        ("<think>reason\nanswer", 0.0),
        ("reason</think>answer", 0.0),
        (" <think>reason</think>answer", 0.0),
        ("<think>a<think>b</think>c", 0.0),
        ("<think>a</think>b<think>c</think>", 0.0),
        ("", 0.0),
    ],
)
def test_think_format(text, reward):
    assert think_format_reward([text], solution=["kept out"]) == [reward]
    assert think_format_reward([[{"role": "assistant", "content": text}]]) == [reward]


def test_think_format_of_episodes():
    thought = answered("4", reasoning="2+2", raw="<think>2+2</think>4")
    cut = answered("", reasoning="2+2", raw="<think>2+2")
    for has_tools in (False, True):
        exchanges = [exchange_of(e, has_tools=has_tools) for e in (thought, cut, called(), answered("4"))]
        assert think_format_reward([exchange.completion for exchange in exchanges]) == [1.0, 0.0, 1.0, 0.0]


def test_repetition_penalty():
    # [1, 2, 1, 2, 1]: bigrams 12, 21, 12, 21: 2 of 4 are unique; trigrams 121, 212, 121: 2 of 3.
    ids = [[1, 2, 1, 2, 1], [1, 2, 3], [7], []]
    assert get_repetition_penalty_reward(2, -2.0)(completion_ids=ids, prompts=[]) == [-1.0, 0.0, 0.0, 0.0]
    assert get_repetition_penalty_reward()(ids) == pytest.approx([-1 / 3, 0.0, 0.0, 0.0])
    assert get_repetition_penalty_reward(1)([[4, 4, 4, 4]]) == [-0.75]


def test_soft_overlong_punishment():
    punish = get_soft_overlong_punishment(10, 4)
    lengths = {0: 0.0, 6: 0.0, 7: -0.25, 8: -0.5, 10: -1.0, 11: -1.0}
    assert punish(completion_ids=[[1] * n for n in lengths], completions=[]) == list(lengths.values())
    assert get_soft_overlong_punishment(10, 0)([[1] * 10, [1] * 11]) == [0.0, -1.0]


def test_names_are_those_of_trl_and_they_can_be_pickled():
    repetition, overlong = get_repetition_penalty_reward(2), get_soft_overlong_punishment(10, 4)
    assert repetition.__name__ == "repetition_penalty_reward"
    assert overlong.__name__ == "soft_overlong_punishment_reward"
    assert pickle.loads(pickle.dumps(repetition))([[1, 1, 1]]) == [-0.5]
    assert pickle.loads(pickle.dumps(overlong))([[1] * 8]) == [-0.5]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: get_repetition_penalty_reward(0), "ngram_size=0"),
        (lambda: get_repetition_penalty_reward(3, 0.5), r"max_penalty=0\.5"),
        (lambda: get_soft_overlong_punishment(10, 11), "soft_punish_cache=11"),
        (lambda: get_soft_overlong_punishment(10, -1), "soft_punish_cache=-1"),
        (lambda: get_soft_overlong_punishment(0, 0), "max_completion_len=0"),
    ],
)
def test_what_cannot_work_is_an_error(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()
