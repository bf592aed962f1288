"""Who plays an episode in the place of a model: the rollout's own code plays it, so that its rules hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from envgrad.sampling.sampler import Session

if TYPE_CHECKING:
    from torch import Tensor

    from envgrad.chat.template import ToolSchemas


class Actor:
    """A sampler and a renderer at once, whose token ids mean what it likes.

    This is what such actors share: nothing is kept of a session, there are no weights, and any tools can be shown.
    ``sample``, ``read`` and what turns messages into ids are the actor's own.

    Example:
        >>> Actor().exact_logprobs
        True
    """

    stop_token_ids: tuple[int, ...] = ()
    policy_version = 0
    exact_logprobs = True

    def begin(self, session: Session) -> None:
        """Nothing is kept of a session."""

    def end(self, session: Session) -> None:
        """Nothing is kept of a session."""

    def close(self) -> None:
        """Nothing is open."""

    def update_weights(self, version: int, named_tensors: Mapping[str, Tensor] | None) -> None:
        """There are none."""

    def check(self, tools: ToolSchemas) -> None:
        """Nothing is rendered."""
