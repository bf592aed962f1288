from __future__ import annotations

from functools import cache

import pytest
import torch
from sampling_kit import VOCABULARY, ask, build, make_local, plain_logprobs, prompt, run, seeded, session
from torch import Tensor, nn
from transformers import GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from envgrad.sampling import fused
from envgrad.sampling.compatibility import cached_forward_fault, fused_decoder
from envgrad.sampling.decode_layout import DecodeLayout
from envgrad.sampling.engine import ragged_forward
from envgrad.sampling.fused import FusedDecoder
from envgrad.sampling.kv_cache import KVCache, StepRow
from envgrad.sampling.local import LocalSampler

SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 160, "initializer_range": 0.3,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 100.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40, "rope_theta": 100.0,
    },
}  # fmt: skip


@cache
def model_of(name: str) -> PreTrainedModel:
    torch.manual_seed(1)
    if name in ROPES:
        return LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=ROPES[name])).eval()
    if name == "biased":
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, head_dim=10))
        for module in model.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.normal_(module.bias)
        return model.eval()
    if name == "tied":
        return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)).eval()
    model = build(name)
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name or "bias" in parameter_name:  # all ones and zeros would not show an error
            nn.init.normal_(parameter, 1.0, 0.3)
    return model


def both(model: PreTrainedModel, decoder: FusedDecoder, keep: list[int] | None) -> tuple[Tensor, Tensor]:
    """Logits of a prompt of 5 beside a row that goes on with 3 tokens and one that goes on with 1."""
    found = []
    for which in ("own", "fused"):
        cache = KVCache()
        cache.resize(3, 160)
        steps = [
            ([StepRow(0, 0, 120), StepRow(1, 0, 7)], None),
            ([StepRow(0, 120, 1), StepRow(1, 7, 3), StepRow(2, 0, 5)], keep),
        ]
        logits = torch.empty(0)
        for number, (rows, chosen) in enumerate(steps):
            ids = torch.tensor(prompt(sum(row.size for row in rows), seed=number))
            layout = DecodeLayout(cache, rows, torch.device("cpu"))
            with torch.no_grad():
                if which == "own":
                    indices = torch.arange(len(ids)) if chosen is None else torch.tensor(chosen)
                    logits = ragged_forward(model, layout, ids, indices)
                else:
                    logits = decoder.forward(layout, ids, None if chosen is None else torch.tensor(chosen))
        found.append(logits)
    return found[0], found[1]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "biased", "tied", *ROPES])
def test_logits_equal_the_model_s_own_far_into_a_row(name: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if packed:
        monkeypatch.setattr(fused, "_PACKED", 1)
    model = model_of(name)
    assert cached_forward_fault(model) is None
    decoder = fused_decoder(model)
    assert decoder is not None
    decoder.refresh()
    for keep in (None, [0, 3, 8]):
        own, found = both(model, decoder, keep)
        assert found.shape == own.shape
        assert torch.allclose(found, own, atol=1e-4 * float(own.abs().max()), rtol=0)


@pytest.mark.parametrize("name", ["gemma3", "gpt2"])
def test_models_of_another_shape_run_their_own_forward(name: str) -> None:
    assert FusedDecoder.of(build(name)) is None


def test_a_model_of_this_shape_that_computes_something_else_is_found_by_its_numbers() -> None:
    torch.manual_seed(0)
    model = GraniteForCausalLM(GraniteConfig(**SHAPE, residual_multiplier=0.5, logits_scaling=2.0)).eval()
    assert cached_forward_fault(model) is None
    assert FusedDecoder.of(model) is not None
    assert fused_decoder(model) is None


def test_growing_rotations_windows_and_other_modules_are_declined() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
    assert FusedDecoder.of(LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=rope))) is None
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    assert FusedDecoder.of(model) is not None
    assert FusedDecoder.of(model.to(torch.bfloat16)) is None
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))

    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    model.model.layers[1].mlp.up_proj = Doubled(32, 48, bias=False)
    assert FusedDecoder.of(model) is None
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    model.model.layers[0].extra = nn.Linear(32, 32)  # a weight that nothing here would use
    assert FusedDecoder.of(model) is None


