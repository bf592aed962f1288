"""Layers by kernels give the model's own numbers and gradients, for rows of ours only, and can be taken out again."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from envgrad import fused_layers
from envgrad.fused_layers import FusedLayer, install_fused_layers, remove_fused_layers
from envgrad.logprobs import PolicyForward, PolicyInputs, install_policy_forward
from envgrad.native.compiler import library
from envgrad.packing import MicroBatch
from helpers.row_models import COMMON, assert_equal, learned, model_of, rows

needs_kernels = pytest.mark.skipif(library() is None, reason="no C++ compiler here")

MODELS = {
    "llama": LlamaConfig(**COMMON),
    "llama with biases": LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True),
    "tied": LlamaConfig(**COMMON, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**{name: value for name, value in COMMON.items() if name != "head_dim"}),
    "qwen3": Qwen3Config(**COMMON),
    "mistral": MistralConfig(**COMMON, sliding_window=None),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FusedLayer]]:
    """Layers that went by kernels."""
    found: list[FusedLayer] = []
    inner = FusedLayer._fused

    def noted(self: FusedLayer, *args: Any) -> Tensor:
        found.append(self)
        return inner(self, *args)

    monkeypatch.setattr(FusedLayer, "_fused", noted)
    yield found


def own(model: PreTrainedModel, batch: MicroBatch, forward: PolicyForward) -> list[Tensor]:
    """By the model's own layers."""
    remove_fused_layers(model)
    found = learned(model, batch)
    assert install_fused_layers(model)
    return found


@needs_kernels
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("chooses", [True, False])
def test_a_row_through_kernels_is_the_models_own(
    config: PretrainedConfig, chooses: bool, calls: list[FusedLayer]
) -> None:
    model, batch = model_of(config), rows()
    forward = install_policy_forward(model)
    assert forward.chooses_rows
    forward.chooses_rows = chooses
    calls.clear()
    found = learned(model, batch)
    assert len(calls) == 2, "each layer once"
    assert_equal(found, own(model, batch, forward))
    assert len(calls) == 2


@needs_kernels
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["down_proj", "gate_proj", "o_proj"]])
def test_adapters_are_trained_through_kernels(targets: list[str], calls: list[FusedLayer]) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        model_of(LlamaConfig(**COMMON)), peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    )
    batch = rows()
    base = model.get_base_model()
    forward = install_policy_forward(model)
    calls.clear()
    found = learned(base, batch)
    assert len(calls) == 2 and len(found) == 1 + 2 * 2 * len(targets)
    assert_equal(found, own(base, batch, forward))


def with_dropout(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 1e-30


def with_a_hook(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    model.model.layers[1].input_layernorm.register_full_backward_hook(lambda *_: None)


def with_another_forward(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.forward = layer.self_attn.forward


@needs_kernels
@pytest.mark.parametrize("change", [with_dropout, with_a_hook, with_another_forward], ids=lambda one: one.__name__)
def test_layers_that_do_more_are_computed_by_the_model(change: Callable[[Any], None], calls: list[FusedLayer]) -> None:
    model, batch = model_of(LlamaConfig(**COMMON)), rows()
    install_policy_forward(model)
    expected = learned(model, batch)
    change(model)
    calls.clear()
    assert_equal(learned(model, batch), expected)
    assert not calls


@needs_kernels
def test_a_hook_of_a_product_is_called(calls: list[FusedLayer]) -> None:
    model, batch = model_of(LlamaConfig(**COMMON)), rows()
    install_policy_forward(model)
    expected = learned(model, batch)
    seen: list[str] = []
    kept: list[Tensor] = []
    for name, module in model.model.layers[0].named_modules():
        if name.endswith("_proj"):
            module.register_forward_hook(lambda *call, name=name: seen.append(name) or kept.append(call[2]))
            module.register_full_backward_hook(lambda *_: None)
    calls.clear()
    assert_equal(learned(model, batch), expected)
    remove_fused_layers(model)
    ours = [one.detach() for one in kept]
    kept.clear()
    model(policy=PolicyInputs(batch, temperature=1.0, entropy="none"))
    assert_equal(ours, [one.detach() for one in kept])  # what they have seen is not written to
    assert len(calls) == 2 and sorted(seen[: len(ours)]) == sorted(
        [*(f"self_attn.{one}_proj" for one in "qkvo"), *(f"mlp.{one}_proj" for one in ("gate", "up", "down"))]
    )


@needs_kernels
def test_other_precisions_and_other_calls_are_the_models(calls: list[FusedLayer]) -> None:
    model, batch = model_of(LlamaConfig(**COMMON)), rows()
    install_policy_forward(model)
    calls.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        learned(model, batch)
    model(input_ids=torch.tensor([[1, 2, 3]]))
    for layer in model.model.layers:
        layer.post_attention_layernorm.bfloat16()
    model(policy=PolicyInputs(batch, temperature=1.0, entropy="none"))
    model.double()
    learned(model, batch)
    assert not calls


@needs_kernels
def test_less_is_kept_for_the_backward_than_by_the_models_layers() -> None:
    model, batch = model_of(LlamaConfig(**COMMON | {"intermediate_size": 64})), rows()
    install_policy_forward(model)
    weights = {one.data_ptr() for one in model.parameters()}

    def kept() -> int:
        storages: dict[int, Tensor] = {}

        def note(x: Tensor) -> Tensor:
            storages[x.untyped_storage().data_ptr()] = x
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            model(policy=PolicyInputs(batch, temperature=1.0, entropy="none"))
        return sum(one.untyped_storage().nbytes() for pointer, one in storages.items() if pointer not in weights)

    ours = kept()
    remove_fused_layers(model)
    assert ours < 0.75 * kept()


@needs_kernels
def test_copies_have_layers_of_their_own_and_uninstall_takes_them_out() -> None:
    model = model_of(LlamaConfig(**COMMON))
    forward = install_policy_forward(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for layer in other.model.layers:
            fused = vars(layer)["forward"]
            assert isinstance(fused, FusedLayer) and fused.layer is layer
            assert fused.before is None or fused.before.layer is layer
    assert install_fused_layers(model), "again changes nothing"
    assert all(not isinstance(vars(layer)["forward"].before, FusedLayer) for layer in model.model.layers)
    forward.uninstall()
    assert all("forward" not in vars(layer) for layer in model.model.layers)


@pytest.mark.parametrize("change", [{"hidden_act": "gelu"}, {"hidden_act": "relu"}])
def test_other_activations_are_left_alone(change: dict[str, Any]) -> None:
    model = model_of(LlamaConfig(**COMMON, **change))
    assert not install_fused_layers(model)


def test_without_kernels_layers_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_layers, "library", lambda: None)
    model = model_of(LlamaConfig(**COMMON))
    install_policy_forward(model)
    assert not any(isinstance(vars(layer).get("forward"), FusedLayer) for layer in model.model.layers)
