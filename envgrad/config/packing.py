"""How packed rows are computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, get_args

import torch

from envgrad.config.checks import choice
from envgrad.errors import ConfigurationError
from envgrad.flex_rows import has_flex_attention
from envgrad.layout import PackedAttention

if TYPE_CHECKING:
    from envgrad.config.rollout import RolloutConfig


@dataclass
class PackingFields:
    """The fields; ``RolloutConfig`` has them."""

    # -- packed rows
    packed_attention: str = field(
        default="auto",
        metadata={
            "help": "How the tokens of a packed row attend: auto (compiled kernels or pieces on a CPU, padded blocks "
            "elsewhere), or flex (one call of PyTorch's FlexAttention, on CUDA only)."
        },
    )


def check_packing(config: RolloutConfig) -> None:
    """
    Raises:
        ConfigurationError: a value that is not known, or FlexAttention where there is none.
    """
    choice("packed_attention", config.packed_attention, get_args(PackedAttention))
    if config.packed_attention != "flex":
        return
    if not has_flex_attention():
        raise ConfigurationError(
            f"packed_attention='flex' cannot act: PyTorch {torch.__version__} has no FlexAttention; update PyTorch, or "
            "leave packed_attention at 'auto'"
        )
    device = config.device.type
    if device == "cpu":
        raise ConfigurationError(
            "packed_attention='flex' cannot act: the training is on a CPU, where the compiled kernels or pieces are "
            "used; leave packed_attention at 'auto'"
        )
    if device != "cuda":
        raise ConfigurationError(
            f"packed_attention='flex' cannot act on {device}: it is for CUDA; leave packed_attention at 'auto'"
        )
