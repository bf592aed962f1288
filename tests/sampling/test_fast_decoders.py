"""What holds for forwards over copies of a model's weights, by compiled kernels and by torch's operations alike."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from decoder_kit import MODELS, SHAPE, both, decoder_for, model_of
from sampling_kit import ask, build, make_local, plain_logprobs, prompt, run, seeded, session
from torch import Tensor, nn
from transformers import HeliumConfig, HeliumForCausalLM, LlamaConfig, LlamaForCausalLM

from envgrad.sampling import fused, native_decoder
from envgrad.sampling.compatibility import cached_forward_fault, fast_decoder
from envgrad.sampling.fused import FusedDecoder
from envgrad.sampling.kv_cache import KVCache
from envgrad.sampling.local import LocalSampler
from envgrad.sampling.native_decoder import NativeDecoder


def assert_alike(found: Tensor, own: Tensor) -> None:
    assert found.shape == own.shape
    assert torch.allclose(found, own, atol=1e-4 * float(own.abs().max()), rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_the_model_s_own_far_into_a_row(name: str, kind: str) -> None:
    model = model_of(name)
    decoder = decoder_for(model, kind)
    for keep in (None, [0, 3, 8], [8]):
        own, found = both(model, decoder, keep)
        assert_alike(found, own)


def test_a_model_of_this_shape_that_computes_something_else_is_found_by_its_numbers(kind: str) -> None:
    torch.manual_seed(0)
    model = HeliumForCausalLM(HeliumConfig(**SHAPE, head_dim=8)).eval()  # turns neighbours in a head, not its halves
    assert cached_forward_fault(model) is None
    assert (NativeDecoder if kind == "native" else FusedDecoder).of(model) is not None
    assert fast_decoder(model) is None


def test_a_rotation_of_another_kind_is_found_when_copies_are_made(kind: str) -> None:
    class Uneven(nn.Module):
        rope_type = "default"

        def __init__(self, rotary: nn.Module) -> None:
            super().__init__()
            self.rotary = rotary
            self.rope_type = "default"

        def forward(self, *given: Any, **options: Any) -> tuple[Tensor, Tensor]:
            cosine, sine = self.rotary(*given, **options)
            return torch.cat((cosine[..., :4] / 2, cosine[..., 4:]), -1), sine

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    model.model.rotary_emb = Uneven(model.model.rotary_emb)
    assert cached_forward_fault(model) is None
    assert (NativeDecoder if kind == "native" else FusedDecoder).of(model) is not None
    assert fast_decoder(model) is None
    sampler = LocalSampler(model, max_sessions=1, max_context=64)
    try:
        answer = run(ask(sampler, [(session(0), prompt(5), seeded(6))]))[0]
    finally:
        sampler.close()
    assert answer.logprobs == pytest.approx(plain_logprobs(model, [*prompt(5), *answer.token_ids], 5), abs=1e-4)


def test_another_activation_is_left_to_torch() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, hidden_act="gelu")).eval()
    assert NativeDecoder.of(model) is None
    own, found = both(model, decoder_for(model, "fused"), None)
    assert_alike(found, own)


def test_layers_with_numbers_of_their_own_are_left_to_torch() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    model.model.layers[1].input_layernorm.variance_epsilon = 1.0
    assert NativeDecoder.of(model) is None
    own, found = both(model, decoder_for(model, "fused"), None)
    assert_alike(found, own)


def test_copies_follow_the_weights_however_they_change(kind: str) -> None:
    model = build("llama")
    decoder = decoder_for(model, kind)
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


def test_every_weight_is_followed(kind: str) -> None:
    """Each is replaced in turn, as by a checkpoint that is loaded, and each shows in the logits."""
    model = build("qwen2")
    decoder = decoder_for(model, kind)
    before, _ = both(model, decoder, None)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.3 * torch.randn(parameter.shape, generator=generator)
        decoder.refresh()
        own, found = both(model, decoder, None)
        assert_alike(found, own)
        assert not torch.allclose(own, before, atol=1e-4)
        before = own


def test_adapters_are_part_of_the_weights_and_followed_as_they_train(kind: str) -> None:
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer

    config = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", lora_dropout=0.5)
    model = get_peft_model(build("qwen2"), config).get_base_model().eval()
    decoder = decoder_for(model, kind)
    plain = both(model, decoder, None)[0]
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, 0.0, 0.3)
    decoder.refresh()
    own, found = both(model, decoder, None)
    assert not torch.allclose(own, plain, atol=0.1)
    assert_alike(found, own)
    for layer in [module for module in model.modules() if isinstance(module, LoraLayer)]:
        layer.enable_adapters(False)
    decoder.refresh()
    assert torch.allclose(both(model, decoder, None)[1], plain, atol=1e-3)


def test_a_hook_on_any_module_brings_back_the_module_s_own_forward(kind: str) -> None:
    model = build("llama")
    sampler = LocalSampler(model, max_sessions=2, max_context=64)
    calls: list[int] = []
    try:
        first = run(ask(sampler, [(session(0), prompt(5), seeded(4))]))[0]
        assert sampler._engine._fast is not None
        handle = model.get_submodule("model.layers.0.mlp").register_forward_hook(lambda *_: calls.append(1))
        second = run(ask(sampler, [(session(1), prompt(5), seeded(4))]))[0]
        handle.remove()
    finally:
        sampler.close()
    assert len(calls) == 4
    assert sampler._engine._fast is None and isinstance(sampler._engine.scheduler.cache, KVCache)
    assert first.token_ids == second.token_ids
    assert first.logprobs == pytest.approx(second.logprobs, abs=1e-4)


def test_a_hook_between_two_turns_costs_no_more_than_reading_the_row_again(kind: str) -> None:
    model = build("llama")
    sampler = LocalSampler(model, max_sessions=2, max_context=64)
    mine = session(0)

    async def turns() -> list[int]:
        row = prompt(6)
        for turn in range(3):
            answer = await sampler.sample(row, seeded(4, seed=turn), mine)
            want = plain_logprobs(model, [*row, *answer.token_ids], len(row))
            assert answer.logprobs == pytest.approx(want, abs=1e-4)
            row += [*answer.token_ids, *prompt(3, seed=turn)]
            if turn == 0:
                await asyncio.sleep(0.05)  # the engine gives the module back
                model.get_submodule("model.layers.1").register_forward_hook(lambda *_: None)
        return row

    sampler.begin(mine)
    try:
        assert len(run(turns())) == 6 + 3 * 7
        assert sampler._engine._fast is None
    finally:
        sampler.close()


def test_training_goes_on_after_sampling_and_sampling_with_what_was_trained(kind: str) -> None:
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


def test_memory_goes_when_every_session_has_ended(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_decoder if kind == "native" else fused, "KEPT_BYTES", 0)
    sampler = make_local()
    try:
        run(ask(sampler, [(session(0), prompt(9), seeded(4))]))
        engine = sampler._engine
        decoder: Any = engine._fast
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


def test_groups_of_another_size_find_memory_that_was_used_before(kind: str) -> None:
    """Slots are fewer after a rest, in the memory of the many: each sibling gets its own copy of the prompt."""
    model = build("llama")
    sampler = LocalSampler(model, max_sessions=24, max_context=64)
    try:
        for task, siblings in enumerate((20, 4, 20, 6)):
            row = prompt(30, seed=task)
            asked = [(session(task, one), row, seeded(8, seed=one)) for one in range(siblings)]
            for answer in run(ask(sampler, asked)):
                want = plain_logprobs(model, [*row, *answer.token_ids], 30)
                assert answer.logprobs == pytest.approx(want, abs=1e-4)
            for _ in range(1000):
                if sampler._engine.scheduler.cache.slots == 0:
                    break
                sampler._thread.join(0.005)
    finally:
        sampler.close()
