"""Sound environments of every kind pass, and the check itself keeps the contract's side."""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envgrad.environments.check import Determinism, Level, Rule, check_environment
from envgrad.environments.contract import StepResult, tool
from envgrad.environments.start import StartMode
from envgrad.errors import ConfigurationError, EpisodeDone
from envgrad.starter.compass import Compass
from helpers import faulty

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_a_sound_environment_has_no_finding() -> None:
    report = check_environment(faulty.Sound)
    assert report.findings == ()
    assert report.ok
    assert (report.environment, report.declared, report.start) == ("Sound", "seeded", StartMode.IDENTITY)
    assert report.tools[0].startswith("guess(letter: ")
    assert report.failure == 0.0
    assert [row.agent for row in report.audit] == ["refusal", "silent", "echo", "junk", "empty", "random"]
    assert [len(row.rewards) for row in report.audit] == [4, 4, 4, 4, 4, 12]
    assert check_environment(faulty.Sound) == report  # the seed decides everything
    assert check_environment(faulty.Sound, seed=1).ok


class Async:
    """Everything async, a reward by turns, an end by exception."""

    async def reset(self, group_id: int) -> list[dict[str, str]]:
        await asyncio.sleep(0)
        self.number = group_id % 7
        return [{"role": "system", "content": "Count."}, {"role": "user", "content": "To what?"}]

    @tool
    async def count(self, to: int) -> str:
        """Count to a number."""
        await asyncio.sleep(0)
        if to == self.number:
            raise EpisodeDone("enough")
        return "more"

    def helper(self, anything) -> None: ...  # type: ignore[no-untyped-def]

    async def get_reward(self) -> dict[str, float | None]:
        return {"win": 0.0, "style": None}

    async def close(self) -> None: ...


class Stepped:
    """Free text, and siblings that are scored together."""

    def reset(self, seed: int) -> str:
        self.word = random.Random(seed).choice(["salt", "iron", "gold"])
        self.said = ""
        return "Say the word."

    def step(self, message: str) -> StepResult:
        self.said = message
        return StepResult("no", done=message == self.word)

    @classmethod
    def group_reward(cls, environments: list[Stepped]) -> list[float]:
        assert len(environments) > 1
        return [float(environment.said == environment.word) for environment in environments]


class FromRows:
    """The row is the task."""

    def reset(self, question: str, answer: str) -> str:
        self.answer, self.given = answer, ""
        return question

    @property
    def tools(self) -> list[Any]:
        return [self.submit]

    def submit(self, answer: str) -> str:
        """Submit the answer."""
        self.given = answer
        return "thanks"

    @property
    def done(self) -> bool:
        return bool(self.given)

    def get_reward(self) -> float:
        return float(self.given == self.answer)


class Drawing:
    """It draws from a generator of its own, and is copied."""

    def __init__(self) -> None:
        self.random = random.Random()

    def reset(self) -> None:
        self.secret = self.random.randrange(100)

    def guess(self, number: int) -> str:
        """Guess the number."""
        return "right" if number == self.secret else "wrong"

    def get_reward(self) -> None:
        return None


@settings(max_examples=8, deadline=None)
@given(tasks=st.integers(1, 5), pays=st.integers(-2, 2), ends=st.integers(1, 4))
def test_whatever_follows_from_the_seed_is_sound(tasks: int, pays: int, ends: int) -> None:
    class Made:
        def reset(self, seed: int) -> str:
            self.task, self.turns = seed % tasks, 0
            return "Press."

        def press(self, key: int) -> str:
            """Press a key."""
            self.turns += 1
            return str((self.task + key) % tasks)

        @property
        def done(self) -> bool:
            return self.turns >= ends

        def get_reward(self) -> float:
            return float(pays * (self.turns + self.task))

    report = check_environment(Made, groups=3, turns=4)
    assert report.ok, str(report)
    assert report.determinism is (Determinism.FIXED if tasks == 1 else Determinism.SEEDED)
    assert bool(report.of(Rule.IDS_IGNORED)) == (tasks == 1)
    rules = {finding.rule for finding in report.findings}
    assert rules <= {Rule.AUDIT, Rule.IDS_IGNORED, Rule.SPLIT, Rule.PICKLE}


ROWS = [{"question": f"What is {n} + {n}?", "answer": str(n + n)} for n in range(3)]


