"""The page's code runs as it stands, block after block."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def run_blocks(name: str, names: dict[str, Any]) -> dict[str, Any]:
    page = DOCS / f"{name}.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
    return names


def test_mcp() -> None:
    pytest.importorskip("mcp")
    assert run_blocks("mcp", {})["report"].ok


def test_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai")
    monkeypatch.chdir(tmp_path)  # the page writes into a folder of its own
    names = run_blocks("agents", {})
    assert names["trainer"].state.global_step == 2
    names["outside"].args.max_steps = 1
    names["outside"].train()
    assert names["outside"].state.global_step == 1
