from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from envgrad.native.compiler import library
from envgrad.sampling.engine import Engine

# the tests of this folder share small models and sessions
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(params=["native", "fused"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which decoder there is for models of a known shape: that of the compiled kernels, or of torch's operations."""
    name: str = request.param
    if name == "fused":
        monkeypatch.setattr("envgrad.sampling.native_decoder.library", lambda: None)
    elif library() is None:
        pytest.skip("needs a C++ compiler")
    return name


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes a millisecond more, so that what a test does meanwhile falls into an answer."""
    step = Engine.step

    def slowly(self: Engine, **options: Any) -> Any:
        time.sleep(0.001)
        return step(self, **options)

    monkeypatch.setattr(Engine, "step", slowly)
