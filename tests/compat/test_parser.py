from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import dataclass, field

import pytest

from envgrad import ConfigurationError, DatasetMixtureConfig, GRPOConfig, ModelConfig, ScriptArguments, TrlParser
from envgrad.config import RLOOConfig, SDPOConfig


@dataclass
class Arguments:
    steps: int
    name: str = "run"
    rates: list[float] | str | None = None
    pair: tuple[float, float] | None = None
    fast: bool = field(default=False)


def parse(words, **options):
    return TrlParser(Arguments).parse_args_and_config(words.split(), **options)


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path, monkeypatch):
    monkeypatch.delenv("ENVGRAD_TEST", raising=False)
    path = tmp_path / "run.yaml"
    path.write_text("env:\n  ENVGRAD_TEST: 3\nsteps: 5\nname: file\nfast: true\n")
    (found,) = parse(f"--config {path} --name flag")
    assert (found.steps, found.name, found.fast) == (5, "flag", True)
    assert os.environ["ENVGRAD_TEST"] == "3"
    assert parse(f"--name flag --config={path}")[0].steps == 5


def test_lists_and_pairs_take_words():
    (found,) = parse("--steps 1 --rates 0.5 1 --pair -1 1")
    assert found.rates == [0.5, 1.0] and tuple(found.pair) == (-1.0, 1.0)


def test_unknown_names_of_a_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("steps: 5\nstep: 6\n")
    with pytest.raises(ConfigurationError, match=r"names that no option has: step;"):
        parse(f"--config {path}")
    assert parse(f"--config {path}", fail_with_unknown_args=False)[0].steps == 5
    _, rest = parse(f"--config {path} --more 1", return_remaining_strings=True)
    assert rest == ["--step", "6", "--more", "1"]
    _, of_file, of_flags = parse(
        f"--config {path} --more 1", return_remaining_strings=True, separate_remaining_strings=True
    )
    assert (of_file, of_flags) == (["--step", "6"], ["--more", "1"])


@pytest.mark.parametrize(
    ("text", "words"), [("- 1\n", "YAML mapping"), ("env: 3\n", "env in"), ("a: [", "cannot be read")]
)
def test_files_that_cannot_be_used(tmp_path, text, words):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=words):
        parse(f"--config {path}")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        parse(f"--config {tmp_path}/none.yaml")
    with pytest.raises(ConfigurationError, match="--config has no value"):
        parse("--config")


def test_a_field_of_the_name_config_is_an_error():
    @dataclass
    class Wrong:
        config: str = ""

    with pytest.raises(ConfigurationError, match="'config'"):
        TrlParser(Wrong)


@pytest.mark.parametrize("config", [GRPOConfig, RLOOConfig, SDPOConfig])
def test_training_scripts_read_their_four_dataclasses(tmp_path, config):
    path = tmp_path / "run.yaml"
    path.write_text(f"output_dir: {tmp_path}\nlearning_rate: 1.0e-5\ndatasets:\n  - path: my/data\nlora_r: 4\n")
    parser = TrlParser((ScriptArguments, config, ModelConfig, DatasetMixtureConfig))
    assert "--generation_kwargs" in parser.format_help()
    words = ["--config", str(path), "--use_peft", "--reward_weights", "0.5", "1", "--generation_kwargs", '{"top_k": 5}']
    script, training, model, mixture = parser.parse_args_and_config([*words, "--report_to", "none", "--use_cpu"])
    assert isinstance(script, ScriptArguments) and mixture.datasets[0].path == "my/data"
    assert (training.learning_rate, training.reward_weights, training.top_k) == (1e-5, [0.5, 1.0], 5)
    assert (model.use_peft, model.lora_r) == (True, 4)


def test_a_quiet_script_shows_warnings_through_the_log():
    code = (
        "import logging, warnings\nfrom envgrad import init_zero_verbose\ninit_zero_verbose()\n"
        "warnings.warn('quiet')\nlogging.getLogger('x').error('loud')\n"
        "logging.getLogger().setLevel(logging.WARNING)\nwarnings.warn('now shown')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "quiet" not in done.stdout + done.stderr
    assert "loud" in done.stdout and "UserWarning: now shown" in " ".join(done.stdout.split())
    assert logging.getLogger().level != logging.ERROR, "this process's log must be left alone"
