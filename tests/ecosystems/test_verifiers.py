"""A verifiers taskset, played by verifiers itself in its own Python, against our endpoint.

``VERIFIERS_PYTHON`` names that interpreter: a virtual environment with ``verifiers`` and ``uv``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from envgrad.agents.verifiers import VerifiersEnvironment
from envgrad.errors import ConfigurationError
from helpers.world import play, turn

PYTHON = os.environ.get("VERIFIERS_PYTHON", "")
TASKSET = """
import verifiers.v1 as vf


class WordData(vf.TaskData):
    word: str


class WordTask(vf.Task[WordData]):
    @vf.reward
    async def said(self, trace: vf.Trace) -> float:
        return float(self.data.word in (trace.last_reply or ""))


class Words(vf.Taskset[WordTask]):
    def load(self):
        words = ["one", "two", "three"]
        return [WordTask(WordData(idx=n, word=word, prompt=f"Say {word}."), self.config.task)
                for n, word in enumerate(words)]


__all__ = ["Words"]
"""

pytestmark = pytest.mark.skipif(not Path(PYTHON).is_file(), reason="VERIFIERS_PYTHON names no interpreter")


def make(folder: Path, taskset: str = "words_of_ours") -> VerifiersEnvironment:
    (folder / "words_of_ours.py").write_text(TASKSET)
    return VerifiersEnvironment(
        taskset, python=PYTHON, eval_from=2, environ={"PYTHONPATH": str(folder)}, config={"agent": {"max_turns": 2}}
    )


@pytest.mark.timeout(300)
def test_verifiers_plays_and_scores_against_our_endpoint(tmp_path: Path) -> None:
    played = play(
        make(tmp_path), lambda *_: turn("I say one or two."), siblings=2, retries=0, max_consecutive_failed_groups=1
    )
    for group in played.groups:
        for episode in group.episodes:
            assert episode.reward == 1.0 and sum(episode.mask) == len(turn("I say one or two."))
            assert episode.messages[-2]["content"].startswith("Say ")


@pytest.mark.timeout(300)
def test_a_taskset_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="verifiers cannot load 'nothing_of_that_name'"):
        _ = make(tmp_path, "nothing_of_that_name").size


@pytest.mark.timeout(300)
def test_the_page_runs(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "words_of_ours.py").write_text(TASKSET)
    page = Path(__file__).parents[2] / "docs" / "verifiers.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {"python": PYTHON, "folder": str(tmp_path)}
    exec(compile(block, "verifiers", "exec"), names)
    assert names["trainer"].state.global_step == 1
