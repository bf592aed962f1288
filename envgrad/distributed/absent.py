"""Where one rank plays for all, this stands for its sampler on the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from envgrad.sampling.sampler import Completion, SamplingParams, Session

if TYPE_CHECKING:
    from torch import Tensor


class AbsentSampler:
    """A ``Sampler`` that is never asked, and knows what the real one says of itself.

    Example:
        >>> absent = AbsentSampler(exact_logprobs=True, takes_adapters=False)
        >>> absent.update_weights(3, None)
        >>> absent.policy_version, absent.exact_logprobs
        (3, True)
    """

    max_context = 1 << 30

    def __init__(self, *, exact_logprobs: bool, takes_adapters: bool) -> None:
        self.exact_logprobs = exact_logprobs
        self.takes_adapters = takes_adapters
        self.policy_version = 0

    def begin(self, session: Session) -> None:
        raise AssertionError("another rank plays")

    def end(self, session: Session) -> None:
        raise AssertionError("another rank plays")

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams, session: Session) -> Completion:
        raise AssertionError("another rank plays")

    def update_weights(self, version: int, named_tensors: Mapping[str, Tensor] | None) -> None:
        self.policy_version = version

    def close(self) -> None:
        """Nothing is open."""
