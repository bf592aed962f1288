"""What all ranks decide together behind the backward of each step, in one exchange.

::

    (what is not finite | loss | parts of metrics | signal) of each rank --> the same decision on all of them
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from envgrad.distributed.ranks import Ranks
from envgrad.losses import LossOutputs, Metric, merge_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step, as all ranks see it."""

    fault: str | None
    """what is not finite, in the words of the first rank that can name its cause"""
    loss: float
    """of the whole step"""
    metrics: Mapping[str, float]
    """over all of its tokens"""
    signal: int | None
    """a signal that came to some rank: the run stops behind this step, on all of them"""


def meet(ranks: Ranks, outputs: Sequence[LossOutputs], *, fault: str | None, signal: int | None) -> Step:
    """Tell all ranks of this one's part of a step, and hear of theirs.

    Raises:
        RankFailed: a rank is gone.

    Example:
        >>> from envgrad.distributed.ranks import Alone
        >>> one = Metric(value=torch.tensor(3.0), count=torch.tensor(4.0))
        >>> meet(Alone(), [LossOutputs(loss=torch.tensor(0.5), metrics={"kl": one})], fault=None, signal=None)
        Step(fault=None, loss=0.5, metrics={'kl': 0.75}, signal=None)
    """
    parts = [
        {name: (float(one.value), float(one.count), one.reduce) for name, one in output.metrics.items()}
        for output in outputs
    ]
    told = {"fault": fault, "loss": float(sum(float(one.loss) for one in outputs)), "parts": parts, "signal": signal}
    heard = [json.loads(data) for data in ranks.exchange(json.dumps(told).encode())]
    signals = [one["signal"] for one in heard if one["signal"] is not None]
    return Step(
        fault=_first_fault([one["fault"] for one in heard]),
        loss=sum(one["loss"] for one in heard),
        metrics=merge_metrics(_part(part) for one in heard for part in one["parts"]),
        signal=signals[0] if signals else None,
    )


def _part(part: Mapping[str, Sequence[object]]) -> dict[str, Metric]:
    found = {}
    for name, (value, count, reduce) in part.items():
        found[name] = Metric(value=_scalar(value), count=_scalar(count), reduce=reduce)  # type: ignore[arg-type]
    return found


def _scalar(value: object) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _first_fault(faults: Sequence[str | None]) -> str | None:
    """A gradient is the sum of all ranks', and not finite on all of them; the cause is known to one."""
    found = [one for one in faults if one is not None]
    causes = [one for one in found if not one.startswith("the gradient")]
    return next(iter(causes or found), None)
