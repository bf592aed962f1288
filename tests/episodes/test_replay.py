"""Episodes are played again from their record: equal where the environment is, else with the first difference."""

from __future__ import annotations

import functools
import importlib.util
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from envgrad import EpisodeDone, StepResult, ToolResult
from envgrad.cli.main import app
from envgrad.config.evaluation import EvalConfig
from envgrad.environments.policy import ask_policy, play_part
from envgrad.episodes import EpisodeFilter, EpisodeReader
from envgrad.episodes.replay import replay_episode
from envgrad.errors import ConfigurationError
from envgrad.rollout.runner import Round
from envgrad.starter.compass import Compass
from envgrad.training.episode_log import run_log
from envgrad.training.evaluation import eval_tasks, local_rollouts, play_evaluation
from envgrad.training.inputs import UserInputs
from envgrad.types import Group

EXAMPLES = Path(__file__).parents[2] / "examples"


def record(folder: Path, tasks: int = 3, split: str = "eval", options: Mapping[str, Any] = {}, **inputs: Any) -> Path:
    """A run of ``tasks`` tasks with 2 episodes each, as ``envgrad eval`` makes one."""
    given: dict[str, Any] = {"num_generations_eval": 2, "use_cpu": True, "max_completion_length": 60, "max_turns": 4}
    config = EvalConfig(output_dir=str(folder), **{**given, **options})
    rollouts = local_rollouts("starter", config, UserInputs(**inputs))
    log = run_log(config, rollouts)

    def take(group: Group) -> None:
        log.write(Round(groups=(group,)), step=0)

    try:
        play_evaluation(rollouts, eval_tasks(rollouts, split, tasks), on_group=take)
    finally:
        rollouts.close()
        log.close()
    return folder


def replays(run: Path, factory: Callable[[], object] | None = None) -> list[str | None]:
    """Where each episode's replay differs first; None where it is equal."""
    with EpisodeReader(run) as reader:
        found = [replay_episode(reader, row.number, factory=factory) for row in reader.rows(order="oldest", limit=None)]
    return [None if one.difference is None else one.difference.where for one in found]


class Steps:
    """Free text; pays for long answers, ends by itself or by a limit."""

    def reset(self, seed: int) -> str:
        self.goal, self.said = seed % 40 + 4, 0
        return f"Say {self.goal} characters."

    def step(self, message: str) -> StepResult:
        self.said += len(message)
        return StepResult(f"{self.said} of {self.goal}", reward=len(message) / 7, done=self.said >= self.goal)

    def get_reward(self) -> dict[str, float]:
        return {"near": 1.0 / (1 + abs(self.goal - self.said)), "half": 0.5}


class Paying(Compass):
    """Tools that pay, fail and end the episode."""

    def reset(self, seed: int, split: str = "train") -> str:
        self.luck = random.random()
        return super().reset(seed, split)

    def move(self, direction: str) -> object:
        """Go.

        Args:
            direction: One of up, down, left, right.
        """
        if len(direction) % 3 == 0:
            raise ValueError(f"no way {direction}")
        if self.random_walk() > 0.8:
            raise EpisodeDone("lost")
        return ToolResult(f"moved {direction}", reward=0.25)

    def random_walk(self) -> float:
        return random.random()  # of the process: isolation makes it the group's


class Rows:
    def reset(self, question: str, answer: int, prompt: object = None) -> str:
        self.answer = answer
        return question

    def step(self, message: str) -> tuple[str, bool]:
        return "heard", True

    def get_reward(self) -> float:
        return float(self.answer)


class Copied:
    """Draws its tasks from a generator of its own, which nothing seeds: only its state tells the task."""

    def __init__(self) -> None:
        self.random = random.Random()

    def reset(self) -> str:
        self.secret = self.random.randrange(10**9)
        return f"Task {self.secret % 10}."

    def step(self, message: str) -> tuple[str, bool]:
        return f"{self.secret} {self.random.random()}", len(message) > 5

    def get_reward(self) -> float:
        return self.secret / 10**9


class Drifting(Steps):
    """Not what it was when it was recorded: a class attribute has changed since."""

    drift = 0

    def step(self, message: str) -> StepResult:
        result = super().step(message)
        return StepResult(result.observation + "!" * self.drift, reward=result.reward, done=result.done)


