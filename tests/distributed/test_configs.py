"""The configurations that ship: accelerate reads them, and they say what the page says."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

from envgrad.distributed.configs import config_names, config_path
from envgrad.errors import ConfigurationError

KINDS = {
    "ddp": DistributedType.MULTI_GPU,
    "ddp_cpu": DistributedType.MULTI_GPU,
    "fsdp2": DistributedType.FSDP,
    "zero2": DistributedType.DEEPSPEED,
    "zero3": DistributedType.DEEPSPEED,
}


def launched(name: str) -> argparse.Namespace:
    """What ``accelerate launch`` makes of a configuration before it starts anything."""
    words = ["--config_file", str(config_path(name)), "--num_processes", "2", "-m", "envgrad.cli", "train"]
    arguments = launch_command_parser().parse_args(words)
    return _validate_launch_command(arguments)[0]


@pytest.mark.parametrize("name", KINDS)
def test_accelerate_reads_it(name: str) -> None:
    assert set(config_names()) == set(KINDS)
    found = load_config_from_file(str(config_path(name)))
    assert isinstance(found, ClusterConfig) and found.distributed_type == KINDS[name]
    assert found.use_cpu == (name == "ddp_cpu")


@pytest.mark.parametrize("name", ["ddp", "ddp_cpu", "fsdp2"])
def test_launch_takes_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = launched(name)
    assert arguments.num_processes == 2 and arguments.use_fsdp == (name == "fsdp2")
    arguments.main_process_port = 0
    env = prepare_multi_gpu_env(arguments)
    if name == "fsdp2":
        assert env["ACCELERATE_USE_FSDP"] == "true" and env["FSDP_VERSION"] == "2"
        assert env["FSDP_RESHARD_AFTER_FORWARD"] == "true" and env["FSDP_STATE_DICT_TYPE"] == "FULL_STATE_DICT"
        assert env["FSDP_AUTO_WRAP_POLICY"] == "TRANSFORMER_BASED_WRAP"


def test_the_fsdp_plugin_is_of_version_2(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import CPUOffloadPolicy

    arguments = launched("fsdp2")
    arguments.main_process_port = 0
    for key, value in prepare_multi_gpu_env(arguments).items():
        if key.startswith("FSDP_"):
            monkeypatch.setenv(key, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True
    assert not isinstance(plugin.cpu_offload, CPUOffloadPolicy)


@pytest.mark.parametrize(("name", "stage"), [("zero2", 2), ("zero3", 3)])
def test_deepspeeds_fields_are_those_that_accelerate_knows(name: str, stage: int) -> None:
    """DeepSpeed itself is not there; what ``accelerate launch`` hands on to it is."""
    fields: dict[str, Any] = yaml.safe_load(config_path(name).read_text())["deepspeed_config"]
    known = {action.dest for action in launch_command_parser()._actions}
    assert set(fields) <= known
    arguments = launched(name)
    assert arguments.use_deepspeed and arguments.zero_stage == stage
    arguments.main_process_port = 0
    arguments.deepspeed_fields_from_accelerate_config = ",".join(fields)
    env = prepare_deepspeed_cmd_env(arguments)[1]
    assert env["ACCELERATE_USE_DEEPSPEED"] == "true" and env["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == str(stage)
    assert env["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "1", "a step's micro-batches are counted by envgrad"
    assert float(env["ACCELERATE_GRADIENT_CLIPPING"]) == 1.0, "transformers compares it with max_grad_norm"


def test_their_places_are_told() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "envgrad.distributed.configs", "fsdp2"], capture_output=True, text=True, check=True
    )
    assert Path(done.stdout.strip()) == config_path("fsdp2")
    with pytest.raises(ConfigurationError, match="no configuration 'fsdp'; there are ddp, "):
        config_path("fsdp")
