"""The pages on environments behind servers run against small servers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from envgrad.environments.adapters.openenv_server import Server

DOCS = Path(__file__).parents[2] / "docs"
TESTS = str(Path(__file__).parents[1])


@pytest.mark.parametrize(("page", "app"), [("openenv", "openenv_apps:guess"), ("openreward", "openreward_apps:sums")])
def test_the_page_runs(page: str, app: str) -> None:
    if page == "openreward":
        pytest.importorskip("openreward")
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(encoding="utf-8"), re.DOTALL)
    server = Server(f"helpers.{app}", python=None, folder=TESTS, timeout=60)
    try:
        names: dict[str, Any] = {"url": server.url}
        exec(compile(code, page, "exec"), names)
    finally:
        server.stop()
    assert names["trainer"].state.global_step == 2
