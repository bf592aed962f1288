from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from envgrad.cli.eval import read_rows
from envgrad.cli.main import main
from envgrad.episodes.log import EpisodeLog
from envgrad.episodes.records import EpisodeFilter
from envgrad.errors import ConfigurationError, TooManyFailures
from helpers.chat_server import Answer, chat_server, message

COMPASS = "envgrad.starter.compass:Compass"
SUMS = """
class Sums:
    def reset(self, a, b):
        self.sum, self.said = a + b, None
        return f"{a}+{b}?"

    def answer(self, number: int) -> str:
        "Answer.

        Args:
            number: The sum.
        "
        self.said = number
        return "thanks"

    def get_reward(self):
        return float(self.said == self.sum)
""".replace('"Answer', '"""Answer').replace('        "\n', '        """\n')


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["envgrad", *words])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "sums_environment.py").write_text(SUMS)
    (tmp_path / "rows.jsonl").write_text('{"a": 1, "b": 2}\n\n{"a": 3, "b": 4}\n{"a": 5, "b": 6}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "sums_environment", raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_the_starter_model_on_compass(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", "--model", "starter", "--environment", COMPASS, "--tasks", "8", "--samples", "2", "--json"]
    limits = ["--max-completion-length", "96", "--use-cpu", "--seed", "3", "--price-in", "1", "--price-out", "2"]
    assert run(monkeypatch, *words, *limits) == 0
    out = capsys.readouterr()
    data = json.loads(out.out)
    assert (data["model"], data["split"], data["seed"]) == ("starter", "eval", 3)
    assert (data["tasks"], data["samples"], data["episodes"]) == (8, 2, 16)
    assert 0 <= data["pass_at"]["1"]["mean"] <= data["pass_at"]["2"]["mean"] <= 1
    assert data["reward"]["mean"] == data["pass_at"]["1"]["mean"]  # Compass pays 0 or 1
    assert sum(data["stop_reasons"].values()) == pytest.approx(1.0)
    cost = data["cost"]
    assert cost["tokens_out"] == data["sampled_tokens"] > 0
    assert cost["price"] == pytest.approx((cost["tokens_in"] + 2 * cost["tokens_out"]) / 1e6)
    result = folder / "runs" / "eval-compass"
    assert json.loads((result / "evaluation.json").read_text()) == data
    records = list(EpisodeLog(result / "episodes").read(EpisodeFilter(split="eval")))
    assert sorted((record["position"], record["sibling"]) for record in records) == [
        (position, sibling) for position in range(8) for sibling in range(2)
    ]
    assert sum(record["reward"] for record in records) / 16 == pytest.approx(data["reward"]["mean"])
    assert "8 of 8 tasks" in out.err and "evaluating starter on Compass" in out.err
    # The same seed plays the same tasks, and samples the same answers.
    assert run(monkeypatch, *words, *limits) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["reward"] == data["reward"] and again["sampled_tokens"] == data["sampled_tokens"]
    assert (folder / "runs" / "eval-compass-2" / "evaluation.json").is_file()


def add(body: dict[str, Any], number: int) -> Answer:
    """Gets every sum right that is not of odd numbers from 5 on."""
    if body["messages"][-1]["role"] == "tool":
        return message("Done.")
    a, b = body["messages"][0]["content"].rstrip("?").split("+")
    return message("", ("answer", json.dumps({"number": int(a) + int(b) if int(a) < 5 else 0})))


def test_a_served_model_on_rows_of_a_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ENVGRAD_TEST_KEY", "sesame")
    with chat_server(add) as server:
        served = ["--endpoint", server.url, "--model", "m", "--api-key-env", "ENVGRAD_TEST_KEY", "--price-out", "10"]
        words = ["--environment", "sums_environment:Sums", "--dataset", "rows.jsonl", "--output-dir", "out"]
        assert run(monkeypatch, "eval", *served, *words, "--temperature", "0.5") == 0
    out = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "3 of 3 tasks reward 0.667 0:00 left" in lines
    assert any(line.startswith("pass@1 0.667 +- ") for line in lines)
    assert any(line.startswith("120 tokens in, 30 tokens out") and "6 requests" in line for line in lines)
    assert any(line.endswith("price 0.0003") for line in lines)
    assert {request["temperature"] for request in server.requests} == {0.5}
    data = json.loads((folder / "out" / "evaluation.json").read_text())
    assert (data["endpoint"], data["tasks"], data["reward"]["mean"]) == (server.url, 3, pytest.approx(2 / 3))
    assert "sesame" not in json.dumps(data) + out


def test_a_finite_split_is_played_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with chat_server(add) as server:
        words = [
            "--environment",
            "sums_environment:Sums",
            "--dataset",
            "rows.jsonl",
            "--tasks",
            "50",
            "--split",
            "train",
        ]
        assert run(monkeypatch, "eval", "--endpoint", server.url, "--model", "m", *words) == 0
    out = capsys.readouterr().out
    assert "split 'train' has 3 tasks: all are played, once" in out
    assert {record["split"] for record in EpisodeLog(folder / "runs" / "eval-sums" / "episodes").read()} == {"train"}


def test_a_run_in_which_nothing_could_be_scored_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with chat_server(lambda body, number: {"status": 500, "text": "down"}) as server:
        words = ["--environment", "sums_environment:Sums", "--dataset", "rows.jsonl", "--patience", "0.1"]
        monkeypatch.setattr(
            sys,
            "argv",
            ["envgrad", "eval", "--endpoint", server.url, "--model", "m", "--max-episode-retries", "0", *words],
        )
        with pytest.raises(TooManyFailures, match=r"no episode has a reward: 3 failed .*status 500: down"):
            main()


def test_an_interrupt_is_exit_code_130(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("envgrad.training.evaluation.play_evaluation", interrupt)
    words = ["--endpoint", "http://127.0.0.1:9", "--model", "m", "--environment", COMPASS, "--output-dir", "here"]
    assert run(monkeypatch, "eval", *words) == 130
    assert capsys.readouterr().err.strip().endswith("interrupted; what was written lies in here")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "no model"),
        (["--model", "starter"], "nothing to learn from: give --environment"),
        (["--model", "starter", "--environment", COMPASS, "--learning-rate", "1"], "cannot act in an evaluation"),
        (["--model", "starter", "--environment", COMPASS, "--max-turnz", "1"], "did you mean --max-turns?"),
        (["--model", "starter", "--environment", COMPASS, "--temperature", "-1"], "temperature=-1"),
        (
            ["--model", "starter", "--environment", COMPASS, "--patience", "3"],
            "--patience cannot act without --endpoint",
        ),
        (["--model", "starter", "--environment", COMPASS, "--api-key-env", "X"], "--api-key-env cannot act without"),
        (["--model", "starter", "--environment", COMPASS, "--price-in", "-1"], "--price-in -1"),
        (["--model", "starter", "--environment", COMPASS, "--split", "test", "--use-cpu"], "split='test' is not known"),
        (["--model", "m", "--endpoint", "host", "--environment", COMPASS], "is no URL"),
        (
            ["--model", "m", "--endpoint", "http://h", "--environment", COMPASS, "--use-cpu"],
            "cannot act with --endpoint",
        ),
        (
            ["--model", "m", "--endpoint", "http://h", "--environment", COMPASS, "--dataset", "no.jsonl"],
            "cannot be read",
        ),
        (["--model", "m", "--endpoint", "http://h", "--environment", "sums_environment:Sums"], "reset requires"),
        (
            ["--model", "starter", "--environment", COMPASS, "--samples", "8", "--max-concurrent-episodes", "4"],
            "max_concurrent_episodes=4 must be at least num_generations_eval=8",
        ),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_code_2(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    assert run(monkeypatch, "eval", *words) == 2
    error = capsys.readouterr().err
    assert text in error
    assert "Traceback" not in error
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("{}\n{", "line 2 is not JSON"), ("\n[1]", "line 2 is a list"), ("\n\n", "has no rows"), (None, "cannot be read")],
)
def test_a_file_of_rows_that_is_none(tmp_path: Path, text: str | None, complaint: str) -> None:
    path = tmp_path / "rows.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigurationError, match=complaint):
        read_rows(path)
