"""The blocks of the documentation's pages, and how they are run: Python as it stands, commands one after the other."""

from __future__ import annotations

import io
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from envgrad.cli.main import main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
SMALL: Mapping[str, tuple[str, ...]] = {
    "bench": ("--rows", "8", "--prompt", "8", "--answer", "8", "--repeats", "1"),
    "eval": ("--tasks", "2", "--samples", "2", "--max-completion-length", "32"),
    "train": (
        *("--max-steps", "1", "--per-device-train-batch-size", "8", "--num-generations", "4", "--use-cpu"),
        *("--max-completion-length", "48", "--report-to", "none", "--save-strategy", "no"),
    ),
}
"""Options that are added to a page's command, so that it is quick; the last of two counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block of a page.

    Example:
        >>> blocks_of("t", "<!-- not run: it installs -->\\n```sh\\nmake\\n```\\n")
        (Block(page='t', number=0, language='sh', text='make\\n', not_run='it installs'),)
    """

    page: str
    number: int
    language: str
    text: str
    not_run: str = ""
    """why not, where the page says so"""

    @property
    def file(self) -> str | None:
        """The name that the reader is asked to save it under: ``# name.py`` in its first line."""
        found = re.match(r"# (\w+\.py)\n", self.text)
        return found[1] if found else None


def blocks_of(name: str, text: str) -> tuple[Block, ...]:
    fences = re.finditer(r"(?:^(<!-- .*? -->)\n)?^```(\w*)[^\n]*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    found = []
    for number, fence in enumerate(fences):
        mark = NOT_RUN.fullmatch(fence[1] or "")
        found.append(Block(page=name, number=number, language=fence[2], text=fence[3], not_run=mark[1] if mark else ""))
    return tuple(found)


def path_of(page: str) -> Path:
    """Of a page by its name; ``README`` is the repository's."""
    return ROOT / "README.md" if page == "README" else DOCS / f"{page}.md"


def blocks(page: str) -> tuple[Block, ...]:
    """All blocks of a page."""
    return blocks_of(page, path_of(page).read_text(encoding="utf-8"))


def all_pages() -> tuple[str, ...]:
    """Every page, and the README."""
    return (*(path.stem for path in sorted(DOCS.glob("*.md"))), "README")


def python_of(page: str) -> tuple[str, ...]:
    """The Python blocks of a page."""
    return tuple(block.text for block in blocks(page) if block.language == "python")


def run_python(
    page: str,
    names: dict[str, Any] | None = None,
    *,
    only: int | None = None,
    instead: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run a page's Python blocks in order, in one namespace.

    Args:
        names: What the page takes as given.
        only: The number of the one Python block that is run.
        instead: Parts of the code and what stands for them here, such as a smaller number of steps.

    Returns:
        The namespace.
    """
    scope: dict[str, Any] = {"__name__": "page"} | (names or {})
    found = python_of(page)
    assert found, f"{page} has no Python"
    left = dict(instead or {})
    for number, code in enumerate(found):
        if only is not None and number != only:
            continue
        for part, other in (instead or {}).items():
            if part in code:
                left.pop(part, None)
                code = code.replace(part, other)
        exec(compile(code, f"{page}, Python block {number}", "exec"), scope)
    assert not left, f"{page} does not have {sorted(left)} any more"
    return scope


def run_page(
    page: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    instead: Mapping[str, str] | None = None,
    exits: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Follow a page from top to bottom in the folder of now: save its files, run its Python and its commands.

    Args:
        instead: As in ``run_python``.
        exits: Commands whose exit code is not 0.
    """
    monkeypatch.syspath_prepend(str(Path.cwd()))
    scope: dict[str, Any] = {"__name__": "page"}
    for block in blocks(page):
        if block.language == "python":
            code = block.text
            for part, other in (instead or {}).items():
                code = code.replace(part, other)
            if block.file is not None:
                Path(block.file).write_text(code, encoding="utf-8")
            if not (block.file or "").startswith(("test_", "train")):
                exec(compile(code, f"{page}, block {block.number}", "exec"), scope)
        elif block.language == "sh" and not block.not_run:
            for line in lines_of(block):
                run_command(line, monkeypatch, code=(exits or {}).get(line, 0))
    return scope


def lines_of(block: Block) -> list[str]:
    """The commands of a block, each on one line, without comments."""
    whole = re.sub(r"\\\n\s*", "", block.text)
    return [line for line in (re.sub(r"\s+# .*", "", line).strip() for line in whole.splitlines()) if line]


def run_command(line: str, monkeypatch: pytest.MonkeyPatch, *, code: int = 0) -> None:
    """Run one command of a page in this process, cut down; ``pytest`` in one of its own. ``view`` is left out: it goes
    on until it is interrupted, and its own page's test runs it."""
    typed, _, rest = line.rpartition(" | ")
    words = shlex.split(rest)
    if typed:
        told = shlex.split(typed)
        assert told[0] == "printf", f"{line!r}: what stands before the bar is typed in, by printf"
        monkeypatch.setattr(sys, "stdin", io.StringIO(told[1].replace("\\n", "\n")))
    if words[0] == "cd":
        monkeypatch.chdir(words[1])
        monkeypatch.syspath_prepend(str(Path.cwd()))
    elif words[0] == "pytest":
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words[1:]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == code, f"{line}: {done.stdout}{done.stderr}"
    elif words[0] == "python":
        runpy.run_path(words[1], run_name="__main__")
    elif words[0] == "envgrad":
        if words[1] != "view":
            run_envgrad(words[1:], line, monkeypatch, code=code)
    else:
        raise AssertionError(f"no test knows how to run {line!r}: mark its block `<!-- not run: why -->`")


def run_envgrad(words: list[str], line: str, monkeypatch: pytest.MonkeyPatch, *, code: int) -> None:
    """``envgrad`` as its entry point runs it."""
    monkeypatch.setattr(sys, "argv", ["envgrad", *words, *SMALL.get(words[0], ())])
    with pytest.raises(SystemExit) as left:
        main()
    assert (left.value.code or 0) == code, f"{line} ended with {left.value.code}"
