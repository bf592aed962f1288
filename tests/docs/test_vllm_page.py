"""The page on vLLM says what is there."""

from __future__ import annotations

import re
from dataclasses import fields

from envgrad.config import GRPOConfig
from envgrad.config.vllm import VLLMFields
from envgrad.sampling import vllm, vllm_server
from helpers.pages import path_of, run_python

PAGE = path_of("vllm").read_text(encoding="utf-8")


def test_its_code_runs() -> None:
    run_python("vllm")


def test_every_field_is_in_its_table_with_its_default() -> None:
    defaults = {field.name: field.default for field in fields(GRPOConfig)}
    rows = dict(re.findall(r"^\| `(\w+)` \| `?([^`|]+?)`? \|", PAGE, re.MULTILINE))
    assert set(rows) >= {field.name for field in fields(VLLMFields)} - {
        "use_vllm", "vllm_mode", "vllm_server_host", "vllm_server_port",
    }  # fmt: skip
    for name, said in rows.items():
        if isinstance(defaults[name], (int, float)):
            assert float(said) == defaults[name]
    assert "vllm_server_host" in PAGE and "vllm_server_port" in PAGE


def test_its_seconds_are_those_of_the_code() -> None:
    assert f"after {vllm.DEATH_SECONDS:.0f} seconds the run ends with `SamplerDied`" in PAGE
    assert f"`/health` unanswered for {vllm_server.HUNG_SECONDS:.0f} s" in PAGE
