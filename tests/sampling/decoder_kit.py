"""Models that fast decoders know, and their logits beside the models' own."""

from __future__ import annotations

from functools import cache

import torch
from sampling_kit import VOCABULARY, build, prompt
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from envgrad.sampling.compatibility import cached_forward_fault, fast_decoder
from envgrad.sampling.decode_layout import DecodeLayout
from envgrad.sampling.engine import ragged_forward
from envgrad.sampling.fast import FastDecoder
from envgrad.sampling.fused import FusedDecoder
from envgrad.sampling.kv_cache import KVCache, StepRow
from envgrad.sampling.native_decoder import NativeDecoder

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
MODELS = ["llama", "qwen2", "qwen3", "biased", "tied", *ROPES]
DECODERS = {"native": NativeDecoder, "fused": FusedDecoder}
CPU = torch.device("cpu")


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


def decoder_for(model: PreTrainedModel, kind: str) -> FastDecoder:
    """The model's decoder, which is of this kind, with copies of its weights."""
    assert cached_forward_fault(model) is None
    decoder = fast_decoder(model)
    assert isinstance(decoder, DECODERS[kind])
    decoder.refresh()
    return decoder


def both(model: PreTrainedModel, decoder: FastDecoder, keep: list[int] | None) -> tuple[Tensor, Tensor]:
    """Logits of a prompt of 5 beside a row that goes on with 3 tokens and one that goes on with 1: the model's own,
    and the decoder's."""
    steps = [
        ([StepRow(0, 0, 120), StepRow(1, 0, 7)], None),
        ([StepRow(0, 120, 1), StepRow(1, 7, 3), StepRow(2, 0, 5)], keep),
    ]
    found = []
    for fast in (False, True):
        cache = decoder.new_cache() if fast else KVCache()
        cache.resize(3, 160)
        logits = torch.empty(0)
        for number, (rows, chosen) in enumerate(steps):
            ids = prompt(sum(row.size for row in rows), seed=number)
            with torch.no_grad():
                if fast:
                    logits = decoder.forward(decoder.layout(cache, rows, CPU), ids, chosen)
                else:
                    kept = torch.tensor(range(len(ids)) if chosen is None else chosen)
                    logits = ragged_forward(model, DecodeLayout(cache, rows, CPU), torch.tensor(ids), kept)
        found.append(logits)
    return found[0], found[1]
