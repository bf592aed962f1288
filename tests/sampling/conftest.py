from __future__ import annotations

import sys
from pathlib import Path

import pytest

from envgrad.native.compiler import library

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
