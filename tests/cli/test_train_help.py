"""``envgrad train --help`` lists every option that acts, readable in narrow and in wide terminals."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from envgrad.cli.field_words import IMPLIED, TRANSFORMERS_HELP, UNUSED
from envgrad.cli.flags import read_fields
from envgrad.cli.train_help import show_train_help
from envgrad.config import REFUSED, TRL_REFUSED, GRPOConfig


@pytest.mark.parametrize("width", [60, 80, 120])
def test_every_option_that_acts_is_listed_once_and_fits(width: int) -> None:
    stream = io.StringIO()
    show_train_help("", Console(file=stream, width=width))
    lines = stream.getvalue().partition("Names may be written")[0].splitlines()
    assert max(len(line.rstrip()) for line in lines) <= width
    listed = [found[0] for line in lines if (found := re.match(r"--[a-z0-9-]+", line))]
    cannot_act = REFUSED | TRL_REFUSED | IMPLIED | UNUSED
    assert sorted(listed) == sorted(one.flag for one in read_fields(GRPOConfig).values() if one.name not in cannot_act)


def test_options_of_transformers_are_told_in_our_words() -> None:
    stream = io.StringIO()
    show_train_help("", Console(file=stream, width=80))
    assert f"--max-grad-norm  1.0\n    {TRANSFORMERS_HELP['max_grad_norm']}" in stream.getvalue()
