from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from envgrad.errors import ConfigurationError
from envgrad.rewards import RewardFunction, RewardModel, build_reward_sources, get_soft_overlong_punishment
from helpers.models import tokenizer_of
from helpers.rewards import answered, score, task


def style(completions, **kwargs):
    return [1.0] * len(completions)


def length(completions, **kwargs):
    return [2.0] * len(completions)


class Judge(nn.Module):
    def forward(self, input_ids, attention_mask):
        return attention_mask.sum(1).float()


def names(items, **options):
    return [source.name for source in build_reward_sources(items, **options)[0]]


def test_one_or_several_or_none():
    assert names(None) == names([]) == []
    assert names(style) == names([style]) == names((style,)) == ["style"]
    assert names([length, style]) == ["length", "style"]


def test_names():
    class Scorer:
        def __call__(self, completions):
            return [0.0]

    items = [partial(partial(style), x=1), Scorer(), lambda completions: [0.0], get_soft_overlong_punishment(9, 1)]
    assert names(items) == ["style", "Scorer", "<lambda>", "soft_overlong_punishment_reward"]


def test_a_second_one_of_a_name_gets_a_number():
    def style_2(completions): ...

    assert names([style, style, style]) == ["style", "style_2", "style_3"]
    assert names([style, style_2, style]) == ["style", "style_2", "style_3"]
    assert names([style, style, style_2]) == ["style", "style_2", "style_2_2"]


def test_reward_models_are_called_by_their_path_or_class(tmp_path):
    from transformers import LlamaConfig, LlamaForSequenceClassification

    tokenizer = tokenizer_of()
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                         num_attention_heads=2, num_labels=1)  # fmt: skip
    path = tmp_path / "org" / "tiny-rm"
    model = LlamaForSequenceClassification(config)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    loaded = LlamaForSequenceClassification.from_pretrained(path)
    items = [str(path), Path(path), loaded, model, Judge(), style]
    sources, _ = build_reward_sources(items, reward_processing_classes=[None, None, None, tokenizer, tokenizer, None])
    assert [source.name for source in sources] == [
        *("tiny-rm", "tiny-rm_2", "tiny-rm_3", "LlamaForSequenceClassification", "Judge", "style")
    ]
    assert [type(source) for source in sources] == [RewardModel] * 5 + [RewardFunction]
    first, second, third, *_ = [score(source, [answered("x")]) for source in sources[:3]]
    assert first == second == third


def test_a_model_that_is_not_there_names_itself():
    with pytest.raises(ConfigurationError, match="reward model '/no/such' cannot be loaded"):
        build_reward_sources("/no/such")


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([style, 3], r"reward_funcs\[1\] is 3 \(int\)"),
        ([None], r"reward_funcs\[0\] is None"),
        ([[style]], r"reward_funcs\[0\] is \["),
        ([style, Judge], r"reward_funcs\[1\] is the class Judge; pass an instance"),
        ({"a": style}, r"reward_funcs\[0\] is {"),
    ],
)
def test_wrong_items_are_named(items, message):
    with pytest.raises(ConfigurationError, match=message):
        build_reward_sources(items)


def test_a_name_that_an_environment_has():
    with pytest.raises(ConfigurationError, match=r"reward_funcs\[1\] is called 'style', as an environment is.*rename"):
        build_reward_sources([length, style], environment_names=["Game", "style"])

    def turns(completions): ...

    assert names([turns]) == ["turns"]
    with pytest.raises(ConfigurationError, match="'turns', as a part of the environments' rewards is"):
        build_reward_sources([turns], environment_names=["Game"])


# -- weights


def test_weights_as_a_list_follow_the_functions():
    _, weights = build_reward_sources([style, length, style], reward_weights=[0.5, 2, -1], environment_names=["Game"])
    assert [weights.of(name) for name in ("style", "length", "style_2", "Game")] == [0.5, 2, -1, 1.0]


@pytest.mark.parametrize(("given_weights", "count"), [([1.0], 1), ([1.0] * 3, 3), ([], 0)])
def test_a_list_of_weights_of_another_length_names_both_counts(given_weights, count):
    message = f"reward_weights has {count} weights and reward_funcs has 2 functions"
    with pytest.raises(ConfigurationError, match=message):
        build_reward_sources([style, length], reward_weights=given_weights)
    with pytest.raises(ConfigurationError, match="1 weights and reward_funcs has 0 functions"):
        build_reward_sources(None, reward_weights=[1.0], environment_names=["Game"])


