from __future__ import annotations

import pytest

from envgrad.errors import ConfigurationError
from envgrad.scaling.hardware import ACCELERATORS, Reached, accelerator


def test_names_and_numbers() -> None:
    assert accelerator("H200") is ACCELERATORS["h200"]
    own = accelerator("100, 24, 900")
    assert (own.rate, own.memory, own.reads) == (100e12, 24e9, 900e9)


@pytest.mark.parametrize("text", ["z100", "1,2", "1,2,x", "1,-2,3", ""])
def test_what_is_neither(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"h100.*TFLOPS,GB,GB/s"):
        accelerator(text)


def test_shares_are_shares() -> None:
    with pytest.raises(ConfigurationError, match="training"):
        Reached(training=1.5)
    with pytest.raises(ConfigurationError, match="disk=0"):
        Reached(disk=0)
