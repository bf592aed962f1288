from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envgrad.cli.flags import convert, nearest, parse_flags, read_fields
from envgrad.config import GRPOConfig
from envgrad.errors import ConfigurationError


class Pace(Enum):
    NO = "no"
    STEPS = "steps"


@dataclasses.dataclass
class Config:
    learning_rate: float = dataclasses.field(default=1e-6, metadata={"help": "Step   size."})
    seed: int = 0
    shuffle: bool = True
    bf16: bool | None = None
    min_p: float | None = None
    name: str | None = None
    scale: str | bool = "group"
    kwargs: dict[str, Any] | str | None = None
    stop: list[str] | None = None
    report_to: str | list[str] | None = None
    pace: Pace | str = Pace.NO
    plan: Pace | None = None
    opaque: complex | None = None


FIELDS = read_fields(Config)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--learning-rate", "1e-3"], {"learning_rate": 1e-3}),
        (["--learning_rate=2"], {"learning_rate": 2.0}),
        (["--seed", "-3"], {"seed": -3}),
        (["--shuffle"], {"shuffle": True}),
        (["--no-shuffle"], {"shuffle": False}),
        (["--no_shuffle"], {"shuffle": False}),
        (["--shuffle", "off"], {"shuffle": False}),
        (["--bf16", "none", "--seed", "1"], {"bf16": None, "seed": 1}),
        (["--min-p", "None"], {"min_p": None}),
        (["--name", "none"], {"name": "none"}),
        (["--scale", "false"], {"scale": False}),
        (["--scale", "batch"], {"scale": "batch"}),
        (["--kwargs", '{"gguf_file": "x.gguf"}'], {"kwargs": {"gguf_file": "x.gguf"}}),
        (["--stop", "a", "b", "--stop", "c"], {"stop": ["a", "b", "c"]}),
        (["--stop", "a"], {"stop": ["a"]}),
        (["--stop=--x"], {"stop": ["--x"]}),
        (["--report-to", "wandb"], {"report_to": "wandb"}),
        (["--report-to", "wandb", "trackio"], {"report_to": ["wandb", "trackio"]}),
        (["--pace", "steps"], {"pace": "steps"}),
        (["--seed", "1", "--seed", "2"], {"seed": 2}),
        ([], {}),
    ],
)
def test_flags_become_values(words: list[str], expected: dict[str, Any]) -> None:
    found = parse_flags(words, FIELDS)
    assert found == expected
    assert [type(value) for value in found.values()] == [type(value) for value in expected.values()]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--learning-rat", "1"], "unknown option --learning-rat; did you mean --learning-rate?"),
        (["--no-shufle"], "unknown option --no-shufle; did you mean --no-shuffle?"),
        (["--modle", "x"], "unknown option --modle; did you mean --model?"),
        (["--zzzzzz"], "unknown option --zzzzzz; `envgrad train --help` lists all"),
        (["--no-seed"], "unknown option --no-seed"),
        (["--seed", "1.5"], "--seed '1.5' does not fit: it must be a whole number"),
        (["--learning-rate", "fast"], "--learning-rate 'fast' does not fit: it must be a number"),
        (["--seed"], "--seed has no value; it must be a whole number"),
        (["--shuffle", "maybe"], "--shuffle 'maybe' does not fit: it must be true or false"),
        (["--no-shuffle", "true"], "--no-shuffle takes no value"),
        (["--seed", "1", "2"], "--seed takes one value, got 1 2"),
        (["--pace", "step"], "--pace 'step' does not fit: it must be one of no, steps; did you mean steps?"),
        (["--kwargs", "{1}"], "--kwargs '{1}' does not fit"),
        (["--opaque", "1j"], "--opaque cannot be given as text; set opaque in Python"),
        (["seed", "1"], "unexpected 'seed'"),
    ],
)
def test_a_bad_flag_is_named_with_its_rule(words: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_flags(words, FIELDS, also=("--model",))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("learning_rate", "1e-3", 1e-3),  # YAML 1.1 reads 1e-3 as text
        ("learning_rate", 1, 1.0),
        ("pace", False, "no"),  # and the word no as false
        ("shuffle", False, False),
        ("bf16", None, None),
        ("stop", ["a"], ["a"]),
        ("kwargs", {"a": 1}, {"a": 1}),
    ],
)
def test_yaml_values_are_converted(name: str, value: object, expected: object) -> None:
    found = convert(FIELDS[name], value)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", True), ("seed", 1.5), ("seed", None), ("shuffle", 1), ("name", 3), ("stop", {"a": 1}), ("kwargs", [1])],
)
def test_yaml_values_of_another_type_are_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=f"--{name} .* does not fit"):
        convert(FIELDS[name], value)


@given(seed=st.integers(-(10**12), 10**12), rate=st.floats(allow_nan=False), on=st.booleans())
def test_what_is_written_is_what_is_read(seed: int, rate: float, on: bool) -> None:
    words = ["--seed", str(seed), f"--learning-rate={rate!r}", "--shuffle" if on else "--no-shuffle"]
    assert parse_flags(words, FIELDS) == {"seed": seed, "learning_rate": rate, "shuffle": on}


def test_every_field_of_the_configuration_is_a_flag() -> None:
    fields = read_fields(GRPOConfig)
    assert set(fields) == {field.name for field in dataclasses.fields(GRPOConfig)}
    assert [field.name for field in fields.values() if not field.kinds and not field.choices] == ["parallelism_config"]
    assert fields["num_generations"].owner == "RolloutConfig"
    assert fields["beta"].owner == "GRPOConfig"
    assert fields["learning_rate"].kinds == (float,)
    assert "constant" in fields["lr_scheduler_type"].choices
    assert FIELDS["learning_rate"].help == "Step size."


def test_nearest_names_nothing_where_nothing_is_near() -> None:
    assert nearest("seeed", ["seed", "model"]) == "; did you mean seed?"
    assert nearest("qqq", ["seed", "model"]) == ""