@pytest.mark.parametrize("environment", [Compass, Steps, Paying, functools.partial(Compass)])
def test_what_was_recorded_is_played_again(environment: Callable[[], object], tmp_path: Path) -> None:
    assert replays(record(tmp_path, environment_factory=environment)) == [None] * 6


def test_limits_end_the_replay_where_they_ended_the_episode(tmp_path: Path) -> None:
    run = record(tmp_path, options={"max_completion_length": 14, "max_turns": 2}, environment_factory=Steps)
    with EpisodeReader(run) as reader:
        reasons = set(reader.stop_reasons())
    assert reasons & {"max_completion_length", "max_turns"}
    assert replays(run) == [None] * 6


def test_rows_and_mixtures_and_rows_alone(tmp_path: Path) -> None:
    rows = [{"question": f"What is {n}?", "answer": n, "prompt": "unused"} for n in range(3)]
    assert replays(record(tmp_path / "rows", environment_factory=Rows, train_dataset=rows, split="train")) == [None] * 6
    mixed = record(tmp_path / "mixed", tasks=4, environment_factory={"a": Compass, "b": Steps})
    with EpisodeReader(mixed) as reader:
        assert reader.environments() == ["a", "b"]
    assert replays(mixed) == [None] * 8
    alone = [{"prompt": "One."}, {"prompt": [{"role": "user", "content": "Two."}]}]

    def length(completions: Sequence[object], **kwargs: object) -> list[float]:
        return [float(len(str(completion))) for completion in completions]

    run = record(tmp_path / "alone", tasks=2, train_dataset=alone, reward_funcs=length, split="train")
    with EpisodeReader(run) as reader:
        found = replay_episode(reader, 0)
    assert found.equal and found.not_repeated == ("length",)


def test_a_task_that_no_id_tells_is_restored_from_its_recorded_state(tmp_path: Path) -> None:
    run = record(tmp_path, environment_factory=Copied)
    with EpisodeReader(run) as reader:
        openings = {reader.episode(row.number).messages[-1]["content"] for row in reader.rows(limit=None)}
    assert len(openings) > 1
    assert replays(run) == [None] * 6


def test_the_first_difference_is_told_with_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = record(tmp_path, tasks=1, environment_factory=Drifting)
    monkeypatch.setattr(Drifting, "drift", 1)
    with EpisodeReader(run) as reader:
        number = next(
            row.number for row in reader.rows() if row.turns and reader.episode(row.number).turns[0].observation
        )
        difference = replay_episode(reader, number).difference
        recorded = reader.episode(number).turns[0].observation
    assert difference is not None and difference.where == "turn 1, observation"
    assert difference.recorded == recorded and difference.replayed == f"{recorded}!"


def changed(member: str, function: Callable[..., object]) -> type:
    return type("Changed", (Steps,), {member: function})


def test_each_kind_of_difference_is_found(tmp_path: Path) -> None:
    run = record(tmp_path, tasks=4, options={"max_turns": None}, environment_factory=Steps)
    with EpisodeReader(run) as reader:
        whole = [
            row.number for row in reader.rows(EpisodeFilter(stop_reason="done"), order="-tokens", limit=None)
            if row.turns > 1
        ]  # fmt: skip

        def first(member: str, function: Callable[..., object]) -> str | None:
            found = replay_episode(reader, whole[0], factory=changed(member, function))
            return None if found.difference is None else found.difference.where

        turns = reader.episode(whole[0]).summary.turns

        def step(self: Steps, message: str, **change: Any) -> StepResult:
            result = Steps.step(self, message)
            values = {"observation": result.observation, "reward": result.reward, "done": result.done} | change
            return StepResult(**values)

        def reset(self: Steps, seed: int) -> str:
            return Steps.reset(self, seed + 1)

        def fails(self: Steps, message: str) -> StepResult:
            raise OSError("burnt down")

        assert first("reset", reset) == "opening, message 1"
        assert first("step", lambda self, message: step(self, message, reward=9.0)) == "turn 1, reward"
        assert first("step", lambda self, message: step(self, message, done=True)) == "end"
        assert first("step", lambda self, message: step(self, message, done=False)) == "end"
        assert first("step", fails) == "turn 1"
        assert first("get_reward", lambda self: Steps.get_reward(self) | {"half": 0.25}) == "reward component 'half'"
        assert first("get_reward", lambda self: {"near": Steps.get_reward(self)["near"]}) == "reward component 'half'"
        assert first("get_reward", lambda self: Steps.get_reward(self)) is None
        assert turns > 1


