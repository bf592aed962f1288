"""Who answers prompts: the ``Sampler`` protocol and its records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one answer is sampled.

    ``seed`` makes the answer independent of what else is in the batch: the same prompt, params and weights give the
    same tokens alone or among others (up to float rounding).

    Example:
        >>> SamplingParams(max_tokens=16, seed=7).greedy
        False
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all"""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A sampled answer. ``token_ids`` holds the sampled terminator too, with its own log-prob.

    Log-probs are of the full temperature-scaled distribution, before top-p, top-k, min-p and penalties.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: Literal["stop", "length"]
    """``stop``: a stop token or stop string; ``length``: ``max_tokens`` reached"""
    policy_version: int
    """the policy of the first token"""
    versions: tuple[int, ...] | None = None
    """each token's policy, where weights were updated while the answer was sampled; None: all ``policy_version``"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One episode attempt, as the sampler sees it: its requests extend each other, and siblings share a prompt.

    ``order`` (task position, sibling, attempt) gives requests an order that does not depend on the clock.
    """

    key: str
    group: str
    order: tuple[int, ...]


class Sampler(Protocol):
    """Answers prompts. All methods but ``update_weights`` and ``close`` are called from the rollout loop's thread.

    ``begin`` and ``end`` bracket a session, so that a sampler can keep its KV rows between its turns (``end`` frees
    them) and knows how many episodes may still ask.
    """

    def begin(self, session: Session) -> None: ...

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams, session: Session) -> Completion:
        """Sample one answer to ``prompt_ids`` (the session's whole row so far).

        Raises:
            SamplerFailure: the sampler could not answer this request.
        """
        ...

    def end(self, session: Session) -> None: ...

    def update_weights(self, version: int, named_tensors: Mapping[str, Tensor] | None) -> None:
        """Serve policy ``version`` from now on; returns when it is served. ``None`` if the sampler shares the trainer's
        module. Answers that are being sampled go on under the new weights, with keys and values of the new weights
        only, and tell each token's version.

        Raises:
            Exception: the weights could not be taken over, or the sampler is dead. The old version is kept, whole.
        """
        ...

    @property
    def policy_version(self) -> int: ...

    @property
    def exact_logprobs(self) -> bool:
        """Whether its log-probs are those that training computes, to float rounding; else the trainer recomputes them.

        What the trainer does by itself to make them differ (dropout, autocast) does not count.
        """
        ...

    @property
    def max_context(self) -> int:
        """Longest row (prompt and answer) in tokens."""
        ...

    def close(self) -> None: ...
