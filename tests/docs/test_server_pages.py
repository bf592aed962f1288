"""The pages on environments behind servers run against small servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from envgrad.environments.adapters.openenv_server import Server
from helpers.pages import DOCS, run_python

TESTS = str(Path(__file__).parents[1])


@pytest.mark.parametrize(("page", "app"), [("openenv", "openenv_apps:guess"), ("openreward", "openreward_apps:sums")])
def test_the_page_runs(page: str, app: str) -> None:
    if page == "openreward":
        pytest.importorskip("openreward")
    # What comes after the first block needs other packages: ``tests/ecosystems`` runs it.
    server = Server(f"helpers.{app}", python=None, folder=TESTS, timeout=60)
    try:
        names = run_python(page, {"url": server.url}, only=0)
    finally:
        server.stop()
    assert names["trainer"].state.global_step == 2


def test_the_packages_that_cannot_be_played_are_listed() -> None:
    known = json.loads((DOCS.parent / "tests" / "ecosystems" / "openenv_registry.json").read_text(encoding="utf-8"))
    page = (DOCS / "openenv.md").read_text(encoding="utf-8")
    table = page[page.index("## What runs") : page.index("## Harness sessions")]
    for entry in known["does_not_run"]:
        for package in entry["package"].split(", "):
            assert f"`{package.partition(' ')[0]}`" in table
