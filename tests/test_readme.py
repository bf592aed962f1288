"""The README's example runs as it stands, with the starter in place of a model from a hub."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_first_example_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert '"Qwen/Qwen3-0.6B"' in code and "max_steps=200" in code
    options = 'max_steps=1, report_to="none", use_cpu=True, max_completion_length=64'
    code = code.replace('"Qwen/Qwen3-0.6B"', '"starter"').replace("max_steps=200", options)
    scope: dict[str, object] = {"__name__": "readme"}
    exec(compile(code, "README.md", "exec"), scope)
    environment = scope["HigherLower"]()
    environment.reset(seed=20)
    assert (environment.guess(3), environment.guess(9), environment.guess(5)) == ("higher", "lower", "correct")
    assert environment.get_reward() == 1.0


def test_every_file_that_the_readme_links_is_there():
    links = re.findall(r"\]\(([^)#:]+)\)", README.read_text(encoding="utf-8"))
    assert len(links) >= 8
    assert all((README.parent / link).exists() for link in links), links
