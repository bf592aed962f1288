"""The broadcast's protocol, with gloo, between this process and workers of servers in processes of their own."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm_kit import ask, changed, session

from envgrad.errors import ConfigurationError, WeightTransferError
from envgrad.sampling.vllm import VLLMSampler
from envgrad.sampling.vllm_group import GroupTransport
from envgrad.sampling.vllm_options import VLLMOptions
from helpers.models import tiny_llama
from helpers.vllm_server import fake_vllm


@contextmanager
def child(file: Path, workers: int) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "helpers.vllm_server", str(file), str(workers)]
    tests = Path(__file__).parents[1]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tests)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process
    finally:
        process.kill()
        process.wait()


def transport(timeout: float = 20.0) -> GroupTransport:
    return GroupTransport(torch.device("cpu"), port=0, timeout=timeout, backend="gloo")


def test_every_worker_of_every_server_gets_every_tensor(tmp_path: Path) -> None:
    weights = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(5, dtype=torch.bfloat16), "c": torch.zeros(())}
    save_file(weights, tmp_path / "first")
    with ExitStack() as stack:
        children = [stack.enter_context(child(tmp_path / "first", workers)) for workers in (2, 1)]
        sampler = VLLMSampler(VLLMOptions(base_urls=tuple(url for url, _ in children)), lambda servers: transport())
        stack.callback(sampler.close)
        for version in (1, 2):
            new = {name: tensor + version for name, tensor in weights.items()}
            sampler.update_weights(version, new)
        assert sampler.policy_version == 2
        expected = {"a": 15.0 + 12.0, "b": 15.0, "c": 2.0}
        for url, _ in children:
            body = json.dumps({"method": "sums", "kwargs": {}}).encode()
            with urllib.request.urlopen(f"{url}/collective_rpc", body) as response:
                results = json.load(response)["results"]
            assert [result["sums"] for result in results] == [expected] * len(results)


def test_the_ranks_meet_at_the_one_address_that_the_servers_know() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    meeting = GroupTransport(torch.device("cpu"), port=port, timeout=20.0, backend="gloo")
    with fake_vllm(tiny_llama()) as fake:
        sampler = VLLMSampler(VLLMOptions(base_urls=(fake.url,)), lambda servers: meeting)
        try:
            socket.create_connection(("127.0.0.1", port), 5).close()
            with pytest.raises(ConnectionRefusedError):  # another address of this machine
                socket.create_connection(("127.0.0.2", port), 5)
            sampler.update_weights(1, changed(tiny_llama()))
        finally:
            sampler.close()


def test_a_worker_that_cannot_place_a_tensor_ends_the_update_and_nobody_hangs() -> None:
    with fake_vllm(tiny_llama()) as fake:
        sampler = VLLMSampler(VLLMOptions(base_urls=(fake.url,)), lambda servers: transport())
        try:
            fake.workers[0].loaded.fail_after = 2
            began = time.monotonic()
            with pytest.raises(WeightTransferError, match="cannot place"):
                sampler.update_weights(1, changed(tiny_llama()))
            assert time.monotonic() - began < 10
            assert sampler.servers[0].state == "stale"
            with pytest.raises(WeightTransferError, match="process group with the vLLM servers is broken"):
                sampler.update_weights(2, changed(tiny_llama()))
        finally:
            sampler.close()


def test_a_server_that_dies_while_it_receives_ends_the_update_in_seconds(tmp_path: Path) -> None:
    save_file({"w0": torch.zeros(1)}, tmp_path / "first")
    with child(tmp_path / "first", 1) as (url, process):
        sampler = VLLMSampler(VLLMOptions(base_urls=(url,)), lambda servers: transport(timeout=60))
        try:
            weights: dict[str, Any] = {f"w{number}": torch.zeros(1 << 18) for number in range(400)}
            threading.Timer(0.1, process.kill).start()
            began = time.monotonic()
            with pytest.raises((WeightTransferError, RuntimeError)):
                sampler.update_weights(1, weights)
            assert time.monotonic() - began < 15
        finally:
            sampler.close()


def test_what_cannot_be_broadcast_is_said() -> None:
    with pytest.raises(ConfigurationError, match="needs the trainer's model on a GPU"):
        GroupTransport(torch.device("cpu"), port=1, timeout=1)
    with fake_vllm(tiny_llama()) as fake:
        sampler = VLLMSampler(VLLMOptions(base_urls=(fake.url,)), lambda servers: transport())
        try:
            with pytest.raises(WeightTransferError, match=r"'c' is of torch\.complex64"):
                sampler.update_weights(1, {"c": torch.zeros(1, dtype=torch.complex64)})
            # A server that was started again has joined no group.
            assert ask(sampler, [(session("a"), [5])])
            fake.workers[0]._envgrad_group = None
            with pytest.raises(WeightTransferError, match="joined no process group"):
                sampler.update_weights(1, changed(tiny_llama()))
        finally:
            sampler.close()