def test_weights_by_name_reach_environments_and_components():
    weights = {"style": 0.5, "Game": 2.0, "component": 3.0}
    _, built = build_reward_sources([style, length], reward_weights=weights, environment_names=["Game"])
    assert {name: built.of(name) for name in (*weights, "length")} == {**weights, "length": 1.0}


def test_a_weight_that_names_nothing_is_found_where_it_can_be():
    with pytest.raises(
        ConfigurationError, match=r"names 'stile', which is no reward function \(did you mean 'style'\?\)"
    ):
        build_reward_sources([style], reward_weights={"stile": 1.0})
    build_reward_sources([style], reward_weights={"stile": 1.0}, environment_names=["Game"])


@pytest.mark.parametrize("weight", [math.nan, math.inf, "1", None, True])
def test_a_weight_is_a_finite_number(weight):
    for weights in ([weight], {"style": weight}):
        with pytest.raises(ConfigurationError, match="reward weight of 'style'"):
            build_reward_sources([style], reward_weights=weights)


@pytest.mark.parametrize("weights", ["1.0", 1.0, {1.0}])
def test_weights_are_a_list_or_a_mapping(weights):
    with pytest.raises(ConfigurationError, match="must be a list with one weight per reward function"):
        build_reward_sources([style], reward_weights=weights)


@given(st.lists(st.sampled_from([style, length]), max_size=6), st.data())
def test_each_function_keeps_its_weight(items, data):
    given_weights = data.draw(st.lists(st.floats(-9, 9), min_size=len(items), max_size=len(items)))
    sources, weights = build_reward_sources(items, reward_weights=given_weights)
    assert len({source.name for source in sources}) == len(items)
    assert [weights.of(source.name) for source in sources] == given_weights


# -- tokenizers


def test_tokenizers_belong_to_reward_models():
    tokenizer = tokenizer_of()
    with pytest.raises(ConfigurationError, match=r"reward_processing_classes\[0\] cannot act: .* is a function"):
        build_reward_sources([style], reward_processing_classes=[tokenizer])
    with pytest.raises(ConfigurationError, match="has 1 entries and reward_funcs has 2"):
        build_reward_sources([style, Judge()], reward_processing_classes=tokenizer)
    with pytest.raises(ConfigurationError, match="has 1 entries and reward_funcs has 0"):
        build_reward_sources(None, reward_processing_classes=tokenizer)
    with pytest.raises(ConfigurationError, match="'Judge' needs a tokenizer"):
        build_reward_sources([style, Judge()], reward_processing_classes=[None, None])
    assert names(Judge(), reward_processing_classes=tokenizer) == ["Judge"]


# -- the rest


def test_nothing_that_is_given_is_changed():
    items, tokenizers, weights = [style, Judge(), style], [None, tokenizer_of(), None], [1.0, 2.0, 3.0]
    copies = list(items), list(tokenizers), list(weights)
    _, built = build_reward_sources(items, reward_processing_classes=tokenizers, reward_weights=weights)
    assert (items, tokenizers, weights) == copies
    by_name = {"style": 1.0}
    _, built = build_reward_sources([style], reward_weights=by_name)
    by_name["style"] = 9.0
    assert built.of("style") == 1.0


def test_functions_get_state_columns_and_tools():
    def f(completions, trainer_state, solution, environments=None):
        assert completions[0][0]["content"] == "4" and environments is None
        return [float(trainer_state)]

    episode = answered("4", reasoning="2+2", raw="<think>2+2</think>4", task=task({"solution": "4"}))
    columns = frozenset({"prompt", "solution"})
    (source,), _ = build_reward_sources(f, trainer_state=lambda: 5, columns=columns, has_tools=True)
    assert score(source, [episode]) == [5.0]
    with pytest.raises(ConfigurationError, match="requires 'solution'"):
        build_reward_sources(f, columns=frozenset({"prompt"}))
    with pytest.raises(ConfigurationError, match="requires 'environments'"):
        build_reward_sources(lambda environments: [])
    build_reward_sources(lambda environments: [], environment_names=["Game"])
