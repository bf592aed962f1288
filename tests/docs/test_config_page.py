"""The page of all fields is that of the code, and lists each field once."""

from __future__ import annotations

import re
import runpy
from dataclasses import fields

import pytest
import transformers

from envgrad.cli.field_words import IMPLIED, TRANSFORMERS_HELP, UNUSED
from envgrad.config import REFUSED, AsyncGRPOConfig, GRPOConfig, RLOOConfig, SDPOConfig
from helpers.pages import ROOT, path_of

PAGE = path_of("config").read_text(encoding="utf-8")
OTHER = f"## Of transformers {transformers.__version__}\n" not in PAGE

same_transformers = pytest.mark.skipif(OTHER, reason="the page is that of another version of transformers")


@same_transformers
def test_the_page_is_that_of_the_code() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "config_page.py"))
    assert script["page"]() == PAGE, "run python scripts/config_page.py"


@same_transformers
def test_every_field_of_every_configuration_is_listed_once() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    every = {field.name for config in (GRPOConfig, RLOOConfig, SDPOConfig, AsyncGRPOConfig) for field in fields(config)}
    assert sorted(listed) == sorted(every)


@same_transformers
def test_every_field_of_transformers_that_acts_has_words() -> None:
    names = {field.name for field in fields(transformers.TrainingArguments)}
    own = {"per_device_eval_batch_size"}  # declared anew, with words of its own
    assert names - set(REFUSED) - set(IMPLIED) - set(UNUSED) - own <= set(TRANSFORMERS_HELP)
    assert set(TRANSFORMERS_HELP) | set(IMPLIED) | set(UNUSED) <= names
    assert "Not looked at yet" not in PAGE


@pytest.mark.parametrize("name", sorted(IMPLIED))
def test_fields_that_imply_a_refused_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="torch_compile=True cannot act"):
        GRPOConfig(output_dir="runs/doc", **{name: "inductor" if name.endswith("backend") else "default"})
