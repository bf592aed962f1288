"""mkdocs hooks: files of the repository become pages as they stand, and links lead from page to page.

README.md is the front page, ARCHITECTURE.md and CHANGELOG.md are pages, an example or a notebook is a page of its code.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, InclusionLevel

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
WHOLE = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/RESULTS.md": "results.md",
}
"""files of the repository -> pages"""
CODE = ("examples/*.py", "examples/*.ipynb", "scripts/grpo_loop.py")
"""files that become a page of their code"""
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")


def pages() -> dict[str, str]:
    """Path in the repository -> page, of all that is not in ``docs`` and becomes a page."""
    code = [path.relative_to(ROOT).as_posix() for pattern in CODE for path in sorted(ROOT.glob(pattern))]
    return WHOLE | {name: f"{name}.md" for name in code}


def content(name: str) -> str:
    """The page of a file of the repository."""
    text = (ROOT / name).read_text(encoding="utf-8")
    if name.endswith(".md"):
        return text
    if name.endswith(".ipynb"):
        cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
        return "\n\n".join(source if kind == "markdown" else _code(source) for kind, source in cells)
    return f"# `{name}`\n\n{_code(text)}"


def _code(text: str) -> str:
    return f"```python\n{text.rstrip()}\n```\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, page in pages().items():
        made = File.generated(config, page, content=content(name))
        if page not in str(config.nav):
            made.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(made)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    made = pages()
    here = {target: name for name, target in made.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return LINK.sub(lambda found: _link(found[1], here, page.file.src_uri, made), markdown)


def _link(target: str, here: str, page: str, made: dict[str, str]) -> str:
    """A link of the file ``here`` as the page ``page`` has it; one that leads to no page stays as it is."""
    name = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
    goal = made.get(name) or (name.removeprefix("docs/") if name.startswith("docs/") else None)
    return target if goal is None else posixpath.relpath(goal, posixpath.dirname(page) or ".")