@pytest.mark.parametrize(
    ("environment", "rows", "determinism", "start"),
    [
        (Async, None, Determinism.SEEDED, StartMode.IDENTITY),
        (Stepped, None, Determinism.SEEDED, StartMode.IDENTITY),
        (FromRows, ROWS, Determinism.TASK, StartMode.ROW),
        (FromRows, ROWS[0], Determinism.FIXED, StartMode.ROW),
        (Drawing, {"prompt": "Guess."}, Determinism.NONE, StartMode.COPY),
        (Compass, None, Determinism.SEEDED, StartMode.IDENTITY),
    ],
)
def test_environments_of_every_kind_pass(
    environment: type, rows: Any, determinism: Determinism, start: StartMode
) -> None:
    report = check_environment(environment, dataset_row=rows)
    assert report.ok, str(report)
    assert not [finding for finding in report.at(Level.WARNING) if finding.rule is not Rule.AUDIT], str(report)
    assert (report.determinism, report.start) == (determinism, start)


def test_siblings_are_scored_together() -> None:
    by_agent = {row.agent: row for row in check_environment(Stepped).audit}
    assert by_agent["silent"].rewards == (0.0, 0.0, 0.0, 0.0)
    assert "empty" not in by_agent  # there is no tool to call


def test_rewards_that_cannot_be_scored_are_told() -> None:
    report = check_environment(Drawing, dataset_row={"prompt": "Guess."})
    (finding,) = report.of(Rule.AUDIT)
    assert "None for all of them" in finding.seen
    assert report.failure is None


def example_environments() -> list[tuple[str, str]]:
    """Classes with ``reset`` that the examples define, found in their text: some need packages to be imported."""
    found = []
    for path in sorted(EXAMPLES.glob("*.py")):
        name = ""
        for line in path.read_text().splitlines():
            if line.startswith("class "):
                name = line.removeprefix("class ").split("(")[0].split(":")[0]
            if line.lstrip().startswith(("def reset(", "async def reset(")) and name:
                found.append((path.stem, name))
    return found


def test_there_are_examples() -> None:
    assert ("guess_number", "GuessNumber") in example_environments()
    assert len(example_environments()) >= 4


@pytest.mark.parametrize(("page", "name"), example_environments())
def test_every_example_keeps_the_contract(page: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    report = check_environment(getattr(importlib.import_module(page), name), groups=2)
    assert report.ok, str(report)
    assert not report.of(Rule.AUDIT), str(report)


def test_each_instance_is_closed() -> None:
    opened: list[object] = []
    closed: Counter[int] = Counter()

    class Counted(faulty.GlobalRandom):
        def __init__(self) -> None:
            super().__init__()
            opened.append(self)

        def close(self) -> None:
            closed[id(self)] += 1

    check_environment(Counted)
    # Once each, but for the two whose second close is looked at.
    assert sorted(closed[id(instance)] for instance in opened) == [1] * (len(opened) - 2) + [2, 2]


def test_it_can_be_called_where_a_loop_runs_already() -> None:
    async def notebook() -> bool:
        return check_environment(Async).ok

    assert asyncio.run(notebook())


def test_a_factory_that_hands_out_one_instance_is_a_breach() -> None:
    one = faulty.Sound()
    report = check_environment(lambda: one)
    (finding,) = report.at(Level.BREACH)
    assert "the same instance twice" in finding.seen


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": 0}, "groups=0 must be a whole number of at least 1"),
        ({"turns": True}, "turns=True must be"),
        ({"timeout": 0}, "timeout=0 must be more than 0"),
        ({"dataset_row": []}, "must be a row"),
        ({"dataset_row": ["text"]}, "must be a row"),
    ],
)
def test_arguments_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message.replace("(", r"\(")):
        check_environment(faulty.Sound, **options)


def test_a_missing_column_is_named() -> None:
    report = check_environment(FromRows)
    (finding,) = report.at(Level.BREACH)
    assert "reset requires ['answer', 'question']" in finding.seen


def test_the_report_as_json() -> None:
    report = check_environment(faulty.PaysSilence, groups=2)
    data = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    (finding,) = data.pop("findings")
    assert (finding.pop("level"), finding.pop("rule"), finding.pop("member")) == (
        "warning",
        "reward-hack",
        "the reward",
    )
    assert set(finding) == {"seen", "fix"}
    audit = data.pop("audit")
    assert set(audit) == {"honest_failure", "agents"}
    assert audit["agents"][1] == {
        "agent": "silent",
        "does": "writes nothing",
        "mean": 1.0,
        "rewards": [1.0, 1.0],
        "suspicious": True,
    }
    assert data.pop("tools") == list(report.tools)
    assert data == {
        "version": 1,
        "environment": "PaysSilence",
        "ok": True,
        "counts": {"breach": 0, "warning": 1, "note": 0},
        "determinism": {"declared": "seeded", "observed": "seeded"},
        "start": "identity",
    }


def test_the_worst_comes_first() -> None:
    levels = [finding.level for finding in check_environment(faulty.SharedDefault).findings]
    assert levels == sorted(levels, key=list(Level).index)
    assert levels[0] is Level.BREACH
    assert len(set(levels)) > 1


def test_no_torch_is_needed_to_import_it() -> None:
    code = "import sys, envgrad; envgrad.check_environment; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
