"""Images and processors are refused at construction; quantization reaches the loader."""

from __future__ import annotations

import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM, ProcessorMixin

from envgrad import ConfigurationError, GRPOConfig, GRPOTrainer


def make(tmp_path, columns=None, **more):
    config = GRPOConfig(output_dir=str(tmp_path), max_steps=1, report_to="none", use_cpu=True)
    rows = Dataset.from_dict({"prompt": ["a"]} | (columns or {}))
    return GRPOTrainer("starter", lambda completions: [0.0] * len(completions), config, rows, **more)


@pytest.mark.parametrize("name", ["image", "images"])
def test_a_column_of_images_is_refused(tmp_path, name):
    with pytest.raises(ConfigurationError, match=f"train_dataset has a column '{name}'.*text only"):
        make(tmp_path, {name: [None]})


def test_a_processor_is_refused(tmp_path):
    class Processor(ProcessorMixin):
        def __init__(self):
            pass

    with pytest.raises(ConfigurationError, match=r"processing_class is a Processor.*text only"):
        make(tmp_path, processing_class=Processor())


def test_quantization_reaches_the_loader_and_only_it(tmp_path, monkeypatch):
    seen = {}
    load = AutoModelForCausalLM.from_pretrained

    def spy(source, **options):
        seen["quantization"] = options.pop("quantization_config")
        return load(source, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", spy)
    make(tmp_path, quantization_config="four bits").close()
    assert seen == {"quantization": "four bits"}
    monkeypatch.undo()
    trainer = make(tmp_path)
    with pytest.raises(ConfigurationError, match="quantization_config cannot act"):
        GRPOTrainer(trainer.model, lambda completions: [], trainer.user_args, Dataset.from_dict({"prompt": ["a"]}),
                    quantization_config="four bits")  # fmt: skip
    trainer.close()
