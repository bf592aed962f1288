"""The pages' code runs as it stands, block after block."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", ["data_and_rewards", "algorithms", "group_starts", "async"])
def test_every_block_of_the_page_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # pages write into folders of their own
    page = DOCS / f"{name}.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
    if name == "group_starts":
        assert str(names["report"].start) == "copy" and names["report"].ok
    else:
        assert names["trainer"].state.global_step == 2


def test_every_page_with_code_has_a_test_that_runs_it() -> None:
    tests = "".join(
        path.read_text(encoding="utf-8") for path in sorted(DOCS.parent.joinpath("tests").rglob("test_*.py"))
    )
    for page in DOCS.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert "python no-run" not in text, f"{page.name} has code that nothing runs"
        named = f'"{page.stem}"' in tests or f"{page.stem}.md" in tests
        assert named or "```python" not in text, f"no test names {page.name}, whose code must run"


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*DOCS.glob("*.md"), DOCS.parent / "README.md"]:
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
