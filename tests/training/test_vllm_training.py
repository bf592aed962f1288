"""Trainers whose episodes are sampled by a server that runs vLLM's worker extension."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import envgrad
from envgrad.errors import ConfigurationError, SamplerDied, WeightTransferError
from envgrad.sampling import vllm, vllm_files
from helpers.models import Letters, tiny_llama, tokenizer_of
from helpers.vllm_server import FakeVLLM, fake_vllm


@pytest.fixture(autouse=True)
def _shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(vllm_files, "SHARED_MEMORY", folder)
    return folder


def make(fake: FakeVLLM, folder: Path, *, kind: str = "GRPO", model: Any = None, **options: Any) -> Any:
    peft = options.pop("peft_config", None)
    defaults: dict[str, Any] = {
        "output_dir": str(folder / "run"), "max_steps": 3, "per_device_train_batch_size": 4, "num_generations": 4,
        "max_completion_length": 12, "learning_rate": 0.02, "lr_scheduler_type": "constant", "logging_steps": 1,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "use_vllm": True,
        "vllm_mode": "server", "vllm_server_base_url": fake.url,
    }  # fmt: skip
    return getattr(envgrad, f"{kind}Trainer")(
        tiny_llama() if model is None else model,
        args=getattr(envgrad, f"{kind}Config")(**(defaults | options)),
        processing_class=tokenizer_of(),
        environment_factory=Letters,
        **({} if peft is None else {"peft_config": peft}),
    )


def updates(fake: FakeVLLM) -> list[int]:
    return [
        body["kwargs"]["version"] for body in fake.bodies("/collective_rpc") if body["method"] == "envgrad_load_file"
    ]


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_each_round_is_sampled_with_the_weights_of_now(tmp_path: Path, _shared_memory: Path, kind: str) -> None:
    with fake_vllm(tiny_llama(seed=5)) as fake:  # other weights than the trainer's, until it publishes
        trainer = make(fake, tmp_path, kind=kind)
        trainer.train()
        assert updates(fake) == [0, 1, 2]
        for group in trainer.last_round.groups:
            for episode in group.episodes:
                assert set(episode.versions) == {-1, 2}
        # What the last round was sampled with is what training computed again: the ratio was 1 on its first pass.
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert not trainer.preparation.recomputes and len(logs) == 3
        assert all(entry["sampler_mismatch"] < 1e-5 for entry in logs)
        assert not any(_shared_memory.iterdir())


def test_after_training_an_evaluation_publishes_the_last_weights(tmp_path: Path) -> None:
    with fake_vllm(tiny_llama(seed=5)) as fake:
        trainer = make(fake, tmp_path, eval_tasks=2)
        trainer.train()
        trainer.evaluate()
        own = trainer.model.state_dict()
        assert all(torch.allclose(own[name], there) for name, there in fake.model.state_dict().items())


def test_raw_logprobs_at_another_temperature_are_recomputed(tmp_path: Path) -> None:
    with fake_vllm(tiny_llama(), logprobs_mode="raw_logprobs") as fake:
        trainer = make(fake, tmp_path, temperature=0.7, max_steps=1)
        with trainer.rollouts.open():
            assert trainer.preparation.recomputes
        trainer.train()
        assert not trainer.preparation.recomputes  # nothing samples any more


def test_asynchronous_training_through_a_server(tmp_path: Path) -> None:
    with fake_vllm(tiny_llama(seed=5)) as fake:
        fake.token_seconds = 0.002
        trainer = make(fake, tmp_path, asynchronous=True, max_staleness=1, max_steps=4)
        trainer.train()
        assert updates(fake)[0] == 0 and updates(fake) == sorted(set(updates(fake)))
        assert trainer.state.global_step == 4
        versions = {
            version for group in trainer.last_round.groups for one in group.episodes for version in one.versions
        }
        assert versions <= {-1, 0, 1, 2, 3}


def test_a_killed_server_ends_the_run_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "DEATH_SECONDS", 0.5)
    with fake_vllm(tiny_llama()) as fake:
        trainer = make(fake, tmp_path)
        fake.kill_at(5)  # in the second step
        with pytest.raises(SamplerDied, match=re.escape(fake.url)):
            trainer.train()


def test_a_full_disk_at_publish_ends_the_run_and_the_server_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, _shared_memory: Path
) -> None:
    def full(file: Any, part: bytes) -> None:
        if updates(fake):  # the first version went through
            raise OSError(28, "No space left on device")
        file.write(part)

    with fake_vllm(tiny_llama()) as fake:
        monkeypatch.setattr(vllm_files, "write_all", full)
        with pytest.raises(WeightTransferError, match="No space left on device"):
            make(fake, tmp_path).train()
        assert fake.workers[0].envgrad_status()["version"] == 0 and not fake.paused
    assert not any(_shared_memory.iterdir())


def test_adapters_go_as_adapters_or_merged(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    with fake_vllm(tiny_llama(), lora=True) as fake:
        make(fake, tmp_path, peft_config=lora).train()
        loaded = fake.bodies("/v1/load_lora_adapter")
        assert [body["lora_name"].rpartition("-")[2] for body in loaded] == ["0", "1", "2"]
        assert not updates(fake)
    with fake_vllm(tiny_llama(seed=5)) as fake:
        trainer = make(fake, tmp_path, peft_config=lora, max_steps=1, eval_tasks=1)
        trainer.evaluate()
        merged = trainer.model.merge_and_unload().state_dict()
        assert all(torch.allclose(merged[name], there, atol=1e-6) for name, there in fake.model.state_dict().items())
    with fake_vllm(tiny_llama(), lora=True) as fake, pytest.raises(ConfigurationError, match="the policy has none"):
        make(fake, tmp_path).train()


def test_a_server_with_another_model_is_refused(tmp_path: Path) -> None:
    refused = pytest.raises(ConfigurationError, match="hidden_size=32, and the policy has hidden_size=16")
    with fake_vllm(tiny_llama(hidden_size=32)) as fake, refused:
        make(fake, tmp_path).train()
