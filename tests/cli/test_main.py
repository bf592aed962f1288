from __future__ import annotations

import os
import subprocess
import sys

import pytest

import envgrad
from envgrad.cli.main import app, main
from envgrad.errors import ConfigurationError


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The exit code of ``envgrad`` with these words."""
    monkeypatch.setattr(sys, "argv", ["envgrad", *words])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


def test_help_and_version_load_neither_torch_nor_transformers() -> None:
    program = (
        "import sys\n"
        "from envgrad.cli.main import main\n"
        "sys.argv = ['envgrad', *sys.argv[1:]]\n"
        "try:\n    main()\n"
        "finally:\n    print('LOADED', sorted({'torch', 'transformers', 'numpy', 'yaml'} & set(sys.modules)))\n"
    )
    for words, shown in ((["--help"], "demo"), (["--version"], envgrad.__version__), (["demo", "--help"], "--seed")):
        done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
        assert shown in done.stdout
        assert "LOADED []" in done.stdout


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "envgrad", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"envgrad {envgrad.__version__}"


def test_no_command_shows_the_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch) == 2
    out = capsys.readouterr()
    assert "envgrad demo" in out.out + out.err


def test_train_help_lists_every_option_that_can_act(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "train", "--help") == 0
    words = capsys.readouterr().out.split()
    for flag in ("--environment", "--num-generations", "--learning-rate", "--report-to", "--beta"):
        assert flag in words
    assert "--dataloader-num-workers" not in words  # refused by the configuration
    assert "--do-predict" not in words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--max-stepz", "3"], "error: unknown option --max-stepz; did you mean --max-steps?"),
        (["train"], "error: no model: give --model a name, a folder, a .gguf file, or 'starter'"),
        (["train", "--model", "starter"], "error: nothing to learn from: give --environment"),
        (["train", "--model", "x", "--environment", "nowhere_at_all:X"], "there is no module 'nowhere_at_all'"),
        (["train", "--config", "nowhere.yaml"], "error: --config nowhere.yaml cannot be read: No such file"),
        (["train", "--do-predict"], "there is nothing to predict"),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert run(monkeypatch, *words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_a_message_of_several_lines_is_shown_as_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise ConfigurationError("first\n  second")

    monkeypatch.setattr("envgrad.cli.train.run_train", fail)
    assert run(monkeypatch, "train") == 2
    assert capsys.readouterr().err == "error: first second\n"


def test_an_unknown_command_is_exit_code_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "trian") == 2
    assert "train" in capsys.readouterr().err  # the nearest


def test_our_own_failures_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("envgrad.cli.train.run_train", fail)
    monkeypatch.setattr(sys, "argv", ["envgrad", "train"])
    with pytest.raises(RuntimeError, match="a bug"):
        main()


def commands() -> list[str]:
    from typer.main import get_command

    command = get_command(app)
    return sorted(command.commands)  # type: ignore[attr-defined]


def test_every_command_has_an_example_that_names_it() -> None:
    from typer.main import get_command

    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        assert command.epilog and command.epilog.startswith(f"Example: envgrad {name}"), name


def test_the_help_names_exit_codes_and_completion(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--help") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Exit codes: 0 done; 1 the run failed" in said and "130 interrupted" in said
    assert "envgrad --install-completion" in said
    for name in commands():
        assert name in said


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        (["tarin"], "Did you mean 'train'?"),
        (["chek"], "Did you mean 'check'?"),
        (["--vresion"], "--version"),
        (["check", "--tunrs", "3", "x:Y"], "--turns"),
        (["play", "--spilt", "eval", "x:Y"], "--split"),
        (["bench", "--row", "3"], "--rows"),
    ],
)
def test_what_is_misspelt_is_answered_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], nearest: str
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert run(monkeypatch, *words) == 2
    assert nearest in capsys.readouterr().err


def test_the_shell_completes_commands_and_options() -> None:
    program = "import sys; sys.argv[0] = 'envgrad'; from envgrad.cli.main import main; main()"

    def completed(line: str) -> list[str]:
        asked = {"_ENVGRAD_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
        done = subprocess.run([sys.executable, "-c", program], env=os.environ | asked, capture_output=True, text=True)
        return done.stdout.split()

    assert completed("envgrad re") == ["replay"]
    assert "--max-turns" in completed("envgrad play --m")
