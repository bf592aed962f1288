from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from envgrad.attention import use_envgrad_attention
from envgrad.last_layer import LastLayer, install_last_layer, remove_last_layer
from envgrad.layout import PackedLayout
from envgrad.logprobs import PolicyForward, install_policy_forward, policy_logprobs
from envgrad.packing import MicroBatch, pack
from envgrad.types import TrainingSample

COMMON = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
}  # fmt: skip


def model_of(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    use_envgrad_attention(model)
    return model.train()


def rows() -> MicroBatch:
    """Two siblings behind a prompt of 20 tokens; 9 of 24 and 1 of 5 own tokens are trained."""
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, 50, (20,), generator=generator).tolist()
    samples = []
    for own, trained in ((24, {0, 1, 2, 9, 10, 11, 20, 21, 22}), (5, {2})):
        ids = (*prompt, *torch.randint(0, 50, (own,), generator=generator).tolist())
        mask = (0,) * 20 + tuple(int(place in trained) for place in range(own))
        samples.append(
            TrainingSample(
                token_ids=ids, mask=mask, logprobs=(0.0,) * len(ids), versions=(0,) * len(ids),
                advantages=tuple(map(float, mask)), prompt_length=20, group="g",
            )
        )  # fmt: skip
    return pack(samples, [1.0, 1.0]).micro_batches[0]


def learned(model: PreTrainedModel, batch: MicroBatch) -> list[Tensor]:
    logprobs = policy_logprobs(model, batch).logprobs
    (logprobs * torch.arange(1.0, len(logprobs) + 1)).sum().backward()
    found = [logprobs.detach(), *(x.grad.clone() for x in model.parameters() if x.grad is not None)]
    model.zero_grad()
    return found


def assert_equal(ours: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(ours, expected, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max().clamp(min=1e-3)


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
