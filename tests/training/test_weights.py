"""What samplers get of a policy: the right names, the right numbers, and nothing of the policy itself changed."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from envgrad.errors import ConfigurationError
from envgrad.training.model import Policy
from envgrad.training.weights import adapter_weights, frozen_copy, module_weights, policy_weights
from helpers.models import tiny_llama, tokenizer_of


def adapted(**options) -> Policy:
    model = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj", "down_proj"], **options))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return Policy(model=model, tokenizer=tokenizer_of())


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["lm_head"]}, {"use_rslora": True}])
def test_adapters_are_merged_out_of_place_under_the_base_models_names(options):
    policy = adapted(**options)
    before = copy.deepcopy(policy.model.state_dict())
    weights = policy_weights(policy)
    merged = copy.deepcopy(policy.model).merge_and_unload().state_dict()
    assert set(weights) == set(merged) == set(tiny_llama().state_dict())
    for name, tensor in merged.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-6)
    assert not torch.equal(merged["model.layers.0.self_attn.q_proj.weight"],
                           before["base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"])  # fmt: skip
    after = policy.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before), "the policy is as it was"


def test_adapters_alone():
    policy = adapted()
    names = set(adapter_weights(policy))
    assert names and all("lora_" in name for name in names)
    assert adapter_weights(Policy(model=tiny_llama(), tokenizer=tokenizer_of())) == {}


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}])
def test_adapters_that_cannot_be_merged_are_refused(options):
    with pytest.raises(ConfigurationError, match="not plain LoRA"):
        policy_weights(adapted(**options))


def test_a_copy_shares_nothing_and_takes_weights_by_name():
    policy = adapted()
    copied = frozen_copy(policy)
    ids = torch.tensor([[5, 6, 7, 8]])
    policy.model.eval()
    with torch.no_grad():
        old = copied(input_ids=ids).logits
        assert torch.equal(old, policy.base(input_ids=ids).logits)
        for parameter in policy.model.parameters():
            parameter.add_(0.01)
        assert torch.equal(copied(input_ids=ids).logits, old), "its own weights"
        copied.load_state_dict(module_weights(policy))
        assert torch.equal(copied(input_ids=ids).logits, policy.base(input_ids=ids).logits)
    assert not any(parameter.requires_grad for parameter in copied.parameters())
    assert any(parameter.requires_grad for parameter in policy.model.parameters())


def test_a_quantized_model_is_not_copied():
    model = tiny_llama()
    model.is_quantized = True
    with pytest.raises(ConfigurationError, match="quantized"):
        frozen_copy(Policy(model=model, tokenizer=tokenizer_of()))
