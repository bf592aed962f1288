"""Every requirement of the package, its extras and its tests has a tested pin, which its range allows."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_direct_requirement_is_pinned_within_its_range() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {plain(line.partition("==")[0]): line.partition("==")[2] for line in lines if "==" in line}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    requirements = [Requirement(text) for group in (project["dependencies"], *extras) for text in group]
    for requirement in requirements:
        name = plain(requirement.name)
        if name != "envgrad":
            assert name in pins, f"{name} has no pin in constraints.txt"
            assert requirement.specifier.contains(pins[name]), f"{requirement} does not allow {pins[name]}"
