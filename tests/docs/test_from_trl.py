"""The page for users of trl is up to date, and its code runs."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from helpers.pages import python_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "from_trl.md").read_text(encoding="utf-8")
BLOCKS = python_of("from_trl")


def test_tables_are_those_of_the_code():
    script = runpy.run_path(str(ROOT / "scripts" / "from_trl_tables.py"))
    assert script["with_tables"](PAGE) == PAGE, "run python scripts/from_trl_tables.py"


def test_every_field_is_listed_once():
    from envgrad.config.trl_fields import trl_fields

    table = PAGE.partition("<!-- fields -->")[2].partition("<!-- end of fields -->")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [field.name for field in trl_fields()]


def test_tables_have_the_same_number_of_cells_in_each_row():
    for table in re.split(r"\n(?!\|)", PAGE):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines() if line.startswith("|")}
        assert len(widths) <= 1, table[:300]


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_code_runs(number, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    short = 'max_steps=1, report_to="none", save_strategy="no", max_completion_length=4, use_cpu=True'
    code = BLOCKS[number].replace('"Qwen/Qwen3-0.6B"', '"starter"').replace("max_steps=100", short)
    exec(compile(code, f"from_trl.md block {number}", "exec"), {"__name__": "page"})
    if "use_vllm" in code:
        assert "use_vllm=True with vllm_mode='colocate' cannot act" in capsys.readouterr().out


def test_names_that_the_page_offers_can_be_imported():
    import envgrad

    here = PAGE.partition("## What else can be imported")[2].partition("A command line")[0]
    for line in here.splitlines():
        if line.startswith("| `trl.") and "the same name" in line:
            for name in re.findall(r"`(?:trl\.)?(?:experimental\.sdpo\.)?(\w+)`", line.split("|")[1]):
                assert hasattr(envgrad, name), name
