from __future__ import annotations

import copy
import pickle

import pytest
import torch
from transformers import (
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from envgrad.last_layer import LastLayer, install_last_layer, remove_last_layer
from envgrad.layout import PackedLayout
from envgrad.logprobs import PolicyForward, install_policy_forward, policy_logprobs
from envgrad.packing import MicroBatch, pack
from envgrad.types import TrainingSample
from helpers.row_models import COMMON, assert_equal, learned, model_of, rows


def feed_forward_rows(model: PreTrainedModel, batch: MicroBatch) -> list[int]:
    """Tokens that each layer's feed-forward part sees."""
    seen: list[int] = []
    hooks = [
        layer.mlp.register_forward_hook(lambda module, args, output: seen.append(args[0].shape[1]))
        for layer in model.model.layers
    ]
    policy_logprobs(model, batch)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize(
    "config",
    [LlamaConfig(**COMMON), Qwen3Config(**COMMON), MistralConfig(**COMMON, sliding_window=12)],
    ids=["llama", "qwen3", "mistral"],
)
def test_only_predicting_tokens_pass_the_last_feed_forward_part(config: PretrainedConfig) -> None:
    model, batch = model_of(config), rows()
    forward = install_policy_forward(model)
    assert forward.chooses_rows
    assert feed_forward_rows(model, batch) == [batch.num_forwarded_tokens, 10]
    found = learned(model, batch)
    forward.chooses_rows = False
    assert feed_forward_rows(model, batch) == [batch.num_forwarded_tokens] * 2
    assert_equal(found, learned(model, batch))


def test_rows_that_all_predict_are_taken_whole() -> None:
    model = model_of(LlamaConfig(**COMMON))
    install_policy_forward(model)
    sample = TrainingSample(
        token_ids=(1, 2, 3, 4), mask=(0, 1, 1, 1), logprobs=(0.0,) * 4, versions=(0,) * 4, advantages=(0.0,) * 4,
        prompt_length=1, group="g",
    )  # fmt: skip
    assert feed_forward_rows(model, pack([sample], [1.0]).micro_batches[0]) == [3, 3]


@pytest.mark.parametrize(
    "config",
    [GraniteConfig(**COMMON, residual_multiplier=0.5), Gemma3TextConfig(**COMMON)],
    ids=["granite", "gemma3"],
)
def test_a_layer_put_together_otherwise_is_left_alone(config: PretrainedConfig) -> None:
    model = model_of(config)
    assert not install_policy_forward(model).chooses_rows
    assert "forward" not in vars(model.model.layers[-1])


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
def test_activation_checkpointing_gives_the_same_gradients() -> None:
    model, batch = model_of(LlamaConfig(**COMMON)), rows()
    install_policy_forward(model)
    expected = learned(model, batch)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_equal(learned(model, batch), expected)


def test_a_layer_called_past_our_forward_gives_the_same_numbers() -> None:
    model, batch = model_of(LlamaConfig(**COMMON)), rows()
    forward = install_policy_forward(model)
    expected = learned(model, batch)
    remove_last_layer(model)
    assert forward.chooses_rows
    assert_equal(learned(model, batch), expected)


def test_copies_have_one_of_their_own_and_uninstall_takes_it_out() -> None:
    model = model_of(LlamaConfig(**COMMON))
    forward = install_policy_forward(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        layer = other.model.layers[-1]
        assert isinstance(vars(layer)["forward"], LastLayer) and vars(layer)["forward"].layer is layer
        assert isinstance(vars(other)["forward"], PolicyForward) and vars(other)["forward"].chooses_rows
    assert install_last_layer(model) is vars(model.model.layers[-1])["forward"]
    forward.uninstall()
    assert "forward" not in vars(model.model.layers[-1])


def test_unread_tokens_are_not_attended_for() -> None:
    layout = PackedLayout.build([(6, (5, 3))])
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 14, 8), torch.randn(1, 2, 14, 8), torch.randn(1, 2, 14, 8)
    wanted = torch.tensor([5, 6, 8, 9, 13])
    from envgrad.attention import AttentionCall

    for window in (None, 3):
        call = AttentionCall(layer=0, scaling=None, dropout=0.0, window=window)
        whole = layout.attend(call, query, key, value)
        chosen = layout.of_queries(wanted).attend(call, query, key, value)
        assert torch.allclose(chosen[0, wanted], whole[0, wanted], atol=1e-6)
        unread = torch.ones(14, dtype=torch.bool).index_fill(0, wanted, False)
        assert (chosen[0, unread].abs().max() == 0) == (window is None)
