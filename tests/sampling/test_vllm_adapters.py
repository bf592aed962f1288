"""LoRA weights as adapters: each version by a name of its own, and the servers' base weights as they were."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vllm_kit import ask, session

from envgrad.errors import ConfigurationError, WeightTransferError
from envgrad.sampling.vllm import VLLMSampler
from envgrad.sampling.vllm_files import Published, WeightFolder
from envgrad.sampling.vllm_options import VLLMOptions
from envgrad.sampling.vllm_sync import AdapterTransport
from helpers.models import tiny_llama
from helpers.vllm_server import FakeVLLM, fake_vllm

NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def sampler_of(fake: FakeVLLM, folder: Path) -> VLLMSampler:
    def choose(servers: object) -> AdapterTransport:
        return AdapterTransport(WeightFolder(folder), {"r": 4, "peft_type": "LORA"}, timeout=5.0)

    return VLLMSampler(VLLMOptions(base_urls=(fake.url,)), choose)


def test_each_version_is_an_adapter_and_the_last_one_goes(tmp_path: Path) -> None:
    with fake_vllm(tiny_llama(), lora=True) as fake:
        sampler = sampler_of(fake, tmp_path)
        assert sampler.takes_adapters
        names = []
        for version in (1, 2, 3):
            weights = {NAME: torch.full((4, 16), float(version))}
            sampler.update_weights(version, weights)
            (answer,) = ask(sampler, [(session("a"), [5])])
            assert answer.policy_version == version
            names.append(fake.bodies()[-1]["model"])
            loaded = fake.bodies("/v1/load_lora_adapter")[-1]
            assert loaded["lora_name"] == names[-1]
            folder = Path(loaded["lora_path"])
            assert torch.equal(load_file(folder / "adapter_model.safetensors")[NAME], weights[NAME])
            assert (folder / "adapter_config.json").read_text() == '{"r": 4, "peft_type": "LORA"}'
        assert len(set(names)) == 3 and "/pause" not in [path for path, _ in fake.requests]
        deadline = time.monotonic() + 60
        while set(fake.adapters) != {names[2]} and time.monotonic() < deadline:
            time.sleep(0.01)
        assert set(fake.adapters) == {names[2]}
        folders = {path.name for path in sampler_folder(tmp_path).iterdir() if path.is_dir()}
        assert names[2] in folders and names[0] not in folders
        sampler.close()
    assert not any(tmp_path.iterdir())


def sampler_folder(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


def test_a_corrupt_or_refused_adapter_keeps_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = WeightFolder.write

    def spoil(self: WeightFolder, *args: Any, **kwargs: Any) -> Published:
        ready = write(self, *args, **kwargs)
        ready.path.write_bytes(ready.path.read_bytes()[:-4])
        return ready

    with fake_vllm(tiny_llama(), lora=True) as fake:
        sampler = sampler_of(fake, tmp_path)
        sampler.update_weights(1, {NAME: torch.ones(4, 16)})
        old = sampler.servers[0].model
        with monkeypatch.context() as patch:
            patch.setattr(WeightFolder, "write", spoil)
            with pytest.raises(WeightTransferError, match="is torn or corrupt"):
                sampler.update_weights(2, {NAME: torch.zeros(4, 16)})
        fake.interfere = lambda path, body, number: (400, "rank 4 > 2") if path == "/v1/load_lora_adapter" else None
        with pytest.raises(ConfigurationError, match="rank 4 > 2"):
            sampler.update_weights(3, {NAME: torch.zeros(4, 16)})
        (answer,) = ask(sampler, [(session("a"), [5])])
        assert answer.policy_version == sampler.policy_version == 1
        assert fake.bodies()[-1]["model"] == old and list(fake.adapters) == [old]
        sampler.close()


def test_a_server_without_adapters_is_refused(tmp_path: Path) -> None:
    with fake_vllm(tiny_llama()) as fake, pytest.raises(ConfigurationError, match=r"takes no adapters.*--enable-lora"):
        sampler_of(fake, tmp_path)
