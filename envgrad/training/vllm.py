"""The sampler in front of vLLM servers, as a trainer's configuration and policy ask for it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from envgrad.config import RolloutConfig
from envgrad.config.vllm import vllm_options
from envgrad.errors import ConfigurationError
from envgrad.sampling.vllm import VLLMSampler
from envgrad.sampling.vllm_files import WeightFolder
from envgrad.sampling.vllm_group import GroupTransport
from envgrad.sampling.vllm_server import VLLMServer
from envgrad.sampling.vllm_sync import AdapterTransport, FileTransport, Transport
from envgrad.training.model import Policy


def make_vllm_sampler(config: RolloutConfig, policy: Policy) -> VLLMSampler:
    """Meet the servers that ``config`` names, and find out how ``policy``'s weights get to them.

    LoRA adapters go as adapters where every server takes some (``--enable-lora``), merged into the weights elsewhere.

    Raises:
        ConfigurationError: a server does not answer, serves another model, or cannot be reached as configured.
    """
    return VLLMSampler(vllm_options(config), lambda servers: _transport(config, policy, servers))


def _transport(config: RolloutConfig, policy: Policy, servers: Sequence[VLLMServer]) -> Transport:
    for server in servers:
        check_same_model(policy, server)
    timeout = config.weight_sync_timeout
    with_lora = [server.url for server in servers if server.facts.has_lora]
    adapters = not isinstance(policy.model, PreTrainedModel)
    if with_lora and not (adapters and len(with_lora) == len(servers)):
        raise ConfigurationError(
            f"{', '.join(with_lora)} was started with --enable-lora, which takes adapters only, and "
            + ("another server was not" if adapters else "the policy has none (peft_config)")
            + "; start all servers alike"
        )
    if with_lora:
        return AdapterTransport(WeightFolder(config.vllm_sync_dir), adapter_config(policy), timeout=timeout)
    if config.vllm_sync == "nccl":
        device = next(policy.base.parameters()).device
        return GroupTransport(device, port=config.vllm_group_port, timeout=timeout)
    return FileTransport(WeightFolder(config.vllm_sync_dir), timeout=timeout)


def check_same_model(policy: Policy, server: VLLMServer) -> None:
    """
    Raises:
        ConfigurationError: the server's model has another shape than the policy.
    """
    text = policy.base.config.get_text_config()
    for name, theirs in server.facts.shape.items():
        ours: object = getattr(text, name, None)
        if isinstance(ours, int) and ours != theirs:
            raise ConfigurationError(
                f"{server.url} serves a model with {name}={theirs}, and the policy has {name}={ours}: start it with "
                "the model that is trained"
            )


def adapter_config(policy: Policy) -> dict[str, Any]:
    """The configuration of the policy's one adapter, as peft saves it.

    Raises:
        ConfigurationError: there are several, or vLLM has no such adapters.
    """
    if isinstance(policy.model, PreTrainedModel):
        raise AssertionError("the policy has no adapters")
    configs = policy.model.peft_config
    if len(configs) != 1:
        raise ConfigurationError(f"the policy has {len(configs)} adapters ({', '.join(configs)}); a server takes one")
    config = next(iter(configs.values()))
    trained = sorted(name for name, weight in policy.model.named_parameters() if weight.requires_grad)
    others = [name for name in trained if ".lora_A." not in name and ".lora_B." not in name]
    if others:
        raise ConfigurationError(
            f"{others[0]} is trained and is no LoRA weight: a vLLM server's adapters cannot hold it. Start the servers "
            "without --enable-lora, so that they get merged weights, or train plain LoRA"
        )
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        saved: dict[str, Any] = json.loads((Path(folder) / "adapter_config.json").read_text())
    return saved
