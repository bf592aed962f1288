from __future__ import annotations

import importlib.util
import sys

import pytest

from envgrad import ConfigurationError, ModelConfig, get_peft_config, get_quantization_config


def test_adapters_are_those_of_the_fields():
    found = get_peft_config(
        ModelConfig(use_peft=True, lora_r=4, lora_alpha=8, lora_dropout=0.0, lora_target_modules=["q_proj", "v_proj"],
                    use_rslora=True, use_dora=True, lora_modules_to_save=["lm_head"])
    )  # fmt: skip
    assert (found.r, found.lora_alpha, found.lora_dropout, found.use_rslora, found.use_dora) == (4, 8, 0.0, True, True)
    assert found.target_modules == {"q_proj", "v_proj"} and found.modules_to_save == ["lm_head"]
    assert found.task_type == "CAUSAL_LM" and found.bias == "none"


def test_without_adapters_and_quantization_there_is_nothing():
    assert get_peft_config(ModelConfig()) is None and get_quantization_config(ModelConfig()) is None


def test_adapters_without_peft_name_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'envgrad\[peft\]'"):
        get_peft_config(ModelConfig(use_peft=True))


@pytest.mark.parametrize("bits", ["load_in_8bit", "load_in_4bit"])
def test_quantization_without_bitsandbytes_names_what_to_install(monkeypatch, bits):
    monkeypatch.setattr("envgrad.compat.model_config.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=f"{bits}=True needs the bitsandbytes package"):
        get_quantization_config(ModelConfig(**{bits: True}))


def test_quantization_is_that_of_the_fields(monkeypatch):
    monkeypatch.setattr("envgrad.compat.model_config.find_spec", lambda name: importlib.util.find_spec("json"))
    found = get_quantization_config(ModelConfig(load_in_4bit=True, dtype="bfloat16", use_bnb_nested_quant=True))
    assert found.load_in_4bit and found.bnb_4bit_use_double_quant and found.bnb_4bit_quant_type == "nf4"
    assert str(found.bnb_4bit_compute_dtype) == "torch.bfloat16"
    assert get_quantization_config(ModelConfig(load_in_8bit=True)).load_in_8bit


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"load_in_8bit": True, "load_in_4bit": True}, "both on"),
        ({"dtype": "int3"}, "dtype='int3'"),
        ({"bnb_4bit_quant_type": "x"}, "fp4 or nf4"),
    ],
)
def test_what_cannot_be_is_an_error(changes, words):
    with pytest.raises(ConfigurationError, match=words):
        ModelConfig(**changes)
