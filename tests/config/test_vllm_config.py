"""Where vLLM samples, and which of its options can act."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from envgrad.config import GRPOConfig, RLOOConfig, SDPOConfig
from envgrad.config.vllm import VLLMFields, vllm_options
from envgrad.errors import ConfigurationError


def make(tmp_path: Path, kind: type = GRPOConfig, **changes: Any) -> Any:
    options = {"output_dir": str(tmp_path), "report_to": "none", "use_cpu": True, "max_steps": 1}
    return kind(**(options | changes))


@pytest.mark.parametrize("kind", [GRPOConfig, RLOOConfig, SDPOConfig])
def test_every_way_to_say_it(tmp_path: Path, kind: type) -> None:
    assert make(tmp_path, kind).sampler == "local"
    for given in ({"use_vllm": True, "vllm_mode": "server"}, {"sampler": "vllm"}):
        config = make(tmp_path, kind, **given)
        assert config.sampler == "vllm" and config.vllm_urls() == ("http://127.0.0.1:8000",)
    config = make(tmp_path, kind, sampler="vllm", vllm_server_host="gpu1", vllm_server_port=9, vllm_sync_dir="/nfs")
    assert config.vllm_urls() == ("http://gpu1:9",)
    config = make(
        tmp_path, kind, sampler="vllm", vllm_server_base_url='["http://localhost:1", "http://localhost:2/v1"]'
    )
    assert vllm_options(config).base_urls == ("http://localhost:1", "http://localhost:2")
    # trl's asynchronous trainer knows no other sampler
    assert make(tmp_path, kind, asynchronous=True, vllm_server_base_url="http://localhost:1").sampler == "vllm"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"use_vllm": True}, "use_vllm=True with vllm_mode='colocate' cannot act.*envgrad vllm-serve"),
        ({"use_vllm": True, "vllm_mode": "near"}, "vllm_mode='near' is not known"),
        ({"use_vllm": True, "vllm_mode": "server", "sampler": "process"}, "contradict each other"),
        ({"vllm_server_base_url": "http://localhost:1"}, "acts only where a vLLM server samples"),
        ({"vllm_sync": "nccl"}, "acts only where a vLLM server samples"),
        ({"sampler": "vllm", "vllm_server_base_url": "localhost:1"}, "is no URL"),
        ({"sampler": "vllm", "vllm_server_base_url": "[1"}, "is not JSON"),
        ({"sampler": "vllm", "vllm_server_base_url": []}, "must name each server once"),
        ({"sampler": "vllm", "vllm_server_base_url": "http://localhost:1", "vllm_server_port": 1}, "remove one"),
        ({"sampler": "vllm", "vllm_server_base_url": "http://gpu1:1"}, "are not on this machine.*vllm_sync_dir"),
        ({"sampler": "vllm", "vllm_sync": "rsync"}, "vllm_sync='rsync' is not known"),
        ({"sampler": "vllm", "vllm_sync": "nccl", "vllm_sync_dir": "/x"}, "acts only with vllm_sync='file'"),
        ({"sampler": "vllm", "vllm_group_port": 1}, "acts only with vllm_sync='nccl'"),
        ({"sampler": "vllm", "vllm_request_timeout": 0}, "request_timeout=0 must be above 0"),
        ({"sampler": "vllm", "vllm_server_timeout": -1}, "server_timeout=-1 must be above 0"),
        ({"sampler": "vllm", "vllm_api_key_env": "NOT_SET_ANYWHERE"}, "vllm_api_key_env='NOT_SET_ANYWHERE'"),
        ({"sampler": "vllm", "deterministic": True}, "a vLLM server batches by the clock"),
        ({"sampler": "vllm", "max_kv_tokens": 100}, "the vLLM server keeps keys and values"),
    ],
)
def test_what_cannot_act_is_said(tmp_path: Path, given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        make(tmp_path, **given)


def test_no_option_is_silent_without_a_server(tmp_path: Path) -> None:
    others: dict[str, Any] = {
        "vllm_mode": "server",
        "vllm_sync": "nccl",
        "vllm_sync_dir": "/x",
        "vllm_api_key_env": "X",
    }
    for field in fields(VLLMFields):
        if field.name == "use_vllm":
            continue
        value = others.get(field.name, "http://localhost:1" if field.name.endswith(("url", "host")) else 77)
        with pytest.raises(ConfigurationError, match=f"{field.name}=.* acts only where a vLLM server samples"):
            make(tmp_path, **{field.name: value})


def test_what_the_sampler_is_told(tmp_path: Path) -> None:
    options = {"a": {"temperature": 0.5}}
    config = make(
        tmp_path, sampler="vllm", temperature=0.8, top_k=3, max_context=99, vllm_request_timeout=7.0,
        vllm_retry_timeout=8.0, vllm_server_timeout=9.0, environment_options=options,
    )  # fmt: skip
    told = vllm_options(config)
    assert [one.temperature for one in told.exact_for] == [0.5, 0.8] and {one.top_k for one in told.exact_for} == {3}
    assert (told.request_timeout, told.retry_timeout, told.server_timeout, told.max_context) == (7.0, 8.0, 9.0, 99)
    assert told.in_flight == "wait" and told.is_local
    assert vllm_options(make(tmp_path, sampler="vllm", asynchronous=True)).in_flight == "abort"
    drained = make(tmp_path, sampler="vllm", asynchronous=True, inflight_weight_updates=False)
    assert vllm_options(drained).in_flight == "wait"
