from __future__ import annotations

import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from envgrad.cli.dry_run import byte_count, seconds, token_view
from envgrad.cli.main import main
from envgrad.starter import STARTER_PATH

COMPASS = ("--model", "starter", "--environment", "envgrad.starter.compass:Compass")


def dry_run(monkeypatch: pytest.MonkeyPatch, *words: str, columns: int = 120) -> int:
    """The exit code of ``envgrad train --dry-run`` with these words."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "argv", ["envgrad", "train", *words, "--dry-run"])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


def test_settings_prompt_tokens_memory_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ("--per-device-train-batch-size", "16", "--max-completion-length", "64", "--beta", "0.1", "--use-cpu")
    assert dry_run(monkeypatch, *COMPASS, *small) == 0
    out = capsys.readouterr().out
    sections = [
        "Settings that differ from the defaults", "As by default", "The first prompt: Compass, task train/0",
        "The same as the template renders it", "Memory, estimated from", "Time of a step, as estimated",
        "Nothing was played, trained or written.",
    ]  # fmt: skip
    places = [out.index(title) for title in sections]
    assert places == sorted(places)
    settings = out[: places[1]]
    lines = [line.split() for line in settings.splitlines()]
    assert ["max_completion_length", "64", "default", "512"] in lines
    assert any(line[:2] == ["generation_batch_size", "16"] and "follows" in line for line in lines)
    assert "num_generations=8" in out[places[1] : places[2]]
    prompt = out[places[2] : places[3]]
    assert "Reach the goal in six moves." in prompt and 'move(direction: "north"' in prompt
    memory = {line.split("  ")[1].strip(): line for line in out[places[4] : places[5]].splitlines()[1:] if line.strip()}
    assert {"weights", "gradients", "optimizer", "other weights", "KV cache", "activations", "together"} <= set(memory)
    assert "132,928 parameters" in memory["weights"] and "531.7 kB" in memory["weights"]
    assert "16 episodes" in out[places[5] :]
    assert not list(tmp_path.iterdir())  # nothing is written


def test_each_token_of_the_prompt_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert dry_run(monkeypatch, *COMPASS, columns=400) == 0
    out = capsys.readouterr().out
    text = out.partition("as the template renders it\n")[2].partition("\n")[0].strip()
    tokenizer = AutoTokenizer.from_pretrained(STARTER_PATH)
    start = out.index("The same as", out.index("The same as the template") + 1)
    title, _, rest = out[start:].partition("\n")
    view = rest[: rest.index("Memory, estimated")]
    count = int(title.split()[3].replace(",", ""))
    pieces = [tokenizer.decode([one]) for one in tokenizer.encode(text, add_special_tokens=False)]
    assert count == len(pieces) > 10
    assert view.strip() == "".join(f"{piece}|" for piece in pieces)


def test_what_would_keep_the_run_from_starting_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert dry_run(monkeypatch, "--model", "./nowhere", *COMPASS[2:]) == 2
    assert "./nowhere" in capsys.readouterr().err
    (tmp_path / "bare.py").write_text("class Bare:\n    def reset(self):\n        return 'Hi.'\n")
    assert dry_run(monkeypatch, "--model", "starter", "--environment", "bare.py:Bare") == 2
    assert "has no reward source" in capsys.readouterr().err


def test_a_long_prompt_is_cut_in_the_middle_and_hostile_text_is_harmless() -> None:
    view = token_view(["a"] * 10, limit=4).plain
    assert view == "a|a|\n... 6 more tokens ...\na|a|"
    assert token_view(["\x1b[31mred", "[b]"]).plain == "red|[b]|"


def test_sizes_and_durations() -> None:
    assert [byte_count(size) for size in (100, 2_000_000, 3_210_000_000)] == ["0.1 kB", "2.0 MB", "3.2 GB"]
    assert seconds(0.5) == "0.500 s" and seconds(7300.0) == "2:01:40 hours"
