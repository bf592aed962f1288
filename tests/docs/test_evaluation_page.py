"""The page's Python runs as it stands, and its commands have options that exist."""

from __future__ import annotations

import re
from pathlib import Path

from envgrad.cli.eval import FIELDS, LOCAL_FIELDS, OWN_FLAGS
from helpers.pages import path_of, run_python

PAGE = path_of("evaluation").read_text(encoding="utf-8")


def test_the_code_runs(folder: Path) -> None:
    metrics = run_python("evaluation")["metrics"]
    assert isinstance(metrics, dict)
    named = {name.replace("@k", "@4") for name in re.findall(r"`(eval_[\w@/]+)`", PAGE)}
    assert {"eval_reward_ci95", "eval_pass@4_ci95", "eval_tasks/unscored"} <= named <= set(metrics)


def test_the_options_exist() -> None:
    known = {*OWN_FLAGS, *("--" + name.replace("_", "-") for name in (*FIELDS, *LOCAL_FIELDS))}
    mentioned = set(re.findall(r"--[a-z][a-z-]+", PAGE))
    assert mentioned and mentioned <= known, mentioned - known
