from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from envgrad.cli.main import main
from envgrad.cli.train import build_config, read_request
from envgrad.episodes.log import EpisodeLog
from envgrad.episodes.records import EpisodeFilter
from envgrad.errors import ConfigurationError

ENVIRONMENT = """
class Echo:
    closed = 0

    def reset(self, seed):
        return "Say something."

    def say(self, text: str) -> str:
        "Say it."
        return text

    def get_reward(self):
        return 0.5

    def close(self):
        Echo.closed += 1
"""
SMALL = ["--per-device-train-batch-size", "4", "--num-generations", "2", "--max-completion-length", "12",
         "--save-strategy", "no", "--use-cpu"]  # fmt: skip


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["envgrad", *words])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "echo_environment.py").write_text(ENVIRONMENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "echo_environment", raising=False)
    return tmp_path


def request(**given: Any) -> Any:
    return read_request(**({"model": None, "environments": (), "config_file": None, "arguments": ()} | given))


def test_flags_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: starter\nenvironment: m:A\nlearning_rate: 1e-3\nmax-steps: 5\neval_strategy: no\n")
    found = request(config_file=file, arguments=["--max-steps", "7"])
    assert (found.model, found.environments) == ("starter", ("m:A",))
    assert found.values == {"learning_rate": 1e-3, "max_steps": 7, "eval_strategy": "no"}
    other = request(config_file=file, model="other", environments=["m:B"])
    assert (other.model, other.environments) == ("other", ("m:B",))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("environment: [m:A, m:B]", ("m:A", "m:B")),
        ("environment: {one: m:A, two: m:B}", ("one=m:A", "two=m:B")),
        ("", ()),
    ],
)
def test_the_file_may_name_several_environments(tmp_path: Path, text: str, expected: tuple[str, ...]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert request(config_file=file, model="m").environments == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat: 1", "unknown key 'learning_rat'; did you mean learning_rate?"),
        ("enviroment: m:A", "unknown key 'enviroment'; did you mean environment?"),
        ("max_steps: many", "--max-steps 'many' does not fit: it must be a whole number"),
        ("environment: 3", "environment 3 does not fit"),
        ("- model", "holds a list; write one `option: value` a line"),
        ("a: [", "is not YAML"),
    ],
)
def test_a_bad_file_is_named_with_the_fix(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        request(config_file=file, model="m")
    assert message in str(caught.value)


def test_errors_of_transformers_are_configuration_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"from the options eval_strategy, logging_steps, output_dir"):
        build_config({"output_dir": str(tmp_path), "eval_strategy": "steps", "logging_steps": 0})
    with pytest.raises(ConfigurationError, match="top_p=2"):
        build_config({"output_dir": str(tmp_path), "top_p": 2.0})


def test_a_run_from_the_command_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "run.yaml").write_text("max_steps: 9\nlearning_rate: 1e-3\n")
    words = ["train", "--model", "starter", "--environment", "echo_environment:Echo", "--config", "run.yaml"]
    assert (
        run(monkeypatch, *words, "--max-steps", "2", "--logging-steps", "1", "--eval-tasks", "2", "--do-eval", *SMALL)
        == 0
    )
    out = capsys.readouterr()
    lines = out.out.splitlines()
    assert [line.split("  ")[:2] for line in lines if line.startswith("step ")] == [
        ["step 1/2", "reward 0.500"],
        ["step 2/2", "reward 0.500"],
    ]
    assert any(line.startswith("evaluation at step 2  eval_reward 0.500") for line in lines)
    assert not any(line.startswith("{") for line in lines)  # transformers prints nothing of its own
    result = folder / "runs" / "echo"
    assert (result / "model" / "model.safetensors").is_file()
    episodes = list(EpisodeLog(result / "episodes").read(EpisodeFilter(split="train")))
    assert len(episodes) == 8
    state = json.loads((result / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    assert state["log_history"][0]["learning_rate"] == pytest.approx(1e-3)
    again = "train --model runs/echo/model --environment echo_environment:Echo --max-steps 2 --learning-rate 0.001"
    assert again in out.out
    assert "--use-cpu" in out.out
    assert sys.modules["echo_environment"].Echo.closed > 0


def test_an_interrupt_closes_everything_and_is_exit_code_130(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from envgrad.training.trainers import GRPOTrainer

    def interrupt(self: GRPOTrainer, *args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(GRPOTrainer, "training_step", interrupt)
    words = ["--environment", "echo_environment.py:Echo", "--max-steps", "1", "--output-dir", "here"]
    assert run(monkeypatch, "train", "--model", "starter", *words, *SMALL) == 130
    assert capsys.readouterr().err.strip().endswith("interrupted; what was written lies in here")
    assert sys.modules["echo_environment"].Echo.closed > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "./nowhere", "--max-steps", "1"], "model='./nowhere' does not exist"),
        (["--model", "starter"], "max_steps is not set"),
        (["--model", "starter", "--max-steps", "1", "--num-generations", "1"], "num_generations=1 must be at least 2"),
        (["--model", "starter", "--max-steps", "1", "--num-generations", "3"], "must be whole groups"),
    ],
)
def test_what_cannot_work_is_said_before_anything_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert run(monkeypatch, "train", "--environment", "echo_environment:Echo", *words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (folder / "runs").exists()


def test_checkpoints_are_resumed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--model", "starter", "--environment", "echo_environment:Echo", "--output-dir", "out", *SMALL]
    saving = ["--save-strategy", "steps", "--save-steps", "1"]
    assert run(monkeypatch, *words, *saving, "--max-steps", "1") == 0
    capsys.readouterr()
    assert run(monkeypatch, *words, "--max-steps", "2", "--resume-from-checkpoint", "true") == 0
    steps = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert steps == ["step 2/2"]


@pytest.mark.parametrize(("algorithm", "option"), [("rloo", "--beta"), ("sdpo", "--teacher-update-rate")])
def test_the_algorithm_decides_which_options_there_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, option: str
) -> None:
    words = ["--model", "starter", "--environment", "echo_environment:Echo", "--max-steps", "1"]
    assert run(monkeypatch, "train", *words, *SMALL, "--algorithm", algorithm, option, "0.5") == 0
    saved = list((folder / "runs").rglob("episodes"))
    assert len(saved) == 1 and len(list(EpisodeLog(saved[0]).read())) == 4


def test_an_unknown_algorithm_suggests_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match=r"'rlo' is not known.*rloo"):
        request(model="starter", environments=("m:A",), arguments=[], algorithm="rlo")


def test_the_file_may_name_the_algorithm(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: starter\nenvironment: m:A\nalgorithm: rloo\nnormalize_advantages: true\n")
    found = request(config_file=file, arguments=[])
    assert found.algorithm == "rloo" and found.values == {"normalize_advantages": True}
