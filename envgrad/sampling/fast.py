"""Forwards of our own, over copies of a model's weights, as the engine sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from envgrad.native.decoder import Kernels
from envgrad.sampling.kv_cache import SlotMemory, StepRow
from envgrad.sampling.requests import SharedPrefix


class StepLayout(Protocol):
    """Which rows a step forwards. It becomes the next step's, where each row decodes one token more."""

    def followed_by(self, rows: Sequence[StepRow], prefixes: Sequence[SharedPrefix | None]) -> bool:
        """Whether ``advance`` makes this the layout of ``rows``: those of this step, each a token further."""

    def advance(self) -> None:
        """Become the layout of the step in which every row decodes one token more."""


class FastDecoder(Protocol):
    """``fused.FusedDecoder``, ``native_decoder.NativeDecoder``."""

    @property
    def kernels(self) -> Kernels | None:
        """Compiled ones, where it has them."""

    @property
    def layout(self) -> Any:
        """The ``StepLayout`` that it reads: made of its slots, a step's rows, the device, and what rows share."""

    @property
    def fits(self) -> bool:
        """Whether it can compute what the module, as it is now, computes."""

    def new_cache(self) -> SlotMemory:
        """Slots for keys and values in its own order."""

    def refresh(self) -> None:
        """Make the copies anew if a weight was replaced or written to since."""

    def forget(self) -> None:
        """Forget the copies: the weights have changed."""

    def release(self) -> None:
        """Forget large copies."""

    def forward(self, layout: Any, token_ids: Sequence[int], keep: Sequence[int] | None) -> Tensor:
        """Logits ``(len(keep), V)`` of the flat ``token_ids`` at the indices ``keep`` (None: at all), until the next
        call."""
