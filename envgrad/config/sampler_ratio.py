"""How old / sampler is bounded where the sampler's log-probs are not exact."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from envgrad.config.checks import choice
from envgrad.errors import ConfigurationError
from envgrad.losses import CorrectionMode


@dataclass
class SamplerRatioFields:
    """Fields of a configuration. They act where old log-probs are recomputed: active dropout, autocast, half precision.

    The surrogate is then weighted by old / sampler (``losses.importance_correction``), bounded to
    ``[sampler_ratio_min, sampler_ratio_cap]``; an exact sampler's weight is 1.
    """

    sampler_ratio_mode: str = field(
        default="token_truncate",
        metadata={"help": "token or sequence _ truncate or mask, as sequence_mask; none corrects nothing."},
    )
    sampler_ratio_cap: float | None = field(
        default=3.0, metadata={"help": "Upper bound of old/sampler where the sampler's log-probs are not exact."}
    )
    sampler_ratio_min: float | None = field(default=None, metadata={"help": "Lower bound of old/sampler."})

    def correction_mode(self) -> CorrectionMode | None:
        """``sampler_ratio_mode`` as ``losses.importance_correction`` takes it; None where nothing is corrected."""
        modes: tuple[CorrectionMode, ...] = get_args(CorrectionMode)
        return next((mode for mode in modes if mode == self.sampler_ratio_mode), None)


def check_sampler_ratio(config: SamplerRatioFields) -> None:
    """
    Raises:
        ConfigurationError: an unknown mode, bounds that shut 1 out, or a truncation without a bound.
    """
    mode, low, high = config.sampler_ratio_mode, config.sampler_ratio_min, config.sampler_ratio_cap
    choice("sampler_ratio_mode", mode, (*get_args(CorrectionMode), "none"))
    if high is not None and high < 1:
        raise ConfigurationError(f"sampler_ratio_cap={high} must be at least 1, the ratio of an exact sampler")
    if low is not None and not 0 <= low < 1:
        raise ConfigurationError(f"sampler_ratio_min={low} must be in [0, 1): 1 is the ratio of an exact sampler")
    if mode.endswith("truncate") and low is None and high is None:
        raise ConfigurationError(
            f"sampler_ratio_mode={mode!r} truncates to nothing: set sampler_ratio_cap or sampler_ratio_min"
        )
    if mode == "none" and low is not None:
        raise ConfigurationError(f"sampler_ratio_min={low} cannot act: sampler_ratio_mode='none' corrects nothing")
