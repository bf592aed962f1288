"""Decoders of every size on the compiled kernels, rows for them in slots, and the torch model beside them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from envgrad.native import decoder
from envgrad.native.decoder import Kernels
from envgrad.sampling.kv_cache import StepRow
from envgrad.sampling.native_cache import NativeCache
from envgrad.sampling.native_decoder import NativeDecoder
from envgrad.sampling.requests import SharedPrefix

CPU = torch.device("cpu")
LONGEST = 80


class Sizes(NamedTuple):
    layers: int = 2
    width: int = 32
    kv_heads: int = 2
    group: int = 2
    size: int = 8
    mlp: int = 48
    vocabulary: int = 61
    biased: bool = False
    normed: bool = False
    tied: bool = False


@cache
def model_of(sizes: Sizes) -> PreTrainedModel:
    heads = sizes.kv_heads * sizes.group
    width = sizes.width if sizes.normed else -(-sizes.width // heads) * heads  # Llama's must be a multiple
    options = {
        "vocab_size": sizes.vocabulary, "hidden_size": width, "intermediate_size": sizes.mlp,
        "num_hidden_layers": sizes.layers, "num_attention_heads": heads,
        "num_key_value_heads": sizes.kv_heads, "head_dim": sizes.size, "max_position_embeddings": LONGEST,
        "initializer_range": width**-0.5, "attention_bias": sizes.biased, "tie_word_embeddings": sizes.tied,
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(sum(sizes))
    if sizes.normed:
        model: PreTrainedModel = Qwen3ForCausalLM(Qwen3Config(**options))
    else:
        model = LlamaForCausalLM(LlamaConfig(**options, mlp_bias=sizes.biased))
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:  # all ones and zeros would not show an error
            nn.init.normal_(parameter, 1.0, 0.3)
    return model.eval()


def own_logits(model: PreTrainedModel, row: Sequence[int]) -> Tensor:
    """The torch model's, in double precision."""
    with torch.no_grad():
        return deepcopy(model).double()(input_ids=torch.tensor([list(row)])).logits[0]


def assert_near(found: Tensor, expected: Tensor, limit: float = 2e-5) -> None:
    assert found.shape == expected.shape
    assert float((found.double() - expected.double()).abs().max()) <= limit * max(1.0, float(expected.abs().max()))


def random_row(length: int, vocabulary: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(vocabulary), k=length)


@cache
def kernels_of(made: object, threads: int) -> Kernels:
    kernels = Kernels(threads)
    assert kernels.threads == threads
    return kernels


def decoder_of(sizes: Sizes | PreTrainedModel, threads: int = 1) -> NativeDecoder:
    found = NativeDecoder.of(model_of(sizes) if isinstance(sizes, Sizes) else sizes)
    assert found is not None
    found.kernels = kernels_of(decoder.library(), threads)  # however small the model is
    found.refresh()
    return found


Part = tuple[int, int, Sequence[int]]
"""slot, place of the first token, tokens"""


def slots_of(made: NativeDecoder, slots: int, length: int) -> NativeCache:
    """Slots whose memory holds what must not be read."""
    found = made.new_cache()
    found.resize(slots, length)
    for memory in (found.keys, found.values):
        memory.fill_(torch.nan)
    return found


def forward(
    made: NativeDecoder,
    memory: NativeCache,
    parts: Sequence[Part],
    prefixes: Sequence[SharedPrefix | None] | None = None,
    keep: Sequence[int] | None = None,
) -> Tensor:
    rows = [StepRow(slot, start, len(tokens)) for slot, start, tokens in parts]
    flat = [token for _, _, tokens in parts for token in tokens]
    return made.forward(made.layout(memory, rows, CPU, prefixes), flat, keep).clone()


def alone(made: NativeDecoder, row: Sequence[int]) -> Tensor:
    return forward(made, slots_of(made, 1, len(row)), [(0, 0, row)])


def in_pieces(made: NativeDecoder, rows: Sequence[Sequence[int]], seed: int) -> list[Tensor]:
    """Logits of rows that grow in random pieces, in random slots, which are moved and resized in between."""
    chance, count = random.Random(seed), len(rows) + 2
    memory = slots_of(made, count, chance.randint(1, 12))
    slots, done = chance.sample(range(count), len(rows)), [0] * len(rows)
    got: list[list[Tensor]] = [[] for _ in rows]
    while unfinished := [index for index, row in enumerate(rows) if done[index] < len(row)]:
        chosen = chance.sample(unfinished, chance.randint(1, len(unfinished)))
        parts = []
        for index in chosen:
            piece = rows[index][done[index] : done[index] + chance.choice([1, 1, 1, 2, 3, 8, 20])]
            parts.append((slots[index], done[index], piece))
            done[index] += len(piece)
        if max(done) > memory.length:
            order = chance.sample(range(count), count)
            memory.resize(count, max(done) + chance.randint(0, 9), keep=order)
            slots = [order.index(slot) for slot in slots]
            parts = [(order.index(slot), start, piece) for slot, start, piece in parts]
        kept = [at for at in range(sum(len(one) for _, _, one in parts)) if chance.random() < 0.8]
        logits, every = forward(made, memory, parts, keep=kept), []
        assert len(logits) == len(kept)
        chosen_of = dict(zip(kept, logits, strict=True))
        for index, (_, _, piece) in zip(chosen, parts, strict=True):
            for _ in piece:
                got[index].append(chosen_of.get(len(every), torch.full_like(logits[:1].sum(0), torch.nan)))
                every.append(index)
    return [torch.stack(one) for one in got]
