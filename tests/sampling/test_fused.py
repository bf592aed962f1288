from __future__ import annotations

import pytest
import torch
from decoder_kit import MODELS, SHAPE, both, model_of
from sampling_kit import build
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from envgrad.sampling import fused
from envgrad.sampling.compatibility import cached_forward_fault
from envgrad.sampling.fused import FusedDecoder
from envgrad.sampling.native_decoder import NativeDecoder

DECODERS = pytest.mark.parametrize("decoder", [FusedDecoder, NativeDecoder])  # where there are no kernels it is None


@pytest.mark.parametrize("name", MODELS)
def test_weights_in_the_order_of_one_dnn_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_PACKED", 1)
    model = model_of(name)
    assert cached_forward_fault(model) is None
    decoder = FusedDecoder.of(model)
    assert decoder is not None
    decoder.refresh()
    own, found = both(model, decoder, [0, 3, 8])
    assert torch.allclose(found, own, atol=1e-4 * float(own.abs().max()), rtol=0)


@DECODERS
@pytest.mark.parametrize("name", ["gemma3", "gpt2"])
def test_models_of_another_shape_run_their_own_forward(name: str, decoder: type) -> None:
    assert decoder.of(build(name)) is None


@DECODERS
def test_growing_rotations_windows_and_other_modules_are_declined(decoder: type) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
    assert decoder.of(LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=rope))) is None
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    assert FusedDecoder.of(model) is not None
    assert decoder.of(model.to(torch.bfloat16)) is None
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))

    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    model.model.layers[1].mlp.up_proj = Doubled(32, 48, bias=False)
    assert decoder.of(model) is None
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    model.model.layers[0].extra = nn.Linear(32, 32)  # a weight that nothing here would use
    assert decoder.of(model) is None


@DECODERS
def test_variants_of_adapters_are_declined(decoder: type) -> None:
    from peft import LoraConfig, get_peft_model

    dora = LoraConfig(r=4, target_modules=["q_proj"], use_dora=True)
    assert decoder.of(get_peft_model(build("qwen2"), dora).get_base_model()) is None


def cut_mlp(model: LlamaForCausalLM) -> None:
    mlp = model.model.layers[1].mlp
    mlp.gate_proj, mlp.up_proj = nn.Linear(32, 40, bias=False), nn.Linear(32, 40, bias=False)
    mlp.down_proj = nn.Linear(40, 32, bias=False)


def cut_heads(model: LlamaForCausalLM) -> None:
    attention = model.model.layers[2].self_attn
    attention.q_proj, attention.o_proj = nn.Linear(32, 16, bias=False), nn.Linear(16, 32, bias=False)
    attention.num_key_value_groups = 1


def cut_embeddings(model: LlamaForCausalLM) -> None:
    model.model.embed_tokens = nn.Embedding(20, 32)


@DECODERS
@pytest.mark.parametrize("cut", [cut_mlp, cut_heads, cut_embeddings])
def test_layers_that_were_cut_by_hand_are_declined(decoder: type, cut: object) -> None:
    """Their forward may be right, and copies of the first layer's sizes would not be."""
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    cut(model)  # type: ignore[operator]
    if cut is not cut_embeddings:
        model(input_ids=torch.tensor([[1, 2, 3]]))
    assert decoder.of(model) is None
