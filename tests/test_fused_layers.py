"""Layers by kernels give the model's own numbers and gradients, for rows of ours only, and can be taken out again."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Glm4MoeConfig,
    GraniteConfig,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
)

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


def with_a_hook_at_a_product(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_proj.register_forward_hook(lambda module, args, output: output.double().float())


def with_parts_wrapped(model: Any) -> None:
    class Wrapped(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return super().__getattr__("inner") if name == "inner" else getattr(super().__getattr__("inner"), name)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.inner(*args, **kwargs)

    model.model.layers[0].mlp = Wrapped(model.model.layers[0].mlp)
    model.model.layers[1].mlp.act_fn = torch.nn.SiLU()


def with_angles_in_half_precision(model: Any) -> None:
    inner = model.model.rotary_emb.forward

    def rounded(*args: Any, **kwargs: Any) -> Any:
        return tuple(angle.half() for angle in inner(*args, **kwargs))

    model.model.rotary_emb.forward = rounded


def with_another_forward(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.forward = layer.self_attn.forward


@needs_kernels
@pytest.mark.parametrize(
    "change",
    [
        with_dropout, with_a_hook, with_a_hook_at_a_product, with_another_forward, with_parts_wrapped,
        with_angles_in_half_precision,
    ],
    ids=lambda one: one.__name__,
)  # fmt: skip
def test_layers_that_do_more_are_computed_by_the_model(change: Callable[[Any], None], calls: list[FusedLayer]) -> None:
    model, batch = model_of(LlamaConfig(**COMMON)), rows()
    install_policy_forward(model)
    expected = learned(model, batch)
    change(model)
    calls.clear()
    tolerance = 1e-2 if change is with_angles_in_half_precision else 1e-5
    for one, other in zip(learned(model, batch), expected, strict=True):
        assert (one - other).abs().max() <= tolerance * other.abs().max().clamp(min=1e-3)
    assert not calls


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


MORE = {
    "multiplies what is added": GraniteConfig(**COMMON, residual_multiplier=0.5),
    "drops in training": SeedOssConfig(**COMMON, residual_dropout=0.1),
    "scales late queries": Ministral3Config(**COMMON, sliding_window=None),
    "turns some layers only": SmolLM3Config(**COMMON, no_rope_layers=[0, 1], pad_token_id=0),
    "turns half of a head": Glm4MoeConfig(**COMMON, first_k_dense_replace=2, partial_rotary_factor=0.5),
}


@pytest.mark.parametrize("config", MORE.values(), ids=MORE.keys())
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_layers_that_compute_more_are_left_alone(config: PretrainedConfig, kind: torch.dtype) -> None:
    """Also where the row that would show it is computed in another precision."""
    model = model_of(config).to(kind)
    install_policy_forward(model)
    assert not any(isinstance(vars(layer).get("forward"), FusedLayer) for layer in model.model.layers)


@needs_kernels
def test_layers_whose_kernels_have_not_been_compared_are_left_alone() -> None:
    model = model_of(LlamaConfig(**COMMON)).to(torch.bfloat16)
    install_policy_forward(model)
    assert not any(isinstance(vars(layer).get("forward"), FusedLayer) for layer in model.model.layers)


@needs_kernels
def test_a_model_that_fails_in_its_own_way_is_installed_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(LlamaConfig(**COMMON))

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("attention_layout") is not None:
            raise AttributeError("no such thing")
        return plain(self, *args, **kwargs)

    plain = type(model.model.layers[0]).forward
    monkeypatch.setattr(type(model.model.layers[0]), "forward", broken)
    assert not install_policy_forward(model).chooses_rows
    assert all("forward" not in vars(layer) for layer in model.model.layers)


def test_without_kernels_layers_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_layers, "library", lambda: None)
    model = model_of(LlamaConfig(**COMMON))
    install_policy_forward(model)
    assert not any(isinstance(vars(layer).get("forward"), FusedLayer) for layer in model.model.layers)