def test_other_parts_of_the_policy_answer_as_recorded_and_other_questions_cannot_be_replayed(tmp_path: Path) -> None:
    class Asks(Steps):
        async def step(self, message: str) -> StepResult:  # type: ignore[override]
            said = await play_part("other", [{"role": "user", "content": f"It said {len(message)}."}], max_tokens=6)
            return StepResult(f"the other: {said}", reward=1.0, done=True)

    class AsksUnrecorded(Steps):
        async def step(self, message: str) -> StepResult:  # type: ignore[override]
            return StepResult(await ask_policy([{"role": "user", "content": "And you?"}], max_tokens=4), done=True)

    run = record(tmp_path / "parts", tasks=2, environment_factory=Asks)
    with EpisodeReader(run) as reader:
        agents = reader.rows(EpisodeFilter(part=""), limit=None)
        others = reader.rows(EpisodeFilter(part="other"), limit=None)
        assert len(agents) == 4 and {row.group for row in others} <= {row.group for row in agents}
        assert [replay_episode(reader, row.number, factory=Asks).difference for row in agents] == [None] * 4
        if others:
            with pytest.raises(ConfigurationError, match="part 'other' of another episode"):
                replay_episode(reader, others[0].number, factory=Asks)
    run = record(tmp_path / "asked", tasks=1, environment_factory=AsksUnrecorded)
    with EpisodeReader(run) as reader:
        seen = [row for row in reader.rows() if reader.episode(row.number).turns[0].observation is not None]
        with pytest.raises(ConfigurationError, match="asks the policy"):
            replay_episode(reader, seen[0].number, factory=AsksUnrecorded)


def test_the_command_says_equal_different_or_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = record(tmp_path, tasks=1, environment_factory=Drifting)
    with EpisodeReader(run) as reader:
        number = next(row.number for row in reader.rows() if reader.episode(row.number).turns[0].observation)
    cli = CliRunner()
    found = cli.invoke(app, ["replay", str(run), str(number)])
    assert (found.exit_code, "equal" in found.output) == (0, True)
    assert cli.invoke(app, ["replay", str(run), f"eval/0/{number}"]).exit_code == 0
    monkeypatch.setattr(Drifting, "drift", 2)
    found = cli.invoke(app, ["replay", str(run), str(number)])
    assert found.exit_code == 1 and "turn 1, observation" in found.output and "!!" in found.output
    factory = "envgrad.starter.compass:Compass"
    found = cli.invoke(app, ["replay", str(run), str(number), "--factory", factory])
    assert found.exit_code == 1 and "opening" in found.output
    for words, said in (("99", "its episodes are 0 to 1"), ("nonsense", "train/3/0"), ("eval/7/0", "no episode")):
        found = cli.invoke(app, ["replay", str(run), words])
        assert isinstance(found.exception, ConfigurationError) and said in str(found.exception)


def test_an_environment_without_a_name_needs_a_factory(tmp_path: Path) -> None:
    run = record(tmp_path, tasks=1, environment_factory=lambda: Compass())
    with EpisodeReader(run) as reader:
        with pytest.raises(ConfigurationError, match="has no name that can be imported; give --factory"):
            replay_episode(reader, 0)
        assert replay_episode(reader, 0, factory=Compass).equal


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "environments", "needs"),
    [
        ("compass", ("Compass",), None),
        ("guess_number", ("GuessNumber",), None),
        ("wordle", ("Wordle",), None),
        ("chess_puzzles", ("MateInOne",), "chess"),
        ("reasoning", ("Sums",), "reasoning_gym"),
        ("two_envs", None, None),
    ],
)
def test_every_example_is_replayed_equal(
    name: str, environments: Sequence[str] | None, needs: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    if needs is not None:
        pytest.importorskip(needs)
    module = example(name)
    kinds = {
        key: value for key, value in vars(module).items()
        if isinstance(value, type) and hasattr(value, "reset") and (environments is None or key in environments)
    }  # fmt: skip
    assert kinds
    factory = next(iter(kinds.values())) if len(kinds) == 1 else kinds
    run = record(tmp_path, tasks=2 * len(kinds), options={"max_turns": 6}, environment_factory=factory)
    with EpisodeReader(run) as reader:
        rows = reader.rows(limit=None)
        assert len(rows) == 4 * len(kinds)
        for row in rows:
            assert replay_episode(reader, row.number, factory=kinds[row.environment]).difference is None
