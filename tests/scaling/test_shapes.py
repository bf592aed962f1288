from __future__ import annotations

import json
from pathlib import Path

import pytest

from envgrad.errors import ConfigurationError
from envgrad.scaling.shapes import SHAPES, shape_of


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("0.6B", 0.596), ("1.7B", 1.72), ("4B", 4.02), ("8B", 8.19), ("14B", 14.77), ("32B", 32.76), ("70B", 70.55)],
)
def test_sizes_have_the_parameters_that_were_published(name: str, parameters: float) -> None:
    assert SHAPES[name].parameters / 1e9 == pytest.approx(parameters, rel=0.002)


def test_a_folder_is_read(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from envgrad.training.flops import ModelCost

    config = LlamaConfig(
        vocab_size=300, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    shape, model = shape_of(str(tmp_path)), LlamaForCausalLM(config)
    assert shape.parameters == model.num_parameters()
    assert shape.cost == ModelCost.of(model)
    assert shape.kv_bytes(4) == 2 * 3 * 2 * 8 * 4


def test_activations_are_those_of_the_dry_run(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from envgrad import GRPOConfig
    from envgrad.scaling.hardware import ACCELERATORS
    from envgrad.scaling.memory import trainer_memory
    from envgrad.scaling.workload import Draw, Workload
    from envgrad.training.estimates import Lengths, estimate_memory, microbatch_tokens

    config = LlamaConfig(
        vocab_size=300, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    args = GRPOConfig(output_dir=str(tmp_path / "run"), per_device_train_batch_size=8, num_generations=8, use_cpu=True)
    lengths = Lengths(prompt=30, completion=100)
    items = {
        one.name: one.size
        for one in estimate_memory(LlamaForCausalLM(config), args, lengths, in_flight=8, references=0)
    }
    load = Workload(groups=1, siblings=8, turns=Draw(mean=1), prompt_tokens=30, turn_tokens=Draw(mean=100))
    tokens = microbatch_tokens(args, lengths)
    found = trainer_memory(shape_of(str(tmp_path)), load, ACCELERATORS["cpu"], 1, microbatch=tokens)
    assert found.activations == items["activations"]
    assert (found.weights, found.gradients, found.optimizer) == tuple(
        items[name] for name in ("weights", "gradients", "optimizer")
    )


def test_the_starter() -> None:
    assert 0 < shape_of("starter").parameters < 2.5e6


def test_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"9B.*0\.6B"):
        shape_of("9B")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigurationError, match="no JSON"):
        shape_of(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    with pytest.raises(ConfigurationError, match="hidden_size=None"):
        shape_of(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"num_experts_per_tok": 2}))
    with pytest.raises(ConfigurationError, match="mixture of experts"):
        shape_of(str(tmp_path))
