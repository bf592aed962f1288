"""The page's code runs as it stands, block after block."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai")
pytest.importorskip("mcp")

PAGE = Path(__file__).parents[2] / "docs" / "agents.md"


def test_every_block_of_the_page_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["trainer"].state.global_step == 2
    names["outside"].args.max_steps = 1
    names["outside"].train()
    assert names["outside"].state.global_step == 1
