"""Every block of every page runs in some test, or the page says why not."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from helpers.pages import DOCS, ROOT, all_pages, blocks, lines_of, path_of, run_command, run_python

OF_THEIR_OWN = {
    "README": "tests/test_readme.py",
    "agents": "tests/docs/test_agents_page.py",
    "checking": "tests/environments/check/test_checking_page.py",
    "distributed": "tests/distributed/test_launch.py",
    "evaluation": "tests/docs/test_evaluation_page.py",
    "executors": "tests/docs/test_executors_page.py",
    "failures": "tests/docs/test_failures_page.py",
    "first_steps": "tests/docs/test_first_pages.py",
    "from_trl": "tests/docs/test_from_trl.py",
    "gymnasium": "tests/docs/test_games_pages.py",
    "harbor": "tests/docs/test_sandbox_pages.py",
    "mcp": "tests/docs/test_agents_page.py",
    "mixtures": "tests/docs/test_mixtures_page.py",
    "openenv": "tests/docs/test_server_pages.py",
    "openreward": "tests/docs/test_server_pages.py",
    "other_python": "tests/docs/test_sandbox_pages.py",
    "reasoning_gym": "tests/docs/test_games_pages.py",
    "replay": "tests/docs/test_replay_page.py",
    "resume": "tests/docs/test_resume_page.py",
    "sampling": "tests/docs/test_sampling_page.py",
    "sandbox": "tests/docs/test_sandbox_pages.py",
    "scaling": "tests/scaling/test_scaling_page.py",
    "textarena": "tests/docs/test_games_pages.py",
    "tracking": "tests/docs/test_tracking_page.py",
    "verifiers": "tests/ecosystems/test_verifiers.py",
    "vllm": "tests/docs/test_vllm_page.py",
    "write_an_environment": "tests/docs/test_first_pages.py",
}
"""pages whose Python has a test of its own, and where; the others' runs below"""
HERE = tuple(
    page
    for page in all_pages()
    if page not in OF_THEIR_OWN and any(block.language == "python" for block in blocks(page))
)
COMMANDS = ("README", "checking", "cli", "evaluation", "performance")
"""pages whose commands run below; those of the others have a test of their own"""
COMMANDS_ELSEWHERE = ("first_steps", "write_an_environment", "replay", "viewer", "distributed", "scaling", "tracking")


@pytest.mark.parametrize("name", HERE)
def test_every_block_of_the_page_runs(name: str, folder: Path) -> None:
    names = run_python(name)
    if name == "group_starts":
        assert str(names["report"].start) == "copy" and names["report"].ok
    else:
        assert names["trainer"].state.global_step == 2


@pytest.mark.parametrize("page", COMMANDS)
def test_every_command_of_the_page_runs(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    environment = (ROOT / "examples" / "guess_number.py").read_text(encoding="utf-8").replace("GuessNumber", "MyEnv")
    (folder / "my_env.py").write_text(environment, encoding="utf-8")
    (folder / "run.yaml").write_text("model: starter\nenvironment: my_env.py:MyEnv\n", encoding="utf-8")
    for block in blocks(page):
        if block.language == "python" and block.file is not None:
            (folder / block.file).write_text(block.text, encoding="utf-8")
        if block.language == "sh" and not block.not_run:
            for line in lines_of(block):
                run_command(_here(line), monkeypatch, code=1 if "riddle.py" in line else 0)


def _here(line: str) -> str:
    """A command with what is in the folder; ``play`` gets somebody who types."""
    line = line.replace("runs/demo/model", "starter")
    return f"printf 'I give up\\n' | {line}" if line.startswith("envgrad play") else line


def test_every_block_has_a_test_that_runs_it_or_says_why_not() -> None:
    for page in all_pages():
        for block in blocks(page):
            assert block.language in ("python", "sh", "text", "yaml", "json"), f"{page}: a block of {block.language!r}"
            if block.language == "python":
                assert not block.not_run, f"{page} has Python that nothing runs"
            if block.language == "sh" and not block.not_run:
                assert page in COMMANDS + COMMANDS_ELSEWHERE, f"{page}: nothing runs {block.text!r}"


def test_pages_with_a_test_of_their_own_are_named_there() -> None:
    for page, place in OF_THEIR_OWN.items():
        if path_of(page).exists():
            files = [ROOT / place] if place.endswith(".py") else sorted((ROOT / place).rglob("test_*.py"))
            tests = "".join(path.read_text(encoding="utf-8") for path in files)
            assert f'"{page}"' in tests or f"{page}.md" in tests, f"nothing in {place} names {page}"


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*DOCS.glob("*.md"), DOCS.parent / "README.md"]:
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_extras_that_pages_name_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for page in all_pages():
        for names in re.findall(r"""(?:envgrad|-e '?"?\.)\[([\w,-]+)\]""", path_of(page).read_text(encoding="utf-8")):
            assert set(names.split(",")) <= set(project["optional-dependencies"]), (page, names)
