"""The pages on agents and MCP: their code runs as it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.pages import run_python


def test_mcp() -> None:
    pytest.importorskip("mcp")
    assert run_python("mcp")["report"].ok


def test_agents(folder: Path) -> None:
    pytest.importorskip("openai")
    names = run_python("agents")
    assert names["trainer"].state.global_step == 2
    names["outside"].args.max_steps = 1
    names["outside"].train()
    assert names["outside"].state.global_step == 1