def test_copies_follow_the_weights_however_they_change() -> None:
    model = build("llama")
    assert cached_forward_fault(model) is None
    decoder = fused_decoder(model)
    assert decoder is not None
    decoder.refresh()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(input_ids=torch.tensor([prompt(9)])).logits.sum().backward()
    before, _ = both(model, decoder, None)
    optimizer.step()
    own, stale = both(model, decoder, None)
    assert not torch.allclose(own, before, atol=1e-2) and not torch.allclose(own, stale, atol=1e-2)
    decoder.refresh()
    own, found = both(model, decoder, None)
    assert torch.allclose(found, own, atol=1e-3)
    weight = model.get_submodule("model.layers.1.mlp.down_proj").weight
    weight.data = weight.data * 2
    decoder.refresh()
    own, found = both(model, decoder, None)
    assert torch.allclose(found, own, atol=1e-3)


def test_adapters_are_part_of_the_weights_and_followed_as_they_train() -> None:
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer

    config = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", lora_dropout=0.5)
    model = get_peft_model(build("qwen2"), config).get_base_model().eval()
    assert cached_forward_fault(model) is None
    decoder = fused_decoder(model)
    assert decoder is not None
    plain = both(model, decoder, None)[0]
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, 0.0, 0.3)
    decoder.refresh()
    own, found = both(model, decoder, None)
    assert not torch.allclose(own, plain, atol=0.1)
    assert torch.allclose(found, own, atol=1e-4 * float(own.abs().max()), rtol=0)
    for layer in [module for module in model.modules() if isinstance(module, LoraLayer)]:
        layer.enable_adapters(False)
    decoder.refresh()
    assert torch.allclose(both(model, decoder, None)[1], plain, atol=1e-3)
    dora = LoraConfig(r=4, target_modules=["q_proj"], use_dora=True)
    assert FusedDecoder.of(get_peft_model(build("qwen2"), dora).get_base_model()) is None


def test_a_hook_on_any_module_brings_back_the_module_s_own_forward() -> None:
    model = build("llama")
    sampler = LocalSampler(model, max_sessions=2, max_context=64)
    calls: list[int] = []
    try:
        first = run(ask(sampler, [(session(0), prompt(5), seeded(4))]))[0]
        handle = model.get_submodule("model.layers.0.mlp").register_forward_hook(lambda *_: calls.append(1))
        second = run(ask(sampler, [(session(1), prompt(5), seeded(4))]))[0]
        handle.remove()
    finally:
        sampler.close()
    assert len(calls) == 4
    assert first.token_ids == second.token_ids
    assert first.logprobs == pytest.approx(second.logprobs, abs=1e-4)


def test_training_goes_on_after_sampling_and_sampling_with_what_was_trained() -> None:
    model = build("qwen3").train()
    sampler = LocalSampler(model, max_sessions=2, max_context=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    try:
        for version in range(3):
            answer = run(ask(sampler, [(session(version), prompt(6), seeded(6, seed=version))]))[0]
            row = [*prompt(6), *answer.token_ids]
            want = plain_logprobs(model.eval(), row, 6)
            assert answer.logprobs == pytest.approx(want, abs=1e-3)
            model.train()
            model(input_ids=torch.tensor([row])).logits.logsumexp(-1).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            sampler.update_weights(version + 1, None)
    finally:
        sampler.close()


def test_memory_goes_when_every_session_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "KEPT_BYTES", 0)
    sampler = make_local()
    try:
        run(ask(sampler, [(session(0), prompt(9), seeded(4))]))
        engine = sampler._engine
        decoder = engine._fused
        assert decoder is not None
        for _ in range(1000):
            if engine.scheduler.cache.slots == 0 and decoder._copies is None:  # the cache goes first
                break
            sampler._thread.join(0.005)
        assert engine.scheduler.cache.num_bytes == 0 and not engine.scheduler.slots
        assert decoder._copies is None
        run(ask(sampler, [(session(1), prompt(9), seeded(4))]))
    finally:
        sampler.close()
