from __future__ import annotations

import sys
from pathlib import Path

import pytest

from envgrad.cli import demo
from envgrad.cli.main import main
from envgrad.config import GRPOConfig
from envgrad.episodes.log import EpisodeLog
from envgrad.episodes.records import EpisodeFilter


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["envgrad", "demo", *words])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


def small_config(output_dir: Path, *, seed: int, steps: int) -> GRPOConfig:
    """The demo's run with few episodes."""
    return GRPOConfig(
        output_dir=str(output_dir), seed=seed, max_steps=steps, per_device_train_batch_size=8, num_generations=4,
        max_completion_length=64, eval_tasks=4, logging_steps=1, save_strategy="no", report_to="none",
        disable_tqdm=True, use_cpu=True,
    )  # fmt: skip


def test_the_demo_trains_evaluates_and_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "demo_config", small_config)
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "--steps", "2", "--output-dir", "runs/demo", "--plain") == 0
    out = capsys.readouterr().out
    lines = [line.split("  ")[0] for line in out.splitlines()]
    assert [line for line in lines if line.startswith("step ")] == ["step 1/2", "step 2/2"]
    for words in ("the trained model", "chosen with hindsight", "best constant move", "random moves", "Success on 4 "):
        assert words in out
    assert "--environment envgrad.starter.compass:Compass" in out  # there is no examples folder here
    assert "--model runs/demo/model" in out
    assert out.splitlines()[-1].startswith("done in ")
    folder = tmp_path / "runs" / "demo"
    assert (folder / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "model" / "model.safetensors").is_file()
    train = list(EpisodeLog(folder / "episodes").read(EpisodeFilter(split="train")))
    evaluation = list(EpisodeLog(folder / "episodes").read(EpisodeFilter(split="eval")))
    assert (len(train), len(evaluation)) == (16, 4)
    assert not {record["seed"] for record in train} & {record["seed"] for record in evaluation}
    means = [sum(r["reward"] for r in train if r["step"] == step) / 8 for step in (0, 1)]
    assert f"{means[0]:.3f} at step 1, {sum(means) / 2:.3f} over the last 5 steps" in out


def test_a_second_demo_goes_to_a_folder_of_its_own_and_names_the_example_at_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "demo_config", small_config)
    monkeypatch.setattr("envgrad.cli.results.can_draw_png", lambda: False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "guess_number.py").write_text("")
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    (tmp_path / "runs" / "demo" / "note").write_text("mine")
    assert run(monkeypatch, "--steps", "1") == 0
    out = capsys.readouterr().out
    assert [path.name for path in (tmp_path / "runs" / "demo").iterdir()] == ["note"]
    assert any(EpisodeLog(tmp_path / "runs" / "demo-2" / "episodes").read())
    assert "--environment examples/guess_number.py:GuessNumber" in out
    assert "pip install 'envgrad[plot]'" in out
    assert not (tmp_path / "runs" / "demo-2" / "reward.png").exists()


def test_an_interrupted_demo_is_exit_code_130(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_demo", interrupt)
    assert run(monkeypatch, "--output-dir", str(tmp_path / "x")) == 130
    assert "interrupted" in capsys.readouterr().err


def test_the_settings_are_those_that_were_tried(tmp_path: Path) -> None:
    config = demo.demo_config(tmp_path, seed=3, steps=7)
    assert (config.seed, config.max_steps, config.output_dir) == (3, 7, str(tmp_path))
    assert config.episodes_per_step == 256
    assert config.generation_batch_size == 256 and config.num_iterations == 2
    assert (config.adam_beta1, config.adam_beta2, config.beta) == (0.9, 0.99, 0.0)
