from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from sampling_kit import NAMES, VOCABULARY, ask, build, plain_logprobs, prompt, run, session, shared
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
)

from envgrad.attention import IMPLEMENTATION
from envgrad.errors import ConfigurationError
from envgrad.sampling.compatibility import cached_forward_fault
from envgrad.sampling.generate import GenerateSampler
from envgrad.sampling.local import LocalSampler, make_local_sampler
from envgrad.sampling.sampler import SamplingParams


def odd(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if name == "softcapping":
        config = Gemma2Config(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, max_position_embeddings=64, attn_logit_softcapping=0.5,
            initializer_range=0.5, query_pre_attn_scalar=1,
        )  # fmt: skip
        model: PreTrainedModel = Gemma2ForCausalLM._from_config(config, attn_implementation="eager")
    elif name == "alibi":
        model = BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=2))
    else:
        model = MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4))
    return model.eval()


@pytest.mark.parametrize("name", NAMES)
def test_usual_models_pass_and_stay_in_their_modes(name: str) -> None:
    model = build(name).train()
    state = torch.random.get_rng_state()
    assert cached_forward_fault(model) is None
    assert model.config._attn_implementation == IMPLEMENTATION
    assert all(module.training for module in model.modules())
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize(
    ("name", "reason"),
    [("softcapping", "softcap is not a plain softmax"), ("alibi", "."), ("recurrent", "takes no position_ids")],
)
def test_others_fall_back_with_a_notice(name: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    model = odd(name)
    before = model.config._attn_implementation
    with pytest.raises(ConfigurationError, match=reason):
        LocalSampler(model, max_sessions=2, max_context=32)
    assert model.config._attn_implementation == before
    with caplog.at_level(logging.WARNING):
        sampler = make_local_sampler(model, max_sessions=2, max_context=32)
    assert isinstance(sampler, GenerateSampler)
    assert "one row at a time" in caplog.text and type(model).__name__ in caplog.text
    opening = prompt(9)
    answer = run(ask(sampler, [(session(0), opening, SamplingParams(max_tokens=5, seed=1, temperature=0.8))]))[0]
    sampler.close()
    want = plain_logprobs(model, [*opening, *answer.token_ids], 9, temperature=0.8)
    assert answer.logprobs == pytest.approx(want, abs=1e-4)


def test_a_model_whose_attention_is_its_own_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = build("llama")
    layer = model.model.layers[1].self_attn
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda *args, **kwargs: (2 * forward(*args, **kwargs)[0], None))
    # the plain forward changes as well: still the same attention
    assert cached_forward_fault(model) is None
    other: Any = build("llama")
    layer = other.model.layers[1].self_attn
    inner = layer.forward
    monkeypatch.setattr(layer, "forward", lambda *a, **k: inner(*a, **{**k, "attention_layout": None}))
    assert "differs from the plain one" in str(cached_forward_fault(other))


def test_a_model_that_passes_gets_the_local_sampler() -> None:
    sampler = make_local_sampler(shared("llama"), max_sessions=2)
    assert isinstance(sampler, LocalSampler) and sampler.max_context == 160
    sampler.close()
